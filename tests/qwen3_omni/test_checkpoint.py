"""A random checkpoint of Qwen3-Omni: transformers loads and answers it, the gateway makes its prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from checkpoint.__main__ import main
from checkpoint.qwen3_omni import TINY
from gateway.input.prompt import PromptBuilder
from omnirelay.content import AudioPart, ChatMessage, ContentPart, ImagePart, TextPart, VideoPart
from shared.families import DESCRIPTIONS, QWEN3_OMNI, family_of
from tests.qwen3_omni.tiny import IM_END, Reference
from tests.support.children import Output

NOTHING = memoryview(b"")
PARTS: dict[str, ContentPart] = {
    "audio": AudioPart(data=NOTHING),
    "image": ImagePart(data=NOTHING),
    "video": VideoPart(data=NOTHING),
}
SOUND = np.random.default_rng(1).normal(0, 0.1, 16_000).astype(np.float32)
PICTURE = np.random.default_rng(1).integers(0, 255, (3, 64, 96), dtype=np.uint8)


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Any:
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompts_are_the_processors(checkpoint: Path, processor: Any, system: str | None) -> None:
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    asked = [{"type": kind} for kind in PARTS] + [{"type": "text", "text": "What is <|im_end|> this?"}]
    answered = [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": "A sea."}]
    plain = [ChatMessage("system", system)] if system is not None else []
    parts: list[ContentPart] = [*PARTS.values(), TextPart("What is <|im_end|> this?")]
    builder = PromptBuilder(checkpoint)
    prompt = builder.build([*plain, ChatMessage("user", parts), ChatMessage("assistant", "A sea.")])
    text = processor.apply_chat_template(answered, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nBe brief." if system else "<|im_start|>user\n")
    theirs = processor.tokenizer(text)["input_ids"]
    # Theirs has an end of a turn where the user has written it.
    assert theirs.count(IM_END) == prompt.count(IM_END) + 1
    assert processor.tokenizer.decode(prompt) == text
    assert [builder.placeholders[each] for each in prompt if each in builder.placeholders] == list(PARTS)
    assert builder.vocab_size == TINY.vocabulary


@pytest.mark.parametrize("kind", ["audio", "image"])
def test_media_are_answered_aloud(reference: Reference, processor: Any, kind: str) -> None:
    message = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": "What is this?"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    media = {"audio": [SOUND]} if kind == "audio" else {"images": [PICTURE]}
    inputs = processor(text=text, **media, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        sequence, wave = reference.model.generate(
            **inputs,
            speaker="Aiden",
            thinker_max_new_tokens=4,
            thinker_min_new_tokens=4,
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_max_new_tokens=4,
        )
    # A second of sound is 13 tokens; a picture of 64x96 pixels six.
    assert length == {"audio": 13, "image": 6}[kind] + len(processor.tokenizer(text)["input_ids"]) - 1
    assert sequence.shape[1] == length + 4
    assert 0.05 < wave.std() < 0.5


def test_it_is_what_its_family_says(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert family_of(config, DESCRIPTIONS) is QWEN3_OMNI
    speakers = config["talker_config"]["speaker_id"]
    assert sorted(speakers) == ["aiden", "chelsie", "ethan"]
    assert {QWEN3_OMNI.default_speaker.lower(), *map(str.lower, QWEN3_OMNI.voice_aliases.values())} <= set(
        speakers
    )


def test_equal_seeds_give_equal_bytes(checkpoint: Path, tmp_path: Path, capsys: Output) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    assert main([str(same), "--family", "qwen3-omni"]) == 0
    assert main([str(other), "--family", "qwen3-omni", "--seed", "1"]) == 0
    capsys.readouterr()
    for path in checkpoint.iterdir():
        assert path.read_bytes() == (same / path.name).read_bytes(), path.name
    assert (same / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert main([str(tmp_path / "none"), "--family", "qwen3-omni", "--size", "bench"]) == 1
    assert "sizes of qwen3-omni are tiny, small, not bench" in capsys.readouterr().err
