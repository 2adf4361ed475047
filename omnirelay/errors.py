"""Every error that OmniRelay raises on purpose.

The ``code`` of a class is stable: clients, logs and metrics see it.  A :class:`RequestError` ends one request
and is reported to its client; the others end the operation that raised them.
"""

from typing import ClassVar, Final

from omnirelay.values import in_words

MAX_SAID: Final = 256
"""Most characters quoted from a library's error about input."""


class OmniRelayError(Exception):
    """Base of all errors raised on purpose by OmniRelay."""

    code: ClassVar[str] = "internal"
    private: ClassVar[bool] = False
    """The message may quote the client's input, so it is not logged."""

    @property
    def for_log(self) -> str:
        """The code, with the message unless it is private."""
        return self.code if self.private else f"{self.code}: {self}"


class ConfigError(OmniRelayError):
    """The configuration file or an environment override is not valid."""

    code = "config_invalid"


class CheckpointError(OmniRelayError):
    """A checkpoint lacks a file or value, or has an invalid one."""

    code = "checkpoint_invalid"


class CheckpointAccessError(CheckpointError):
    """The user may not read a checkpoint's files."""

    code = "checkpoint_unreadable"


class OutputError(OmniRelayError):
    """A command cannot write a file."""

    code = "output_unwritable"


class StandardOutputError(OutputError):
    """A command cannot write its standard output, so it can report nothing more there."""

    code = "stdout_unwritable"


class MissingPackageError(OmniRelayError):
    """An optional package is not installed.

    Args:
        package: Its name.
        extra: The extra that installs it.
        distribution: The distribution with that extra.
    """

    code = "package_missing"

    def __init__(self, package: str, extra: str, distribution: str = "omnirelay") -> None:
        super().__init__(f"needs {package}, which is not installed: pip install '{distribution}[{extra}]'")


class PlayerError(OmniRelayError):
    """There is no player for speech, or it failed."""

    code = "player_failed"


class AddressInUseError(OmniRelayError):
    """Another process already listens on a configured address."""

    code = "address_in_use"


class StageStartError(OmniRelayError):
    """A process of the stack ended or hung before it was ready."""

    code = "stage_start_failed"


class ClusterError(OmniRelayError):
    """There is no Ray cluster, no stack on it, or already one; or it cannot do what was asked."""

    code = "cluster_failed"


class StateTransitionError(OmniRelayError):
    """A request cannot move between these two states."""

    code = "state_transition_invalid"


class MessageError(OmniRelayError):
    """A message from a socket is invalid; it is rejected and counted."""

    code = "message_invalid"


class VersionError(MessageError):
    """The peer uses another version of the wire format."""

    code = "version_unsupported"


class PayloadError(MessageError):
    """A tensor of a message is inconsistent or too large; ``field`` names the part of the message."""

    code = "payload_invalid"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class SequenceError(MessageError):
    """A message of an unknown request, or out of order."""

    code = "sequence_invalid"


class RepeatedMessageError(SequenceError):
    """A message that arrived twice; the second is rejected, and the request goes on."""

    code = "message_repeated"


class QueueFullError(OmniRelayError):
    """The outgoing queue has reached its byte limit because the peer does not keep up."""

    code = "queue_full"


class WorkerLostError(OmniRelayError):
    """A worker process of a stage's engine has ended; the engine cannot compute any more."""

    code = "worker_lost"


class EngineFailedError(OmniRelayError):
    """A stage's engine raised in a step; the stage fails its requests and ends."""

    code = "engine_failed"
    exit_status: ClassVar[int] = 70
    """EX_SOFTWARE of sysexits.h."""


class RequestError(OmniRelayError):
    """Ends one request, and is reported to its client."""

    code = "request_failed"
    private = True


class InvalidRequestError(RequestError):
    """A missing, unknown or out-of-range value in the request; ``param`` names it where it is known."""

    code = "invalid_request"
    place: ClassVar[str | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = self.place if param is None else param


class UnsupportedError(InvalidRequestError):
    """The request needs something that this server does not do."""

    code = "unsupported"


class UnsupportedFormatError(UnsupportedError):
    """The server cannot encode audio in the requested format."""

    code = "unsupported_format"


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served."""

    code = "model_not_found"


class UnknownResponseError(InvalidRequestError):
    """The response that a request continues is not kept, or is another client's."""

    code = "previous_response_not_found"


class NoResponseError(InvalidRequestError):
    """A realtime session has no response that could be cancelled."""

    code = "response_cancel_not_active"


class SessionNotResumedError(InvalidRequestError):
    """A realtime client gets a new session instead of the one that it asks for."""

    code = "session_not_resumed"


class EmptyAudioError(InvalidRequestError):
    """A realtime client commits an empty input audio buffer."""

    code = "input_audio_buffer_commit_empty"


class DuplicateItemError(InvalidRequestError):
    """A realtime conversation already has an item of this id."""

    code = "item_create_duplicate_item_id"


class RetrievedItemError(InvalidRequestError):
    """A realtime conversation lacks the item that a client retrieves."""

    code = "item_retrieve_invalid_item_id"


class DeletedItemError(InvalidRequestError):
    """A realtime conversation lacks the item that a client deletes."""

    code = "item_delete_invalid_item_id"


class TruncatedItemError(InvalidRequestError):
    """A realtime conversation lacks the item that a client truncates."""

    code = "item_truncate_invalid_item_id"


class EmptyPromptError(InvalidRequestError):
    """The prompt has no text."""

    code = "prompt_empty"
    place = "messages"


class PromptTooLongError(InvalidRequestError):
    """The prompt has more tokens than the thinker or the talker takes."""

    code = "prompt_too_long"
    place = "messages"


class MediaError(InvalidRequestError):
    """An audio, image or video item cannot be used; the message names the item and the reason."""

    code = "media_invalid"
    place = "messages"


class MediaTooLargeError(MediaError):
    """A media item exceeds a limit, or there are too many."""

    code = "media_too_large"


class MediaUnreachableError(MediaError):
    """The URL of a media item is not allowed or cannot be fetched."""

    code = "media_unreachable"


class InvalidResumeError(InvalidRequestError):
    """The partial answer that a client goes on from cannot be one of this request."""

    code = "resume_invalid"
    place = "resume"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message if message.startswith("resume.") else f"resume.{message}", param)


class UnknownSpeakerError(InvalidRequestError):
    """The checkpoint has no such voice."""

    code = "unknown_speaker"
    place = "speaker"


class RequestTooLargeError(RequestError):
    """The body of an HTTP request is too large."""

    code = "request_too_large"


class SlowUploadError(RequestError):
    """The body of an HTTP request arrives too slowly."""

    code = "upload_too_slow"


class UnknownRequestError(RequestError):
    """No request of that id, or it ended too long ago."""

    code = "request_not_found"


class CallsDisabledError(RequestError):
    """The gateway takes no calls by WebRTC."""

    code = "calls_disabled"
    private = False


class UnauthenticatedError(RequestError):
    """Missing or invalid API key."""

    code = "unauthenticated"


class OriginError(RequestError):
    """A browser sent the request for a page of another origin."""

    code = "origin_refused"


class BusyError(RequestError):
    """The gateway is at its limit; retry later."""

    code = "busy"
    private = False

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class StoppingError(BusyError):
    """The gateway is shutting down; retry at another gateway."""

    code = "stopping"


class CancelledRequestError(RequestError):
    """The client cancelled the request or disconnected."""

    code = "cancelled"
    private = False


class DeadlineError(RequestError):
    """The request did not finish before its deadline."""

    code = "deadline_exceeded"
    private = False


class StageUnavailableError(RequestError):
    """A stage that the request needs is not available."""

    code = "stage_unavailable"
    private = False


class StageFailedError(RequestError):
    """A stage failed while processing the request."""

    code = "stage_failed"
    private = False


class PoisonRequestError(RequestError):
    """A stage's engine crashed on the request, and again when it processed the request alone."""

    code = "poison_request"
    private = False


class SlowClientError(RequestError):
    """The client does not read its answer fast enough."""

    code = "client_too_slow"
    private = False


class GatewayUnreachableError(OmniRelayError):
    """The client cannot reach the gateway, or lost the connection."""

    code = "gateway_unreachable"


def said(error: Exception) -> str:
    """A library's error as part of a message of ours: shortened and in one line, since it may quote input."""
    return in_words(str(error))[:MAX_SAID].encode("unicode_escape").decode("ascii")
