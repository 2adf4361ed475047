"""The thinker's vLLM engine: how it is made and warmed up, and what it is told of requests."""

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from vllm import SamplingParams
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import MediaTooLargeError, StageStartError
from services.thinker.family import SpeechWriter, ThinkerFamily
from services.thinker.grammars import Grammars
from services.thinker.media.decoded import Decoded, DecodedAudio, DecodedImage, DecodedVideo
from services.thinker.media.rules import MediaRules, check_encodable
from services.thinker.penalties import AnswerPenalties
from services.thinker.scheduler import ThinkerScheduler
from shared.config import MediaConfig, ThinkerConfig
from shared.messages import MediaKind, TextSampling, ThinkRequest
from shared.playback import PlaybackClock
from shared.vllm.first_steps import first_steps, run_requests
from shared.vllm.generating import PLAYBACK_MARGIN_KEY
from shared.vllm.platform import build_engine, register_model
from shared.vllm.sampling.arguments import arguments_of
from shared.vllm.sampling.drawing import DrawProcessor
from shared.vllm.sampling.generation import sampling_params, submit
from shared.vllm.sampling.repetition import RepetitionProcessor


def build_thinker(
    family: ThinkerFamily, model: Path, config: ThinkerConfig, media: MediaConfig
) -> tuple[LLMEngine, MediaRules]:
    """Make the engine for the checkpoint in a directory; gives it and the checkpoint's rules of media."""
    engine = build_engine(
        "thinker",
        model,
        config.engine,
        log_stats=config.http is not None,
        hf_overrides={"architectures": [register_model(family.model)]},
        scheduler_cls=ThinkerScheduler,
        worker_cls="services.thinker.worker.ThinkerWorker",
        logits_processors=[RepetitionProcessor, AnswerPenalties, DrawProcessor],
        enable_prefix_caching=config.engine.enable_prefix_caching,
        additional_config={PLAYBACK_MARGIN_KEY: config.playback_margin_s},
        # A video may bring its sound.
        limit_mm_per_prompt={
            "audio": media.max_audios + media.max_videos,
            "image": media.max_images,
            "video": media.max_videos,
        },
        # Items are kept before they get to vLLM, by their files' digests (services.thinker.media.preparer).
        mm_processor_cache_gb=0,
        # There is no memory to be measured on a CPU: its KV cache has the size it is given.
        skip_mm_profiling=current_platform.is_cpu(),
    )
    rules = family.media(engine, media)
    core = engine.engine_core.engine_core
    core.scheduler.heard_s = 1 / family.rows_per_s
    if not current_platform.is_cpu():
        warm_up(engine, rules, family.end_tokens(engine.model_config.hf_config))
    return engine, rules


def speech_writer(family: ThinkerFamily, engine: LLMEngine, model: Path) -> SpeechWriter:
    """Read the rows that no step computes; raises CheckpointError at damaged voices or unknown tokens."""
    return family.speech(
        engine.model_config.hf_config,
        model,
        lambda ids: engine.collective_rpc("embed_tokens", args=(ids,))[0],
    )


def salted(prompt: TokensInput | MultiModalInput, salt: str | None) -> TokensInput | MultiModalInput:
    """The prompt, whose blocks and encoded media only prompts of the same salt share."""
    if salt is None:
        return prompt
    prompt = prompt.copy()
    prompt["cache_salt"] = salt
    if prompt["type"] == "multimodal":
        hashes = prompt["mm_hashes"].items()
        prompt["mm_hashes"] = {kind: [f"{salt}:{each}" for each in of_kind] for kind, of_kind in hashes}
    return prompt


def text_params(
    sampling: TextSampling, *, seed: int, end_tokens: list[int], room: int, made: int, wants_rows: bool
) -> SamplingParams:
    """A request's parameters.

    Takes, and raises, as :func:`sampling_params`; ``wants_rows`` if its conditioning rows are sent.
    """
    params = sampling_params(
        sampling,
        stage="thinker",
        seed=seed,
        stop_token_ids=end_tokens,
        room=room,
        made=made,
        further={
            "min_p": sampling.min_p,
            "logit_bias": sampling.logit_bias or None,
            "logprobs": sampling.logprobs,
        },
    )
    arguments = arguments_of(params)
    arguments.wants_rows = wants_rows
    arguments.presence, arguments.frequency = sampling.presence_penalty, sampling.frequency_penalty
    return params


_TOKENS: Final = 4
_SAMPLINGS: Final = (
    TextSampling(max_tokens=_TOKENS, logprobs=5, presence_penalty=0.5),
    TextSampling(max_tokens=_TOKENS, temperature=1.0, repetition_penalty=1.05),
    TextSampling(max_tokens=_TOKENS, temperature=1.0, top_k=40, top_p=0.8),
    TextSampling(max_tokens=_TOKENS, temperature=1.0, top_p=0.8, min_p=0.05, logit_bias={0: 1.0}),
)
_FOLLOWING: Final = TextSampling(max_tokens=_TOKENS, json_schema='{"type": "boolean"}')
_COMPILED_S: Final = 60.0
_SOUNDS_S: Final = (1, 8, 30)
_PICTURES: Final = ((480, 640), (720, 1280))
_VIDEO: Final = (360, 640)
_VIDEO_S: Final = 4


def warm_up(engine: LLMEngine, rules: MediaRules, end_tokens: list[int]) -> None:
    """Answer prompts with media of usual sizes, and in each way of sampling, alone and at once; forget them.

    Raises StageStartError if one failed.
    """
    with first_steps(engine):
        for prompt in _with_media(engine, rules):
            _answer(engine, end_tokens, prompt, _SAMPLINGS[:1])
        text = tokens_input([_plain(rules)] * 16)
        for sampling in _SAMPLINGS:
            _answer(engine, end_tokens, text, [sampling])
        _answer(engine, end_tokens, text, 2 * _SAMPLINGS)
        _follow_schema(engine, end_tokens, text)


def _with_media(engine: LLMEngine, rules: MediaRules) -> Iterator[MultiModalInput]:
    """Prompts of one item each, of those that the thinker takes."""
    scheduler: ThinkerScheduler = engine.engine_core.engine_core.scheduler
    most = engine.model_config.multimodal_config
    for number, (kind, decoded) in enumerate(_items(rules)):
        if kind not in rules.placeholders or not (most and most.get_limit_per_prompt(kind)):
            continue
        prompt = rules.lay_out(
            [_plain(rules), rules.placeholders[kind], _plain(rules)],
            [rules.prepare(f"warm-up {number}", decoded, f"{kind} before the stage is ready")],
        )
        try:
            check_encodable(prompt, scheduler.max_num_encoder_input_tokens)
        except MediaTooLargeError:
            # The stage would refuse it, too.
            continue
        if len(prompt["prompt_token_ids"]) + _TOKENS <= engine.model_config.max_model_len:
            yield prompt


def _items(rules: MediaRules) -> Iterator[tuple[MediaKind, Decoded]]:
    """Silence and darkness, of usual sizes."""

    def silence(seconds: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.zeros(round(min(seconds, rules.longest_audio_s) * rules.sampling_rate), np.float32)

    for seconds in _SOUNDS_S:
        yield "audio", DecodedAudio(silence(seconds))
    for height, width in _PICTURES:
        yield "image", DecodedImage(np.zeros((height, width, 3), np.uint8))
    sampling = rules.sampling
    patches = round(_VIDEO_S * sampling.frames_per_second / sampling.temporal_patch_size)
    frames = max(patches * sampling.temporal_patch_size, sampling.min_frames)
    yield "video", DecodedVideo(np.zeros((frames, *_VIDEO, 3), np.uint8), silence(_VIDEO_S))


def _plain(rules: MediaRules) -> int:
    """A token that stands for no media."""
    return next(
        token for token in range(len(rules.placeholders) + 1) if token not in rules.placeholders.values()
    )


def _answer(
    engine: LLMEngine,
    end_tokens: list[int],
    prompt: TokensInput | MultiModalInput,
    samplings: Sequence[TextSampling],
) -> None:
    """Answer a prompt, in several ways at once."""
    for number, sampling in enumerate(samplings):
        _submit(engine, end_tokens, f"warm-up {number}", prompt, sampling)
    _run(engine)


def _follow_schema(engine: LLMEngine, end_tokens: list[int], prompt: TokensInput) -> None:
    """Answer as a schema says."""
    wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
    grammars = Grammars(engine, end_tokens, wake_fd)
    request = ThinkRequest(
        request_id="warm-up grammar", prompt_token_ids=prompt["prompt_token_ids"], sampling=_FOLLOWING, seed=0
    )
    try:
        grammars.submit(request)
        if not select.select([wake_fd], [], [], _COMPILED_S)[0]:
            raise StageStartError(f"no grammar was compiled within {_COMPILED_S:g} s")
        for _, compiled in grammars.take():
            compiled.result()
        grammar = grammars.begin(request.request_id, [])
        grammars.attach(_submit(engine, end_tokens, request.request_id, prompt, _FOLLOWING), grammar)
        _run(engine)
    finally:
        grammars.close()
        os.close(wake_fd)


def _submit(
    engine: LLMEngine,
    end_tokens: list[int],
    name: str,
    prompt: TokensInput | MultiModalInput,
    sampling: TextSampling,
) -> str:
    scheduler: ThinkerScheduler = engine.engine_core.engine_core.scheduler
    room = engine.model_config.max_model_len - len(prompt["prompt_token_ids"])
    params = text_params(sampling, seed=0, end_tokens=end_tokens, room=room, made=0, wants_rows=True)
    engine_id = submit(engine, name, prompt, params, priority=0)
    scheduler.attach(engine_id, PlaybackClock(streaming=False))
    return engine_id


def _run(engine: LLMEngine) -> None:
    """Step until all have ended, and fetch their rows."""
    scheduler: ThinkerScheduler = engine.engine_core.engine_core.scheduler
    for _ in run_requests(engine):
        if scheduler.take_reads():
            engine.collective_rpc("read_rows")
