"""The gateway's report about itself and the stages.

Unknown fields are ignored, so that older clients read the reports of newer gateways.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omnirelay.values import Count, Name, PositiveCount, RepetitionPenalty, StageName, Temperature, TopK, TopP

StageState = Literal["starting", "ready", "draining", "down"]


class CodecDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """How codec tokens are sampled, unless a request says so; as in :class:`SamplingOverrides`."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    repetition_penalty: RepetitionPenalty = 1.0


class CodecLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The codec of a checkpoint's talker.

    Attributes:
        frame_samples: Samples that a frame lasts.
        trimmed_samples: So much shorter than its frames is a stream, at its beginning.
        groups: Ids of a frame.
        start_positions: Positions of the talker's prompt behind those of the thinker's prompt.
        defaults: How codec tokens are sampled.
    """

    frame_samples: PositiveCount = 480
    trimmed_samples: Count = 0
    groups: PositiveCount = 1
    start_positions: Count = 2
    defaults: CodecDefaults = CodecDefaults()


class StageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a stage's checkpoint and engine; constant while the process runs.

    Attributes:
        max_positions: Of one request.
        speakers: Its voices.
        codec: Of the talker.
        prefills: Prompts that the thinker computes early at a time; 0 without a prefix cache.
        batch: Requests that it computes at once.
    """

    max_positions: Count = 0
    speakers: Annotated[list[Name], Meta(max_length=1024)] = []
    codec: CodecLimits | None = None
    prefills: Count = 0
    batch: Count = 0


class StageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a stage at one moment.

    Attributes:
        running: Requests in the engine's batch.
        waiting: Requests that wait for memory, rows, tokens or media.
        held_bytes: Of prepared media (thinker) or conditioning rows (talker).
        outbox_bytes: That wait for slow receivers.
        refused: Messages, since the start.
        steps: Of the engine, since the start.
    """

    running: Count = 0
    waiting: Count = 0
    held_bytes: Annotated[int, Meta(ge=0)] = 0
    outbox_bytes: Annotated[int, Meta(ge=0)] = 0
    refused: Annotated[int, Meta(ge=0)] = 0
    steps: Annotated[int, Meta(ge=0)] = 0


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a stage as the gateway sees it, or a stage without replicas.

    Attributes:
        name: The stage.
        state: A stage without replicas has one map, with its state.
        replica: The process's random name.
        inbox: The address by which others reach it.
        heartbeat_age_s: Seconds since the last heartbeat.
        pid: Its process id.
        peak_memory_bytes: Its largest resident set so far.
        load: What it does now.
        limits: What it can do.
    """

    name: StageName
    state: StageState
    replica: str | None = None
    inbox: str | None = None
    heartbeat_age_s: float | None = None
    pid: int | None = None
    peak_memory_bytes: int = 0
    load: StageLoad = StageLoad()
    limits: StageLimits = StageLimits()


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's process.

    Attributes:
        version: OmniRelay's.
        pid: Its process id.
        uptime_s: Since its start.
        peak_memory_bytes: Its largest resident set so far.
        model: Directory of the checkpoint.
        text_only: Serves without speech.
    """

    version: str = ""
    pid: int
    uptime_s: float
    peak_memory_bytes: int
    model: str
    text_only: bool = False


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a status query.

    Attributes:
        gateway: The gateway's process.
        stages: The replicas of thinker, talker and token2wav.
        requests: Requests by state: open ones now, ended ones since the start. ``refused`` ones are not in
            ``failed``.
        refused: Messages refused since the start, by error code, from clients and stages.
        dropped_events: Events from stages for ended requests; normal after a cancel.
        resumes: How often requests were resumed after a stage was lost or failed.
    """

    gateway: GatewayStatus
    stages: list[StageStatus]
    requests: dict[str, int]
    refused: dict[str, int]
    dropped_events: int
    resumes: int = 0

    @property
    def ready(self) -> bool:
        """Every stage has a ready replica."""
        ready = {stage.name for stage in self.stages if stage.state == "ready"}
        return bool(ready) and ready == {stage.name for stage in self.stages}
