"""Every error OmniRelay raises on purpose, in one place.

Each class carries a stable, lower-case ``code``: the word that a client, a log line and a metric
see.  A message says what was wrong, where, and what to do.  Errors that derive from
:class:`RequestError` end one request and are told to its client; the others end the operation that
raised them.
"""

from typing import ClassVar, Final

MAX_SAID: Final = 256
"""Most characters that are repeated of what a library says of data from outside."""


class OmniRelayError(Exception):
    """Base of all errors raised on purpose by OmniRelay."""

    code: ClassVar[str] = "internal"
    private: ClassVar[bool] = False
    """The message may quote what a client sent: it is for that client, and not for the log."""

    @property
    def for_log(self) -> str:
        """The code, and the message if it is not private."""
        return self.code if self.private else f"{self.code}: {self}"


class ConfigError(OmniRelayError):
    """The configuration file or an environment override is not valid."""

    code = "config_invalid"


class CheckpointError(OmniRelayError):
    """A checkpoint lacks a file or a value, or a value in it cannot be used."""

    code = "checkpoint_invalid"


class CheckpointAccessError(CheckpointError):
    """This user may not read a checkpoint's files."""

    code = "checkpoint_unreadable"


class OutputError(OmniRelayError):
    """A file that a command was to write cannot be written."""

    code = "output_unwritable"


class StandardOutputError(OutputError):
    """The standard output of a command cannot be written: nothing more can be told there."""

    code = "stdout_unwritable"


class MissingPackageError(OmniRelayError):
    """An optional package is not installed.

    Args:
        package: Its name.
        extra: The extra of the distribution ``omnirelay`` that installs it.
    """

    code = "package_missing"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"needs {package}, which is not installed: pip install 'omnirelay[{extra}]'")


class AddressInUseError(OmniRelayError):
    """Another process already listens on an address of the configuration."""

    code = "address_in_use"


class StageStartError(OmniRelayError):
    """A process of the stack ended, or stayed silent, before it was ready."""

    code = "stage_start_failed"


class StateTransitionError(OmniRelayError):
    """A request was asked to move between two states that are not connected."""

    code = "state_transition_invalid"


class MessageError(OmniRelayError):
    """A message from a socket cannot be believed.  It is refused and counted."""

    code = "message_invalid"


class VersionError(MessageError):
    """A message was written in a version of the wire format that this build does not speak."""

    code = "version_unsupported"


class PayloadError(MessageError):
    """A tensor in a message lies about itself, or is larger than allowed.

    ``field`` names the part of the message that was refused.
    """

    code = "payload_invalid"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class SequenceError(MessageError):
    """A message belongs to no request known here, or is not the next one of its request."""

    code = "sequence_invalid"


class RepeatedMessageError(SequenceError):
    """A message came twice.  The second is refused; the request goes on."""

    code = "message_repeated"


class QueueFullError(OmniRelayError):
    """The peer does not keep up and the byte bound of the outgoing queue is reached."""

    code = "queue_full"


class EngineFailedError(OmniRelayError):
    """A stage's engine raised in a step; the stage reports every request that it had in work, and ends."""

    code = "engine_failed"
    exit_status: ClassVar[int] = 70
    """Of the process; EX_SOFTWARE of sysexits.h."""


class RequestError(OmniRelayError):
    """Ends one request; its code and message reach the client."""

    code = "request_failed"
    private = True


class InvalidRequestError(RequestError):
    """The request itself is wrong: a missing, unknown or out-of-range value.

    ``param`` names the part of the request, where that is known; for some classes it is always the same one.
    """

    code = "invalid_request"
    place: ClassVar[str | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = self.place if param is None else param


class UnsupportedError(InvalidRequestError):
    """The request asks for something that this server does not do."""

    code = "unsupported"


class UnsupportedFormatError(UnsupportedError):
    """The answer's audio cannot be written in the format that was asked for."""

    code = "unsupported_format"


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class EmptyPromptError(InvalidRequestError):
    """The prompt holds no text."""

    code = "prompt_empty"
    place = "messages"


class PromptTooLongError(InvalidRequestError):
    """The prompt has more tokens than the thinker or the talker can take."""

    code = "prompt_too_long"
    place = "messages"


class MediaError(InvalidRequestError):
    """A sound, picture or video of the request cannot be used; the message names the item and the reason."""

    code = "media_invalid"
    place = "messages"


class MediaTooLargeError(MediaError):
    """A sound, picture or video is larger or longer than allowed, or there are too many."""

    code = "media_too_large"


class MediaUnreachableError(MediaError):
    """The address of a sound, picture or video may not be, or cannot be, fetched."""

    code = "media_unreachable"


class UnknownSpeakerError(InvalidRequestError):
    """The checkpoint has no voice of that name."""

    code = "unknown_speaker"
    place = "speaker"


class RequestTooLargeError(RequestError):
    """The body of an HTTP request has more bytes than are read."""

    code = "request_too_large"


class SlowUploadError(RequestError):
    """The body of an HTTP request comes too slowly."""

    code = "upload_too_slow"


class UnknownRequestError(RequestError):
    """No request of that name is known, or it ended too long ago."""

    code = "request_not_found"


class UnauthenticatedError(RequestError):
    """The gateway asks for an API key, and the request brings none that it knows."""

    code = "unauthenticated"


class OriginError(RequestError):
    """A browser sends the request for a page of another origin."""

    code = "origin_refused"


class BusyError(RequestError):
    """The gateway holds as many requests as it may; try again later."""

    code = "busy"
    private = False

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class StoppingError(BusyError):
    """The gateway was told to stop, and only ends what it has; ask another one, or its successor."""

    code = "stopping"


class CancelledRequestError(RequestError):
    """The client cancelled the request, or went away."""

    code = "cancelled"
    private = False


class DeadlineError(RequestError):
    """The request did not finish before its deadline."""

    code = "deadline_exceeded"
    private = False


class StageUnavailableError(RequestError):
    """A stage that the request needs is not there."""

    code = "stage_unavailable"
    private = False


class StageFailedError(RequestError):
    """A stage failed while it worked on the request."""

    code = "stage_failed"
    private = False


class PoisonRequestError(RequestError):
    """A stage's engine ended while it worked on the request, and again while it worked on it alone."""

    code = "poison_request"
    private = False


class SlowClientError(RequestError):
    """The client does not read its answer fast enough."""

    code = "client_too_slow"
    private = False


class GatewayUnreachableError(OmniRelayError):
    """The client cannot reach the gateway, or lost the connection to it."""

    code = "gateway_unreachable"


def said(error: Exception) -> str:
    """What a library says of data from outside, as a part of a message of ours.

    It may quote the data at any length, line breaks included; a log has one line for each record.
    """
    return str(error)[:MAX_SAID].encode("unicode_escape").decode("ascii")
