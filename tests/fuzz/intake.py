"""The gateway up to the stages: requests are checked as they are in production, and go no further."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, cast

from gateway.access.access import Access
from gateway.access.account import ClientAccount
from gateway.dispatch.prefills import Prefills
from gateway.dispatch.registry import StageRegistry
from gateway.fairness.quota import Hold, MemoryBudget
from gateway.fairness.uploads import UploadRoom
from gateway.http.context import HttpContext
from gateway.input.media import MediaIntake
from gateway.input.prompt import PromptBuilder
from gateway.input.urls import decode_data_url, is_data_url
from gateway.manager import Gateway
from gateway.requests.lifecycle import StateCounts
from gateway.requests.metrics import GatewayMetrics, Interface, Outcome
from gateway.requests.response_stream import ResponseStream
from gateway.validation import Validator
from omnirelay.content import ChatMessage, TextPart, media_of, parts_of
from omnirelay.errors import CancelledRequestError, OmniRelayError
from omnirelay.protocol import GenerateRequest
from omnirelay.status import GatewayStatus, StatusReport
from shared.config import Config
from shared.families import QWEN2_5_OMNI
from shared.messages import Heartbeat, MediaItem, MediaKind, StageLimits, StageLoad, StageName, ThinkerInput
from shared.messages.payloads import Blob
from shared.transport.wire import Decoder, encode

TAKEN: Final = "cancelled"
"""The code by which a request ends that would have gone to the thinker."""
INTERNAL: Final = "internal"
"""The code of an error that nobody thought of: a fault."""
MODEL: Final = "tiny"
CONFIG: Final = Config()
STATUS: Final = StatusReport(
    gateway=GatewayStatus(pid=1, uptime_s=1.0, peak_memory_bytes=1, model=MODEL),
    stages=[],
    requests={"active": 1},
    refused={},
    dropped_events=0,
)


class Prompts:
    """Makes prompts without a tokenizer."""

    family = QWEN2_5_OMNI
    vocab_size = 1000
    placeholders: Mapping[int, MediaKind] = {900: "audio", 901: "image", 902: "video"}

    def build(self, messages: list[ChatMessage]) -> list[int]:
        """Give a prompt of a token for each part; a tokenizer takes what can be written as UTF-8."""
        parts = [part for message in messages for part in parts_of(message)]
        for part in parts:
            if isinstance(part, TextPart):
                part.text.encode()
        return [1] * len(parts)

    def encode(self, text: str) -> list[int]:
        """Give a prompt of one token for any text."""
        text.encode()
        return [1]


class Metrics(GatewayMetrics):
    """The gateway's, which also keep the codes of the errors that clients were told."""

    def __init__(self) -> None:
        super().__init__(StateCounts(), registry())
        self.codes: list[str] = []

    def told(self, interface: Interface, code: str) -> None:
        """Keep the code."""
        super().told(interface, code)
        self.codes.append(code)


class Intake:
    """Stands in for :class:`gateway.manager.Gateway`: what is taken ends with :data:`TAKEN`.

    Attributes:
        taken: The requests that were.
    """

    stopping = False

    def __init__(self) -> None:
        self.metrics = metrics()
        self.metrics.codes.clear()
        self.registry = registry()
        self.held = MemoryBudget(CONFIG.gateway.limits.held_bytes, lambda: 100)
        self.taken: list[GenerateRequest] = []
        nowhere: Any = None
        self.prefills = Prefills(self.registry, nowhere, nowhere, self.metrics, 1000)
        self.prompts = cast(PromptBuilder, Prompts())
        self.validator = Validator(CONFIG.gateway, self.registry, self.prompts)
        self._media = MediaIntake(CONFIG.media, None, _nowhere)

    async def submit(
        self, request: GenerateRequest, account: ClientAccount, near: str | None = None
    ) -> ResponseStream:
        """Refuse a request: for what is wrong with it, or because it is taken."""
        assert near in {None, "thinker"}
        hold = self.held.of(account.share)
        account.open()
        try:
            self._prepare(account.allowed(request), hold)
        finally:
            hold.release()
            account.end()
        self.taken.append(request)
        raise CancelledRequestError("it was taken")

    async def compute_early(
        self, request: GenerateRequest, account: ClientAccount, client: str, thinker: str, goes_on: bool
    ) -> Outcome:
        """Do what is done before the thinker hears of it."""
        del client, thinker, goes_on
        hold = self.held.of(account.share)
        try:
            self._prepare(request, hold)
        except OmniRelayError:
            return "failed"
        finally:
            hold.release()
        return "computed"

    def check_speaker(self, request: GenerateRequest) -> None:
        """As the gateway's."""
        self.validator.speaker(request)

    def voice_aliases(self) -> dict[str, str]:
        """As the gateway's."""
        return self.validator.voice_aliases()

    def report(self, _: str) -> None:
        """No request is known."""

    def _prepare(self, request: GenerateRequest, hold: Hold) -> None:
        """Do what is done before a stage hears of a request; the thinker must understand what it would."""
        self.validator.check_stages(request)
        speaker = self.validator.speaker(request)
        assert self.validator.deadline_s(request) > 0
        items = media_of(request.messages)
        self._media.check(items, hold)
        prompt = self.validator.prompt(request)
        think = self.validator.think_request("gw.1", request, prompt, speaker, 1)
        media = [MediaItem(kind=part.kind, data=Blob(data_of(name, part))) for name, part in items]
        frames = [bytes(each) for each in encode(think)]
        assert [bytes(each) for each in encode(_THINKER.decode(frames))] == frames
        assert len(media) == len(items)


def data_of(name: str, part: Any) -> memoryview | bytearray:
    """Give the file of a sound, picture or video as the gateway would."""
    if part.url is not None and is_data_url(part.url):
        return decode_data_url(name, part.url, CONFIG.media.max_item_bytes)
    return part.data


def context() -> tuple[HttpContext, Intake]:
    """Give what the HTTP API works with, and the gateway in it."""
    intake = Intake()
    uploads = UploadRoom(CONFIG.gateway.limits.held_bytes)
    return HttpContext(cast(Gateway, intake), CONFIG, lambda: STATUS, uploads, Access(CONFIG), MODEL), intake


@cache
def registry() -> StageRegistry:
    """Give stages that are ready."""
    found = StageRegistry(1.0, 1.0, "gw", lambda: 0.0)
    limits = StageLimits(max_positions=4096, speakers=["Chelsie", "Ethan"], prefills=8)
    peers: dict[StageName, list[str]] = {"thinker": ["talker"], "talker": ["token2wav"], "token2wav": []}
    for at, (stage, names) in enumerate(peers.items()):
        inbox = f"tcp://127.0.0.1:{7000 + at}"
        beat = Heartbeat(
            stage=stage,
            pid=1,
            instance=stage,
            inbox=inbox,
            limits=limits,
            load=StageLoad(),
            gateway="gw",
            peers=names,
        )
        found.note(beat)
    return found


@cache
def metrics() -> Metrics:
    """Give the gateway's metrics, which are the same for all."""
    return Metrics()


async def _nowhere(_: str, function: Callable[..., Any], *__: Any) -> Any:
    raise AssertionError(f"{function} is not to be called here")


_THINKER: Final[Decoder[ThinkerInput]] = Decoder(ThinkerInput)
