"""What the gateway tells about itself and the stages."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omnirelay.values import Count, Name, StageName

StageState = Literal["starting", "ready", "draining", "down"]


class StageLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage's checkpoint and engine allow; fixed while the process lives.

    Attributes:
        max_positions: Most positions (prompt + generated) of one request; 0 where it has no meaning.
        speakers: Names of the voices; empty from a stage that does not know them.
    """

    max_positions: Count = 0
    speakers: Annotated[list[Name], Meta(max_length=1024)] = []


class StageLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a stage holds at one moment.

    Attributes:
        running: Requests in the engine's batch.
        waiting: Requests that wait for memory, rows or tokens.
        held_bytes: Bytes of rows or codes held for them.
        outbox_bytes: Bytes encoded and not yet taken by the next stage.
        refused: Messages refused since the start.
        steps: Engine steps since the start.
    """

    running: Count = 0
    waiting: Count = 0
    held_bytes: Annotated[int, Meta(ge=0)] = 0
    outbox_bytes: Annotated[int, Meta(ge=0)] = 0
    refused: Annotated[int, Meta(ge=0)] = 0
    steps: Annotated[int, Meta(ge=0)] = 0


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a stage, as the gateway sees it; or a stage without any.

    Attributes:
        name: Which stage.
        state: ``starting`` before it takes requests, ``draining`` when it was told to stop, ``down`` when it
            fell silent.
        replica: The name that it has drawn; none of a stage without any.
        inbox: The address by which others reach it.
        heartbeat_age_s: Seconds since its last heartbeat; none before the first.
        pid: Its process id, from the last heartbeat.
        peak_memory_bytes: Its largest resident set so far.
        load: What it held at the last heartbeat.
        limits: What it allows.
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
    """The gateway's own process.

    Attributes:
        pid: Its process id.
        uptime_s: Seconds since it started.
        peak_memory_bytes: Its largest resident set so far.
        model: Directory of the checkpoint it takes the tokenizer from.
        text_only: Answers are not spoken; the thinker serves alone.
    """

    pid: int
    uptime_s: float
    peak_memory_bytes: int
    model: str
    text_only: bool = False


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a status query.

    Attributes:
        gateway: The gateway's own process.
        stages: The replicas of the stages that there are to be, in the order data flows.
        requests: Requests by state: living ones now, ended ones since the start.
        refused: Messages refused since the start, by error code.
        dropped_events: Events of stages for requests that had ended; normal after a cancel.
        resumes: How often a request was begun anew after a stage was lost or failed.
    """

    gateway: GatewayStatus
    stages: list[StageStatus]
    requests: dict[str, int]
    refused: dict[str, int]
    dropped_events: int
    resumes: int = 0

    @property
    def ready(self) -> bool:
        """A replica of each stage is ready."""
        ready = {stage.name for stage in self.stages if stage.state == "ready"}
        return bool(ready) and ready == {stage.name for stage in self.stages}
