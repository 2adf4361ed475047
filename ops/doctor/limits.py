"""Whether the limits of the configuration fit each other, and the checkpoint."""

from typing import Final

from omnirelay.cli.output import MIB, mebibytes
from omnirelay.errors import ConfigError
from ops.doctor.finding import Findings, ok, problem, warning
from services.families.memory import Model, longest, position_bytes, require_divisible, require_one_dtype
from shared.config import Config
from shared.engine_defaults import CPU_BLOCK_SIZE, kv_cache_bytes
from shared.sharing import batch_of, engine_of, parallel

CHECK: Final = "limits"
LATE_BEATS: Final = 2
"""Heartbeats that may come late before a stage counts as gone."""
TEXT_BYTES: Final = MIB
"""Of a request beside its media: room for a long conversation."""


def check_limits(config: Config, on_cpu: bool) -> Findings:
    """Whether no limit makes another one pointless or harmful."""
    findings = [*_heartbeats(config), *_batches(config, on_cpu), *_sizes(config)]
    yield from findings
    if not findings:
        yield ok(CHECK, "the limits fit each other")


def check_cache(config: Config, model: Model, on_cpu: bool) -> Findings:
    """Whether the dtypes fit, and the KV caches hold the longest request; nothing starts otherwise.

    On a GPU vLLM measures what is left for the caches, unless a size is set.
    """
    try:
        require_one_dtype(config, model.dtype)
    except ConfigError as error:
        yield problem(CHECK, str(error), "see docs/models.md#numbers")
    for stage, paged in model.paged.items():
        engine = engine_of(config, stage)
        if engine is None or stage not in config.served_stages:
            continue
        try:
            require_divisible(config, stage, paged)
        except ConfigError as error:
            yield problem(CHECK, str(error), "see docs/models.md#a-model-on-several-devices")
            continue
        size, block = kv_cache_bytes(engine, on_cpu), engine.block_size or CPU_BLOCK_SIZE
        positions = longest(config, model, stage)
        if positions > paged.positions:
            what = f"stages.{stage}.engine.max_model_len is {positions}, the checkpoint has {paged.positions}"
            yield problem(CHECK, what, "lower it")
        elif size is not None:
            each = position_bytes(config, model, stage) // parallel(config, stage)
            # One block is vLLM's null block.
            blocks = max(1, size // (each * block)) - 1
            what = f"the {stage}'s KV cache of {mebibytes(size)} holds {blocks * block:,} positions"
            if blocks * block < positions:
                enough = (-(-positions // block) + 1) * block * each
                advice = f"set stages.{stage}.engine.kv_cache_memory_bytes to {enough} or more"
                advice += f", or max_model_len to {blocks * block} or less" if blocks else ""
                yield problem(CHECK, f"{what}, a request may have {positions:,}", advice)
            else:
                yield ok(CHECK, f"{what}; one request has at most {positions:,}")


def _heartbeats(config: Config) -> Findings:
    patience = config.gateway.heartbeat_timeout_s
    for stage in config.served_stages:
        beat = config.stage(stage).heartbeat_s
        if beat * LATE_BEATS > patience:
            what = f"the {stage} gives a sign every {beat:g} s, and counts as gone after {patience:g} s"
            advice = f"lower stages.{stage}.heartbeat_s or raise gateway.heartbeat_timeout_s"
            yield problem(CHECK, what, advice)


def _batches(config: Config, on_cpu: bool) -> Findings:
    admitted = config.gateway.limits.max_active
    for stage in config.served_stages:
        engine, batch = engine_of(config, stage), batch_of(config, stage, on_cpu)
        if admitted is not None and batch < admitted:
            what = f"the gateway admits {admitted} requests, the {stage} computes {batch} at once"
            advice = f"leave out limits.max_active, or equal it and stages.{stage}.engine.max_num_seqs"
            yield warning(CHECK, what, advice)
        if engine is not None and engine.max_num_batched_tokens < batch:
            what = f"a step of the {stage} has {engine.max_num_batched_tokens} tokens for {batch} requests"
            yield problem(CHECK, what, f"raise stages.{stage}.engine.max_num_batched_tokens")


def _sizes(config: Config) -> Findings:
    limits, media = config.gateway.limits, config.media
    if limits.request_bytes - media.max_request_bytes < TEXT_BYTES:
        what = f"a request with {mebibytes(media.max_request_bytes)} of media leaves no room for its text"
        yield warning(CHECK, what, "raise gateway.limits.request_bytes above media.max_request_bytes")
