"""The made checkpoint loads where the released one loads, and behaves like a model that speaks."""

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from checkpoint import RECIPE_FILE, RELEASED_VOCABULARY, TINY, CheckpointShape, write_checkpoint
from checkpoint.__main__ import main
from checkpoint.config import model_config
from checkpoint.shape import SpecialIds
from checkpoint.tokenizer import CHAT_TEMPLATE, build_tokenizer, user_id, write_tokenizer
from omnirelay.errors import CheckpointError

PROMPTS = ("Hello, how are you?", "Tell me about the sea.")


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Any:
    return transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny_checkpoint).eval()


@pytest.fixture(scope="module")
def processor(tiny_checkpoint: Path) -> Any:
    return transformers.Qwen2_5OmniProcessor.from_pretrained(tiny_checkpoint)


def ask(processor: Any, text: str) -> dict[str, torch.Tensor]:
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return dict(processor(text=prompt, return_tensors="pt"))


def answer(
    model: Any, inputs: dict[str, torch.Tensor], **options: Any
) -> tuple[list[int], list[int], torch.Tensor]:
    """Return the reply's text ids, its codec ids and its waveform."""
    codes: list[torch.Tensor] = []
    token2wav = model.token2wav.forward

    def listen(code: torch.Tensor, **others: Any) -> torch.Tensor:
        codes.append(code)
        wave: torch.Tensor = token2wav(code, **others)
        return wave

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.token2wav, "forward", listen)
        torch.manual_seed(0)
        sequence, wave = model.generate(**inputs, **options)
    return sequence[0, inputs["input_ids"].shape[1] :].tolist(), codes[0][0].tolist(), wave


def test_every_special_token_has_the_id_that_the_config_names(tiny_checkpoint: Path, processor: Any) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    thinker, talker = config["thinker_config"], config["talker_config"]
    named = {
        "<|AUDIO|>": "audio_token_index",
        "<|IMAGE|>": "image_token_index",
        "<|VIDEO|>": "video_token_index",
        "<|audio_bos|>": "audio_start_token_id",
        "<|audio_eos|>": "audio_end_token_id",
        "<|vision_bos|>": "vision_start_token_id",
        "<|vision_eos|>": "vision_end_token_id",
    }
    for text, key in named.items():
        expected = tokenizer.token_to_id(text)
        assert expected == thinker[key] == talker[key] == processor.tokenizer.convert_tokens_to_ids(text)
    for part in (thinker, thinker["text_config"]):
        assert part["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
        assert part["pad_token_id"] == tokenizer.token_to_id("<|endoftext|>")
    assert [thinker["user_token_id"]] == tokenizer.encode("user").ids
    assert talker["tts_text_pad_token_id"] == tokenizer.token_to_id("<|speech_pad|>")
    assert talker["tts_text_end_token_id"] == tokenizer.token_to_id("<|speech_end|>")
    voices = torch.load(tiny_checkpoint / "spk_dict.pt", weights_only=True)
    assert {name: voice["bos_token"] for name, voice in voices.items()} == {
        "Chelsie": tokenizer.token_to_id("<|voice_chelsie|>"),
        "Ethan": tokenizer.token_to_id("<|voice_ethan|>"),
    }


def test_text_goes_through_both_tokenizers_alike(tiny_checkpoint: Path, processor: Any) -> None:
    alone = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    text = "<|im_start|>user\nWhat's 12 + 3? Ünïcode 你好\n\n  ok<|im_end|>\n"
    ids = alone.encode(text, add_special_tokens=False).ids
    assert processor.tokenizer(text)["input_ids"] == ids
    assert alone.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_needs_nothing_but_jinja(processor: Any) -> None:
    parts: list[dict[str, str]] = [
        {"type": "text", "text": "  hear "},
        {"type": "audio", "audio": "a"},
        {"type": "image", "image": "i"},
        {"type": "video", "video": "v"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]
    expected = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n  hear <|audio_bos|><|AUDIO|><|audio_eos|><|vision_bos|><|IMAGE|><|vision_eos|>"
        "<|vision_bos|><|VIDEO|><|vision_eos|><|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>assistant\n"
    )
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)  # noqa: S701  (no HTML)
    assert template.render(messages=messages, add_generation_prompt=True) == expected
    assert processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected
    own_system = [{"role": "system", "content": "Be brief."}]
    assert template.render(messages=own_system) == "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_it_answers_in_words_and_sound_and_stops_by_itself(model: Any, processor: Any, prompt: str) -> None:
    ids, codes, wave = answer(
        model, ask(processor, prompt), thinker_max_new_tokens=300, talker_max_new_tokens=1500
    )
    assert 1 < len(ids) < 300
    assert ids[-1] == model.config.thinker_config.eos_token_id
    text = processor.tokenizer.decode(ids, skip_special_tokens=True)
    assert text.isascii()
    assert text.isprintable()
    assert len(ids) <= len(codes) + 2 < 1500
    assert max(codes) < model.config.token2wav_config.dit_config.num_embeds
    assert len(set(codes)) > len(codes) / 4
    assert wave.shape == (480 * len(codes),)
    assert 0.01 < wave.square().mean().sqrt() < 0.5


def test_greedy_codes_depend_on_the_voice_and_on_the_prompt(model: Any, processor: Any) -> None:
    options = {"talker_do_sample": False, "talker_max_new_tokens": 40, "thinker_max_new_tokens": 16}
    heard = [
        answer(model, ask(processor, prompt), speaker=speaker, **options)[1]
        for prompt in PROMPTS
        for speaker in ("Chelsie", "Ethan")
    ]
    assert len({tuple(codes) for codes in heard}) == len(heard)
    assert all(len(set(codes)) > 10 for codes in heard)


def test_loudness_holds_for_any_codes(model: Any) -> None:
    voice = model.speaker_map["Ethan"]
    highest = model.config.token2wav_config.dit_config.num_embeds - 1
    for codes in ([0], [highest], [5] * 50, list(range(0, 8000, 250))):
        torch.manual_seed(0)
        wave = model.token2wav(
            torch.tensor([codes]), conditioning=voice["cond"], reference_mel=voice["ref_mel"]
        )
        assert wave.shape == (480 * len(codes),)
        assert 0.01 < wave.square().mean().sqrt() < 0.5


def test_media_become_rows_of_natural_size(model: Any, processor: Any) -> None:
    seconds = 2
    sound = torch.sin(torch.arange(16_000 * seconds) * 0.05).numpy() * 0.1
    inputs = processor(text="<|audio_bos|><|AUDIO|><|audio_eos|>", audio=[sound], return_tensors="pt")
    assert (inputs["input_ids"] == model.config.thinker_config.audio_token_index).sum() == 25 * seconds
    with torch.no_grad():
        rows = model.thinker.get_audio_features(
            inputs["input_features"], feature_attention_mask=inputs["feature_attention_mask"]
        ).last_hidden_state
    assert rows.shape[-1] == model.config.talker_config.embedding_size
    assert 0.2 < rows.square().mean().sqrt() < 5


def test_equal_seeds_give_equal_bytes_and_others_do_not(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def contents(directory: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.iterdir()}

    write_checkpoint(tmp_path / "model")
    same = contents(tmp_path / "model")
    assert same == contents(tiny_checkpoint)
    write_checkpoint(tmp_path / "model", seed=1)
    other = contents(tmp_path / "model")
    changed = {name for name in other if other[name] != same[name]}
    assert changed == {"model.safetensors", "spk_dict.pt", RECIPE_FILE}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_of_someone_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds files"):
        write_checkpoint(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert "holds files" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="not a directory"):
        write_checkpoint(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # The voices are written last of all that takes time: the weights are there by then.
    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, sys
from checkpoint.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "most", [pytest.param(2**15, marks=pytest.mark.long), 2**20], ids=["tokenizer", "weights"]
)
def test_a_full_disk_is_told_in_one_line_and_nothing_is_left(tmp_path: Path, most: int) -> None:
    """A process that may write no larger files: they fail in the middle, as on a full disk."""
    command = [sys.executable, "-c", LIMITED, str(most), str(tmp_path / "model")]
    # Not measured: what measures it could not write its file either.
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=unmeasured)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: cannot write the ")
    assert list(tmp_path.iterdir()) == []


def test_the_umask_says_who_may_read_a_checkpoint(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_checkpoint(tmp_path / "model")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()} == {0o640}


def test_the_released_vocabulary_has_the_released_ids(tmp_path: Path) -> None:
    shape = dataclasses.replace(TINY, vocabulary=RELEASED_VOCABULARY)
    shape.validate()
    tokenizer = build_tokenizer(shape.vocabulary.trained, shape.vocabulary.ids.tokens())
    write_tokenizer(tmp_path, tokenizer, shape.thinker["max_position_embeddings"])
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    released = {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<|AUDIO|>": 151646,
        "<|audio_bos|>": 151647,
        "<|audio_eos|>": 151648,
        "<|vision_bos|>": 151652,
        "<|vision_eos|>": 151653,
        "<|vision_pad|>": 151654,
        "<|IMAGE|>": 151655,
        "<|VIDEO|>": 151656,
    }
    for text, index in released.items():
        assert loaded(text)["input_ids"] == [index] == tokenizer.encode(text).ids
    config = model_config(shape, user_id(tokenizer)).to_dict()
    assert config["thinker_config"]["text_config"]["vocab_size"] == 152064
    assert config["thinker_config"]["audio_token_index"] == 151646
    assert config["talker_config"]["tts_text_pad_token_id"] == 151859
    assert config["talker_config"]["tts_codec_end_token_id"] == 8294


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        (dataclasses.replace(TINY, talker={**TINY.talker, "head_dim": 16}), "head_dim"),
        (dataclasses.replace(TINY, thinker={**TINY.thinker, "num_key_value_heads": 3}), "heads"),
        (dataclasses.replace(TINY, dit={**TINY.dit, "look_ahead_layers": [9]}), "no layer 9"),
        (
            dataclasses.replace(
                TINY, vocabulary=dataclasses.replace(TINY.vocabulary, ids=SpecialIds.compact(100))
            ),
            "overlaps",
        ),
    ],
)
def test_a_shape_that_cannot_work_is_refused(shape: CheckpointShape, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        write_checkpoint(tmp_path / "model", shape)
