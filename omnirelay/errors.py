"""Every error that OmniRelay raises on purpose.

The ``code`` of a class is stable: clients, logs and metrics see it.  A :class:`RequestError` ends one request
and is reported to its client; the others end the operation that raised them.
"""

from typing import ClassVar, Final

from omnirelay.values import in_words

MAX_SAID: Final = 256
"""Most characters quoted from a library's error about input."""


class OmniRelayError(Exception):
    """A bug in the gateway. The base class of all errors."""

    code: ClassVar[str] = "internal"
    private: ClassVar[bool] = False
    """The message may quote the client's input, so it is not logged."""

    @property
    def for_log(self) -> str:
        """The code, with the message unless it is private."""
        return self.code if self.private else f"{self.code}: {self}"


class ConfigError(OmniRelayError):
    """The configuration, its keys, or an address is wrong. The process does not start."""

    code = "config_invalid"


class CheckpointError(OmniRelayError):
    """The checkpoint is wrong. The process does not start; for a chunk, the client gets ``stage_failed``."""

    code = "checkpoint_invalid"


class CheckpointAccessError(CheckpointError):
    """The process may not read the checkpoint."""

    code = "checkpoint_unreadable"


class OutputError(OmniRelayError):
    """``omnirelay chat`` or ``demo`` could not write a file. The request may have completed."""

    code = "output_unwritable"


class StandardOutputError(OutputError):
    """Standard output is on a full disk."""

    code = "stdout_unwritable"


class MissingPackageError(OmniRelayError):
    """A package is missing; the message names the extra to install.

    Args:
        package: Its name.
        extra: The extra that installs it.
        distribution: The distribution with that extra.
    """

    code = "package_missing"

    def __init__(self, package: str, extra: str, distribution: str = "omnirelay") -> None:
        super().__init__(f"needs {package}, which is not installed: pip install '{distribution}[{extra}]'")


class PlayerError(OmniRelayError):
    """No audio player, or the player failed."""

    code = "player_failed"


class AddressInUseError(OmniRelayError):
    """Another process listens there. The process does not start."""

    code = "address_in_use"


class StageStartError(OmniRelayError):
    """``omnirelay up`` or ``demo``: a process ended at its start."""

    code = "stage_start_failed"


class ClusterError(OmniRelayError):
    """``omnirelay cluster``: no Ray cluster, no stack on it, or a stack too many."""

    code = "cluster_failed"


class StateTransitionError(OmniRelayError):
    """A bug; from token2wav a client gets ``stage_failed``."""

    code = "state_transition_invalid"


class MessageError(OmniRelayError):
    """A message cannot be decoded, or its sender may not send it. A client gets ``refused``."""

    code = "message_invalid"


class VersionError(MessageError):
    """The other side speaks another version. A client gets ``refused``."""

    code = "version_unsupported"


class PayloadError(MessageError):
    """A tensor's shape, dtype or bytes disagree.

    The request gets ``stage_failed``. ``field`` names the part of the message.
    """

    code = "payload_invalid"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class SequenceError(MessageError):
    """A message is missing or out of order. The request gets ``stage_failed``."""

    code = "sequence_invalid"


class RepeatedMessageError(SequenceError):
    """A message came twice. The request continues."""

    code = "message_repeated"


class QueueFullError(OmniRelayError):
    """A sender's queue is full. The request gets ``stage_failed``; at the gateway it waits."""

    code = "queue_full"


class WorkerLostError(OmniRelayError):
    """A worker process of an engine ended. The message of ``engine_failed`` has it."""

    code = "worker_lost"


class EngineFailedError(OmniRelayError):
    """An engine raised in a step.

    The stage ends with status 70, and its requests are resumed (docs/lifecycle.md#attempts), or get
    ``stage_failed``.
    """

    code = "engine_failed"
    exit_status: ClassVar[int] = 70
    """EX_SOFTWARE of sysexits.h."""


class RequestError(OmniRelayError):
    """Ends one request; the client library raises it for a code that it does not know."""

    code = "request_failed"
    private = True


class InvalidRequestError(RequestError):
    """The request is wrong; the message says where, and ``param`` names the value where it is known."""

    code = "invalid_request"
    place: ClassVar[str | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = self.place if param is None else param


class UnsupportedError(InvalidRequestError):
    """A field (docs/api.md#fields) that OmniRelay does not honour."""

    code = "unsupported"


class UnsupportedFormatError(UnsupportedError):
    """An audio format that is unknown, or needs PyAV."""

    code = "unsupported_format"


class UnknownModelError(InvalidRequestError):
    """No such model is served."""

    code = "model_not_found"


class UnknownResponseError(InvalidRequestError):
    """The response (docs/api-chat.md#responses) is not kept."""

    code = "previous_response_not_found"


class NoResponseError(InvalidRequestError):
    """Realtime: no response to cancel."""

    code = "response_cancel_not_active"


class SessionNotResumedError(InvalidRequestError):
    """Realtime: a new session instead of the one to resume (docs/api-realtime.md)."""

    code = "session_not_resumed"


class EmptyAudioError(InvalidRequestError):
    """Realtime: nothing to commit."""

    code = "input_audio_buffer_commit_empty"


class DuplicateItemError(InvalidRequestError):
    """Realtime: the item's id exists."""

    code = "item_create_duplicate_item_id"


class RetrievedItemError(InvalidRequestError):
    """Realtime: no such item to retrieve."""

    code = "item_retrieve_invalid_item_id"


class DeletedItemError(InvalidRequestError):
    """Realtime: no such item to delete."""

    code = "item_delete_invalid_item_id"


class TruncatedItemError(InvalidRequestError):
    """Realtime: no such item to truncate."""

    code = "item_truncate_invalid_item_id"


class EmptyPromptError(InvalidRequestError):
    """The prompt has neither text nor media."""

    code = "prompt_empty"
    place = "messages"


class PromptTooLongError(InvalidRequestError):
    """The prompt exceeds a limit or the checkpoint's positions."""

    code = "prompt_too_long"
    place = "messages"


class MediaError(InvalidRequestError):
    """A file cannot be read as audio, image or video."""

    code = "media_invalid"
    place = "messages"


class MediaTooLargeError(MediaError):
    """A file, or the files of a request, exceed a limit (docs/configuration.md#media)."""

    code = "media_too_large"


class MediaUnreachableError(MediaError):
    """An ``https:`` URL could not be fetched."""

    code = "media_unreachable"


class InvalidResumeError(InvalidRequestError):
    """A partial answer to continue (docs/protocol.md#going-on-after-a-loss) is impossible."""

    code = "resume_invalid"
    place = "resume"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message if message.startswith("resume.") else f"resume.{message}", param)


class UnknownSpeakerError(InvalidRequestError):
    """The checkpoint has no such voice."""

    code = "unknown_speaker"
    place = "speaker"


class RequestTooLargeError(RequestError):
    """A body or request exceeds ``request_bytes``."""

    code = "request_too_large"


class SlowUploadError(RequestError):
    """A body, frame or piece arrives too slowly."""

    code = "upload_too_slow"


class UnknownRequestError(RequestError):
    """``/v1/requests`` does not know the id."""

    code = "request_not_found"


class CallsDisabledError(RequestError):
    """Calls (docs/calls.md) are off."""

    code = "calls_disabled"
    private = False


class UnauthenticatedError(RequestError):
    """The API key is missing or invalid."""

    code = "unauthenticated"


class OriginError(RequestError):
    """A browser's page, or a host name, that is not allowed (docs/access.md#browsers)."""

    code = "origin_refused"


class BusyError(RequestError):
    """A limit is reached. Retry after ``retry_after_ms``."""

    code = "busy"
    private = False

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class StoppingError(BusyError):
    """The gateway is draining. Retry, or go to another gateway."""

    code = "stopping"


class CancelledRequestError(RequestError):
    """The client cancelled, or the gateway stopped before the end of the answer."""

    code = "cancelled"
    private = False


class DeadlineError(RequestError):
    """The deadline passed."""

    code = "deadline_exceeded"
    private = False


class StageUnavailableError(RequestError):
    """A stage is not ready, or the request's attempts or waiting time are used up."""

    code = "stage_unavailable"
    private = False


class StageFailedError(RequestError):
    """A stage failed the request."""

    code = "stage_failed"
    private = False


class PoisonRequestError(RequestError):
    """A stage's engine ended twice on this request (docs/lifecycle.md#requests-that-end-engines).

    Do not repeat it.
    """

    code = "poison_request"
    private = False


class SlowClientError(RequestError):
    """The client left too much of its answer unread."""

    code = "client_too_slow"
    private = False


class GatewayUnreachableError(OmniRelayError):
    """Client library: no connection to a gateway."""

    code = "gateway_unreachable"


def said(error: Exception) -> str:
    """A library's error as part of a message of ours: shortened and in one line, since it may quote input."""
    return in_words(str(error))[:MAX_SAID].encode("unicode_escape").decode("ascii")
