"""Reports of open and recently ended requests, without content."""

from collections import OrderedDict
from typing import Final

import msgspec

from gateway.requests.lifecycle import AT_STAGES, RequestState
from gateway.requests.record import RequestRecord
from shared.messages import SAMPLE_RATE, StageName

MAX_ENDED: Final = 1000
"""Beyond this the oldest report is dropped."""
_STAGE_OF: Final[dict[RequestState, StageName]] = {
    RequestState.THINKING: "thinker",
    RequestState.TALKING: "talker",
    RequestState.SYNTHESIZING: "token2wav",
}


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        id: The gateway's id of the request.
        state: ``queued``, ``thinking``, ``talking``, ``synthesizing``, ``completed``, ``failed``,
            ``cancelled`` or ``expired`` (states (docs/architecture.md#states)).
        stage: The first unfinished stage, now or when the request ended. Null if queued or completed.
        speech: Whether the request asks for speech.
        received: Unix time.
        state_seconds: Seconds from ``received`` until each state was entered.
        prompt_tokens: As far as known.
        text_tokens: So far.
        codec_tokens: So far.
        audio_seconds: So far.
        resumes: How often the request was resumed (docs/lifecycle.md#attempts).
        error: Code of its final error, or null.
    """

    id: str
    state: str
    stage: StageName | None
    speech: bool
    received: float
    state_seconds: dict[str, float]
    prompt_tokens: int
    text_tokens: int
    codec_tokens: int
    audio_seconds: float
    resumes: int = 0
    error: str | None = None


def report_of(record: RequestRecord, resumes: int = 0, error: str | None = None) -> RequestReport:
    """Describe a request."""
    lifecycle = record.lifecycle
    done = lifecycle.state is RequestState.COMPLETED
    furthest = None if done else next((s for s in reversed(lifecycle.entered) if s in AT_STAGES), None)
    return RequestReport(
        id=record.request_id,
        state=lifecycle.state.value,
        stage=_STAGE_OF[furthest] if furthest else None,
        speech=record.think.speech is not None,
        received=lifecycle.received_at,
        state_seconds=lifecycle.offsets(),
        prompt_tokens=record.prompt.tokens,
        text_tokens=len(record.text.token_ids),
        codec_tokens=len(record.codec.token_ids),
        audio_seconds=record.audio.samples / SAMPLE_RATE,
        resumes=resumes,
        error=error,
    )


class RequestHistory(OrderedDict[str, RequestReport]):
    """Reports of recently ended requests, by id."""

    def add(self, report: RequestReport) -> None:
        """Keep a report."""
        self[report.id] = report
        if len(self) > MAX_ENDED:
            self.popitem(last=False)
