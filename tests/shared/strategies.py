"""Hypothesis strategies: every message there is, with every value it may have."""

import math
from typing import Any

from hypothesis import strategies as st

from omnirelay.status import CodecLimits
from shared import messages
from shared.messages import STAGES, Sampling, SpeechSettings, StageLimits, StageLoad
from shared.messages.payloads import (
    ITEM_SIZE,
    ROW_DTYPES,
    AdditionalInformationEntry,
    AdditionalInformationPayload,
    Blob,
    PromptEmbedsPayload,
)

request_ids = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
counts = st.integers(0, 2**31 - 1)
positive_counts = st.integers(1, 2**31 - 1)
sizes = st.integers(0, 2**63 - 1)
seeds = st.integers(0, 2**63 - 1)
priorities = st.integers(-1000, 1000)
names = st.text(min_size=1, max_size=128)
token_lists = st.lists(counts, max_size=20)
# NaN is not equal to itself, so it would only confuse comparisons.
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
plain_values = st.none() | st.booleans() | st.text(max_size=8) | numbers

samplings = st.builds(
    Sampling,
    max_tokens=positive_counts,
    min_tokens=counts,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 2**20),
    top_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(0.1, 10),
)
text_samplings = st.builds(
    messages.TextSampling,
    max_tokens=positive_counts,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_p=st.floats(0, 1),
    logit_bias=st.dictionaries(counts, st.floats(-100, 100), max_size=5),
    logprobs=st.none() | st.integers(0, 20),
    json_schema=st.none() | st.text(min_size=2, max_size=10),
)
traceparents = st.none() | st.builds(
    "00-{:032x}-{:016x}-{:02x}".format,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.integers(0, 255),
)
speech_settings = st.builds(
    SpeechSettings, speaker=names, sampling=samplings, seed=seeds, streaming=st.booleans()
)


@st.composite
def row_payloads(draw: st.DrawFn) -> PromptEmbedsPayload:
    shape = (draw(st.integers(0, 4)), draw(st.integers(0, 6)))
    dtype = draw(st.sampled_from(ROW_DTYPES))
    size = math.prod(shape) * ITEM_SIZE[dtype]
    data = Blob(draw(st.binary(min_size=size, max_size=size)))
    return PromptEmbedsPayload(shape=shape, dtype=dtype, data=data)


@st.composite
def tensor_entries(draw: st.DrawFn) -> AdditionalInformationEntry:
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=8)))
    dtype = draw(st.sampled_from(sorted(ITEM_SIZE)))
    if math.prod(shape) > 64:
        shape = ()
    size = math.prod(shape) * ITEM_SIZE[dtype]
    data = Blob(draw(st.binary(min_size=size, max_size=size)))
    return AdditionalInformationEntry(tensor_data=data, tensor_shape=shape, tensor_dtype=dtype)


@st.composite
def audio_chunks(draw: st.DrawFn) -> messages.AudioChunk:
    samples = draw(st.integers(0, 12))
    data = Blob(draw(st.binary(min_size=4 * samples, max_size=4 * samples)))
    return messages.AudioChunk(
        request_id=draw(request_ids), seq=draw(counts), samples=samples, data=data, last=draw(st.booleans())
    )


list_entries = st.builds(AdditionalInformationEntry, list_data=st.lists(plain_values, max_size=6))
additional_payloads = st.builds(
    AdditionalInformationPayload,
    entries=st.dictionaries(names, list_entries | tensor_entries(), max_size=3),
)
deltas: dict[str, Any] = {
    "request_id": request_ids,
    "seq": counts,
    "token_ids": token_lists,
    "finish_reason": st.sampled_from([None, "stop", "length"]),
}

addresses = st.text(min_size=1, max_size=30)
routes = st.none() | st.builds(
    messages.Route,
    thinker=names,
    talker=st.none() | names,
    token2wav=st.none() | names,
    alone=st.lists(st.sampled_from(STAGES), max_size=3).map(tuple),
)
resumed_speech = st.builds(
    messages.ResumedSpeech,
    codec_token_ids=token_lists,
    finish_reason=st.sampled_from([None, "stop", "length"]),
    chunk_samples=st.lists(counts, max_size=5),
)
resumes = st.none() | st.builds(
    messages.Resume,
    text_token_ids=token_lists,
    finish_reason=st.sampled_from([None, "stop", "length"]),
    speech=st.none() | resumed_speech,
)

thinker_input: st.SearchStrategy[Any] = st.builds(
    messages.ThinkRequest,
    request_id=request_ids,
    prompt_token_ids=st.lists(counts, min_size=1, max_size=20),
    sampling=text_samplings,
    seed=seeds,
    priority=priorities,
    speech=st.none() | speech_settings,
    traceparent=traceparents,
    resume=resumes,
    route=routes,
    early=st.none() | st.sampled_from(["prompt", "recording"]),
)
talker_input: st.SearchStrategy[Any] = st.builds(
    messages.SpeechStart,
    request_id=request_ids,
    prompt_tokens=positive_counts,
    priority=priorities,
    speech=speech_settings,
    traceparent=traceparents,
    resume=st.none() | resumed_speech,
    route=routes,
) | st.builds(
    messages.ConditioningRows,
    request_id=request_ids,
    seq=counts,
    start=counts,
    rows=row_payloads(),
    additional=additional_payloads,
    last=st.booleans(),
)
token2wav_input: st.SearchStrategy[Any] = st.builds(
    messages.SynthesisStart,
    request_id=request_ids,
    priority=priorities,
    speech=speech_settings,
    traceparent=traceparents,
    chunk_samples=st.lists(counts, max_size=5),
    route=routes,
) | st.builds(
    messages.CodecTokens, request_id=request_ids, seq=counts, token_ids=token_lists, last=st.booleans()
)
stage_events: st.SearchStrategy[Any] = st.one_of(
    st.builds(messages.TextDelta, **deltas),
    st.builds(messages.CodecDelta, **deltas, conditioned=st.booleans()),
    audio_chunks(),
    st.builds(
        messages.RequestFailed,
        request_id=request_ids,
        stage=st.sampled_from(STAGES),
        code=names,
        message=st.text(max_size=200),
    ),
)
positions: dict[str, Any] = {
    "sender": st.from_regex(r"(gateway|thinker|talker|token2wav)\.[A-Za-z0-9_-]{1,128}", fullmatch=True),
    "channel": st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
    "position": sizes,
}
marks = st.builds(messages.Mark, **positions)
credits_ = st.builds(messages.Credit, **positions)
control_to_gateway: st.SearchStrategy[Any] = st.builds(
    messages.Heartbeat,
    stage=st.sampled_from(STAGES),
    pid=positive_counts,
    instance=names,
    inbox=addresses,
    gateway=st.none() | names,
    peers=st.lists(names, max_size=3),
    draining=st.booleans(),
    limits=st.builds(
        StageLimits,
        max_positions=counts,
        speakers=st.lists(names, max_size=3),
        codec=st.none() | st.builds(CodecLimits, frame_samples=positive_counts, groups=positive_counts),
    ),
    load=st.builds(
        StageLoad,
        running=counts,
        waiting=counts,
        held_bytes=sizes,
        outbox_bytes=sizes,
        refused=sizes,
        steps=sizes,
    ),
    peak_memory_bytes=sizes,
    busy_s=st.floats(0, 1e6),
    alone=st.none() | request_ids,
) | st.one_of(
    st.builds(messages.AbortDone, request_id=request_ids, stage=st.sampled_from(STAGES), instance=names),
    st.builds(messages.Farewell, stage=st.sampled_from(STAGES), instance=names),
    credits_,
)
control_to_stage: st.SearchStrategy[Any] = st.one_of(
    st.builds(messages.Abort, request_id=request_ids),
    st.builds(messages.Closing),
    credits_,
    st.builds(
        messages.Peers,
        gateway=names,
        replicas=st.dictionaries(names, addresses, max_size=3),
        released=st.booleans(),
    ),
)

SOCKETS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "thinker": (messages.ThinkerInput | messages.Mark, thinker_input | marks),
    "talker": (messages.TalkerInput | messages.Mark, talker_input | marks),
    "token2wav": (messages.Token2WavInput | messages.Mark, token2wav_input | marks),
    "events": (messages.StageEvent | messages.Mark, stage_events | marks),
    "control at the gateway": (messages.ControlToGateway, control_to_gateway),
    "control at a stage": (messages.ControlToStage, control_to_stage),
}
"""Of every kind of socket: the union its decoder takes, and a strategy for what it may carry."""
