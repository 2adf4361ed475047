"""The gateway's report about itself and the stages."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omnirelay.values import Count, Name, StageName

StageState = Literal["starting", "ready", "draining", "down"]


class StageLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a stage's checkpoint and engine; constant while the process runs.

    Attributes:
        max_positions: Most positions (prompt and generated) of one request; 0 if not applicable.
        speakers: Names of the voices; empty from a stage that does not know them.
    """

    max_positions: Count = 0
    speakers: Annotated[list[Name], Meta(max_length=1024)] = []


class StageLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load of a stage at one moment.

    Attributes:
        running: Requests in the engine's batch.
        waiting: Requests that wait for memory, rows or tokens.
        held_bytes: Bytes of rows or codec tokens held for them.
        outbox_bytes: Encoded bytes that the next stage has not taken.
        refused: Messages rejected since the start.
        steps: Engine steps since the start.
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
        state: ``starting`` until it takes requests, ``draining`` after a stop signal, ``down`` after its
            heartbeats stopped.
        replica: Its random name; None for a stage without replicas.
        inbox: The address at which others reach it.
        heartbeat_age_s: Seconds since its last heartbeat; None before the first.
        pid: Its process id, from the last heartbeat.
        peak_memory_bytes: Its peak resident memory.
        load: Its load at the last heartbeat.
        limits: Its limits.
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
        pid: Its process id.
        uptime_s: Seconds since its start.
        peak_memory_bytes: Its peak resident memory.
        model: Directory of the checkpoint whose tokenizer it uses.
        text_only: Only the thinker runs; there is no speech.
    """

    pid: int
    uptime_s: float
    peak_memory_bytes: int
    model: str
    text_only: bool = False


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a status query.

    Attributes:
        gateway: The gateway's process.
        stages: The replicas of all expected stages, in the order data flows.
        requests: Requests by state: active ones now, ended ones since the start.
        refused: Messages rejected since the start, by error code.
        dropped_events: Late events of ended requests; normal after a cancel.
        resumes: How often a request was resumed after a stage was lost or failed.
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
