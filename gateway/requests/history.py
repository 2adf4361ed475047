"""What can be told of a request while it lives and for some time afterwards; nothing of what was said."""

from collections import OrderedDict
from typing import Final

import msgspec

from gateway.requests.lifecycle import AT_STAGES, RequestState
from gateway.requests.record import RequestRecord
from shared.messages import SAMPLE_RATE, StageName

MAX_ENDED: Final = 1000
"""Ended requests that are remembered; the oldest is forgotten for one more."""
_STAGE_OF: Final[dict[RequestState, StageName]] = {
    RequestState.THINKING: "thinker",
    RequestState.TALKING: "talker",
    RequestState.SYNTHESIZING: "token2wav",
}


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        id: The gateway's name of the request.
        state: Where it is.
        stage: The first stage that has not finished, or had not when the request ended; none for one that
            waits or is completed.
        speech: It asks for speech.
        received: Unix time.
        state_seconds: Seconds from then until each state was entered.
        prompt_tokens: Length of the prompt as far as it is known.
        text_tokens: Text tokens so far.
        codec_tokens: Codec tokens so far.
        audio_seconds: Speech so far.
        resumes: How often it was begun anew after a stage was lost or failed.
        error: The code of the error that ended it.
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
    """Tell of a request.

    Args:
        record: The request.
        resumes: How often it was begun anew.
        error: The code of the error that ended it.
    """
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


class RequestHistory:
    """The reports of requests that ended lately."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, RequestReport] = OrderedDict()

    def add(self, report: RequestReport) -> None:
        """Remember a request that ended."""
        self._ended[report.id] = report
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def get(self, request_id: str) -> RequestReport | None:
        """Give a report; none if the request is unknown or forgotten."""
        return self._ended.get(request_id)
