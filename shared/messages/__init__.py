"""Every message that crosses a socket between two OmniRelay processes, field by field.

A message is a msgspec struct with a tag; :mod:`shared.transport.wire` turns it into ZeroMQ frames and back.
Tensor bytes never sit inside the header: a field of type :class:`shared.messages.payloads.Blob` travels as a
frame of its own.
In every message ``request_id`` is the gateway's name for a request, unique among all living ones, and ``seq``
counts a request's messages of that type: 0, 1, 2, …

Edges (the direction data flows)::

    gateway   -> thinker    ThinkRequest
    thinker   -> talker     SpeechStart, ConditioningRows
    talker    -> token2wav  SynthesisStart, CodecTokens
    any stage -> gateway    TextDelta, CodecDelta, AudioChunk, RequestFailed
    each of these           Mark
    control, to the gateway Heartbeat, AbortDone, Farewell, Credit
    control, to a stage     Peers, Abort, Closing, Credit
"""

from omnirelay.status import StageLimits, StageLoad
from omnirelay.values import (
    MAX_TOP_K,
    SAMPLE_RATE,
    STAGES,
    FinishReason,
    MediaKind,
    Priority,
    RepetitionPenalty,
    Seed,
    StageName,
    Temperature,
    TopP,
)
from shared.messages.control import (
    GATEWAY_NAME_BYTES,
    HEARTBEAT_SUFFIX,
    MAX_REPLICAS,
    MISSED_HEARTBEATS,
    ROLES,
    Abort,
    AbortDone,
    Closing,
    ControlToGateway,
    ControlToStage,
    Credit,
    Farewell,
    Heartbeat,
    Mark,
    Peers,
    Role,
    control_identity,
    gateway_of,
)
from shared.messages.events import AudioChunk, CodecDelta, PromptUsage, RequestFailed, StageEvent, TextDelta
from shared.messages.request import (
    MAX_MEDIA_ITEMS,
    MEDIA_KINDS,
    Early,
    MediaItem,
    Resume,
    ResumedSpeech,
    Route,
    Sampling,
    SpeechSettings,
    TextSampling,
    ThinkerInput,
    ThinkRequest,
)
from shared.messages.speech import (
    CodecTokens,
    ConditioningRows,
    SpeechStart,
    SynthesisStart,
    TalkerInput,
    Token2WavInput,
)
