"""Control sockets: who is there, with what, what is dropped, and how far senders have come."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from omnirelay.status import StageLimits, StageLoad
from omnirelay.values import STAGES, AddressText, Count, Name, PositiveCount, RequestId, StageName

Sender = Annotated[
    str, Meta(max_length=140, pattern=r"^(gateway|thinker|talker|token2wav)\.[A-Za-z0-9_-]{1,128}\Z")
]
"""A stage's replica, as it goes by on the control socket, or the gateway."""
Channel = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Position = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="mark"):
    """Any sender to its receiver, between its other messages: tell me when you have come to this.

    Attributes:
        sender: Who is to be told.
        channel: The sending queue, by the name that it drew.
        position: Bytes that the queue has sent before.
    """

    sender: Sender
    channel: Channel
    position: Position


class Credit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="credit"):
    """Receiver to sender, on the control socket and over the gateway: I have taken all before this mark.

    Attributes are those of :class:`Mark`.
    """

    sender: Sender
    channel: Channel
    position: Position


Role = Literal["gateway", "thinker", "talker", "token2wav"]
"""What a process of the stack is."""
ROLES: Final[tuple[Role, ...]] = ("gateway", *STAGES)
HEARTBEAT_SUFFIX: Final = ".heartbeat"
"""On the control socket the heartbeats of a replica go by its identity with this behind."""
MAX_REPLICAS: Final = 256
"""Most replicas of one stage."""
MAX_HEARTBEAT_S: Final = 60.0
MISSED_HEARTBEATS: Final = 3
"""Intervals of silence that replica and gateway allow each other, even if their timeouts are shorter."""
GATEWAY_NAME_BYTES: Final = 4
"""Of the random name that a gateway draws when it starts; it is written in hexadecimal."""


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="heartbeat"):
    """Stage to gateway, on the control socket: I am here, ready, and this is what I hold.

    Attributes:
        instance: The replica's name, drawn at random when the process starts; process ids are all alike in
            containers.
        inbox: The address by which others reach it.  Where it listens on all addresses of its machine, the
            gateway puts in the one from which the heartbeat came.
        limits: Fixed limits, repeated so that a gateway that starts later learns them.
        load: What it held when its loop last came round.
        peak_memory_bytes: Largest resident set of the process so far.
        busy_s: Seconds since then; large while a long step is computed.
        gateway: The gateway whose requests it takes; none while it knows of none.
        peers: The replicas of the next stage that it can send to; none if these are still the ones last told.
        draining: It ends soon, and wants nothing new.
        breaks: How often a connection has ended, by the replica of the next stage, or ``gateway`` for that of
            its events; without those that never have.  Whatever was under way may be lost.
        alone: The gateway's request that is the only one in the engine's steps now; see :attr:`Route.alone`.
    """

    stage: StageName
    pid: PositiveCount
    instance: Name
    inbox: AddressText
    limits: StageLimits
    load: StageLoad
    peak_memory_bytes: Annotated[int, Meta(ge=0)] = 0
    busy_s: Annotated[float, Meta(ge=0)] = 0.0
    gateway: Name | None = None
    peers: Annotated[list[Name], Meta(max_length=MAX_REPLICAS)] | None = None
    draining: bool = False
    breaks: Annotated[dict[Name, Count], Meta(max_length=MAX_REPLICAS + 1)] = {}
    alone: RequestId | None = None


class Farewell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="farewell"):
    """Stage to gateway, on the control socket: I end now, whatever of requests is still here."""

    stage: StageName
    instance: Name


class Peers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="peers"):
    """Gateway to stage, on the control socket, in answer to each heartbeat.

    Attributes:
        gateway: The gateway's name, drawn at random when it starts; its requests' ids begin with it.
        replicas: The replicas of the next stage and their addresses; none if the heartbeat's peers are all of
            them.
        heartbeat_s: Time until the next heartbeat; more than the stage's own if there are many replicas.
        released: To one that drains: no request needs it any more.
        alone: That of the heartbeat: the engine may compute this request now.
    """

    gateway: Name
    replicas: Annotated[dict[Name, AddressText], Meta(max_length=MAX_REPLICAS)] | None = None
    heartbeat_s: Annotated[float, Meta(ge=0, le=MAX_HEARTBEAT_S)] = 0.0
    released: bool = False
    alone: RequestId | None = None


class Closing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="closing"):
    """Gateway to stage, on the control socket: I end now; none of my requests lives any more."""


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="abort"):
    """Gateway to stage, on the control socket: drop everything of this request, now and later."""

    request_id: RequestId


class AbortDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="abort_done"):
    """Stage to gateway, on the control socket: nothing of this request is left here."""

    request_id: RequestId
    stage: StageName
    instance: Name


def gateway_of(request_id: str) -> str:
    """The name of a request's gateway, with which all its ids begin."""
    return request_id[: 2 * GATEWAY_NAME_BYTES]


def control_identity(stage: StageName, instance: str) -> str:
    """What a replica goes by on the control socket."""
    return f"{stage}.{instance}"


ControlToGateway = Heartbeat | AbortDone | Farewell | Credit
ControlToStage = Peers | Abort | Closing | Credit
