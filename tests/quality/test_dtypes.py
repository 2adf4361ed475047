"""The stack in half precision, and with a thinker of four bits: the same answers, in intelligible words."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5OmniConfig

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.gpu.bare import synthesize, synthesizer_of
from benchmarks.gpu.reference import load_token2wav
from benchmarks.quality.__main__ import Listening
from benchmarks.quality.answers import SpokenReply, ask_all, held_out_requests
from labs.training.measure.recognizer import word_errors
from services.families.qwen2_5_omni.token2wav.dit import HalfLinear
from services.token2wav.chunks import SynthesisChunk
from tests.support.quantised import needs_four_bits, quantise
from tests.support.restarting import RestartingStack
from tests.token2wav.test_t2w_sound import CODES

pytestmark = [pytest.mark.quality, pytest.mark.timeout(900)]

KINDS = ("text", "images", "speech, trained")
LEAST_SAME = 0.75
"""The checkpoint is wrong often enough to be undecided; tokens almost as likely then change places."""
MOST_WORD_ERROR = 0.12
"""Of some seventy words, of which the float32 stack has one in twenty wrong."""


@pytest.fixture(scope="module")
def plain(stack: RestartingStack) -> list[SpokenReply]:
    """What the stack answers in float32 to what the checkpoint is good at."""
    asked = [each for each in held_out_requests(2) if each.kind.startswith(KINDS)]
    return asyncio.run(ask_all(stack.address, asked, clients=4))


async def test_half_precision_speaks_as_float32_does(
    speaking_checkpoint: Path, plain: list[SpokenReply]
) -> None:
    """In float16, too: the stack of a quantised thinker below."""
    engine = {"engine": {"dtype": "bfloat16"}}
    async with OmniRelay(speaking_checkpoint, {"stages": {"thinker": engine, "talker": engine}}) as server:
        check(await ask_all(server.address, [each.asked for each in plain], clients=4), plain)


@needs_four_bits
@pytest.mark.parametrize(("kind", "dtype"), [("awq", "float16"), ("gptq", "bfloat16")])
async def test_a_thinker_of_four_bits_speaks_as_a_plain_one_does(
    speaking_checkpoint: Path, plain: list[SpokenReply], tmp_path: Path, kind: str, dtype: str
) -> None:
    """As released: ``config.json`` says of the whole how the thinker is quantised and what to compute in."""
    quantise(speaking_checkpoint, kind, tmp_path / kind, dtype=dtype)
    async with OmniRelay(tmp_path / kind) as server:
        check(await ask_all(server.address, [each.asked for each in plain], clients=4), plain)


@torch.inference_mode()
def test_products_in_bfloat16_say_the_same_words(speaking_checkpoint: Path) -> None:
    """token2wav's, which are computed so on GPUs alone."""
    config = Qwen2_5OmniConfig.from_pretrained(speaking_checkpoint).token2wav_config
    tensors = load_token2wav(config, speaking_checkpoint).state_dict()
    hear, heard = Listening().hear, []
    for projection in (torch.nn.Linear, HalfLinear):
        made = synthesizer_of(config, speaking_checkpoint, tensors, torch.device("cpu"), projection)
        frames = len(CODES) * config.dit_config.repeats
        chunk = SynthesisChunk(
            codes=tuple(CODES), start=0, target_end=frames, seed=1, speaker="Ethan", is_last=True
        )
        heard.append(hear(synthesize(made, chunk).numpy()))
    assert all(word_errors("eighteen minus four is fourteen", each) <= 1 for each in heard)


def check(replies: list[SpokenReply], plain: list[SpokenReply]) -> None:
    """Most answers are the same, and all of them are understood."""
    same = sum(each.text == other.text for each, other in zip(replies, plain, strict=True))
    hear = Listening().hear
    errors = sum(word_errors(each.text, hear(each.samples)) for each in replies)
    words = sum(len(each.text.split()) for each in replies)
    assert same >= LEAST_SAME * len(replies)
    assert errors <= MOST_WORD_ERROR * words
    assert sum(each.ended for each in replies) >= len(replies) - 1
