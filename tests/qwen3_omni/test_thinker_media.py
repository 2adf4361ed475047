"""What Qwen3-Omni's thinker sees and hears: its text, rows and positions are transformers'."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad
from transformers import Qwen3OmniMoeProcessor, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextRotaryEmbedding

from checkpoint.qwen3_omni import TINY
from omnirelay.errors import MediaError
from services.families.codec_decoder import in_sections, interleaved
from services.families.qwen3_omni.media import ChunkWindows, TokenClock
from services.families.qwen_media.spans import Grid, VisualSpan, mrope_positions
from services.thinker.media.decoded import DecodedAudio
from shared.messages import ThinkRequest
from tests.qwen3_omni.test_thinker import check
from tests.qwen3_omni.tiny import Reference, Spoken
from tests.support.camera import as_sent, frames, said, video_file
from tests.support.conversations import Conversation, Item, Processor, asks, examples
from tests.support.media import encode_audio, speech
from tests.support.quantised import QUANTISED, needs_four_bits, quantise
from tests.support.thinking import MakeThinker, ThinkerRig, request_about, speech_of

IDS = TINY.special_ids
BORDERS = (("vision_start", "audio_start"), ("audio_end", "vision_end"))
TEXT = 6


class OneByOne(WhisperFeatureExtractor):
    """The reference's extractor, which is given recordings one by one: as if each were the only one."""

    def __call__(self, sounds: Any, *options: Any, **named: Any) -> Any:
        each = [super(OneByOne, self).__call__([sound], *options, **named) for sound in sounds]
        most = max(one["input_features"].shape[2] for one in each)
        joined = each[0]
        for name in joined:
            tensors = [torch.as_tensor(np.asarray(one[name])) for one in each]
            joined[name] = torch.cat([pad(tensor, (0, most - tensor.shape[-1])) for tensor in tensors])
        return joined


class Qwen3Processor(Processor):
    frame_rate = 1.0

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, Qwen3OmniMoeProcessor)
        self._processor.feature_extractor = OneByOne.from_pretrained(directory)


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Qwen3Processor:
    return Qwen3Processor(checkpoint)


def named(name: str) -> str:
    return name.replace(" ", "-").replace(",", "").replace("'", "")


def request_of(name: str, conversation: Conversation, processor: Processor) -> ThinkRequest:
    lengths = {"max_tokens": TEXT, "min_tokens": TEXT}
    return request_about(named(name), conversation, processor, speech=speech_of("ethan"), **lengths)


def expected(conversation: Conversation, processor: Processor, reference: Reference) -> Spoken:
    inputs: dict[str, Any] = dict(processor.inputs(conversation))
    prompt = inputs.pop("input_ids")[0].tolist()
    del inputs["attention_mask"]
    heard = conversation.use_audio_in_video
    return reference.speak(prompt, "ethan", TEXT, 2, **inputs, use_audio_in_video=heard)


@pytest.fixture(scope="module")
def answers(processor: Processor, reference: Reference) -> dict[str, Spoken]:
    return {name: expected(each, processor, reference) for name, each in examples().items()}


def wav(seconds: float) -> Item:
    """A recording of so many seconds."""
    said = np.tile(speech(), 32)[: round(seconds * 16_000)]
    return Item("audio", encode_audio(said, 16_000, "wav"))


def test_text_and_rows(thinker: ThinkerRig, processor: Processor, answers: dict[str, Spoken]) -> None:
    thinker.run(*(request_of(name, each, processor) for name, each in examples().items()))
    for name, spoken in answers.items():
        check(thinker, named(name), spoken)
        assert thinker.usage(named(name)).tokens == len(spoken.prompt)


@pytest.mark.parametrize("name", ["everything, with two videos' sound", "three turns"])
def test_steps_that_cut_through_media(
    chunked: ThinkerRig, processor: Processor, answers: dict[str, Spoken], name: str
) -> None:
    chunked.run(request_of(name, examples()[name], processor))
    check(chunked, named(name), answers[name])
    chunked.run(request_of(f"{name} again", examples()[name], processor))
    check(chunked, named(f"{name} again"), answers[name])
    assert chunked.usage(named(f"{name} again")).cached_tokens >= len(answers[name].prompt) // 64 * 32


# The last one is longer than the checkpoint's chunk_length.
@pytest.mark.parametrize("seconds", [0.37, 1.0, 7.995, 8.42, 16.0, 17.203, 60.5])
def test_recordings_of_several_windows(
    thinker: ThinkerRig, processor: Processor, reference: Reference, seconds: float
) -> None:
    """Beside others, whose last seconds are of other lengths: what is heard depends on nothing else."""
    conversation = asks(wav(seconds), "What?")
    others = {f"other{more}": asks(wav(more), "Who?") for more in (0.2, 0.9, 2.5)}
    asked = {"a": conversation, **others}
    thinker.run(*(request_of(name, each, processor) for name, each in asked.items()))
    for name, each in asked.items():
        check(thinker, name, expected(each, processor, reference))


@pytest.mark.parametrize("seconds", [2, 5])
def test_a_camera_beside_a_recording(
    thinker: ThinkerRig, processor: Processor, reference: Reference, seconds: int
) -> None:
    """What a session sees and hears is, to the model, a video file of the same frames and sound."""
    pictures, pcm = frames(2 * seconds), said(seconds)
    file = asks(Item("video", video_file(pictures, pcm)), "What?", use_audio_in_video=True)
    sent = asks(Item("video", as_sent(pictures, pcm)), "What?", use_audio_in_video=True)
    thinker.run(request_of("a", sent, processor))
    check(thinker, "a", expected(file, processor, reference))


def test_a_recording_grows(thinker: ThinkerRig) -> None:
    """Its windows are those of the encoder's attention; less than a second stays with the one before."""
    rules: Any = thinker.service._media
    found = {}
    for seconds in (7.0, 8.5, 9.5, 16.5):
        data = DecodedAudio(np.tile(speech(), 8)[: round(seconds * 16_000)])
        item = rules.prepare("digest", data, "audio 1")
        found[seconds] = [window.digest for window in rules.settled(item).features]
        assert item.tokens == ChunkWindows.tokens(round(seconds * 100))
    assert [len(digests) for digests in found.values()] == [0, 0, 1, 1]
    assert found[9.5] == found[16.5]


def test_the_shortest_recording(thinker: ThinkerRig) -> None:
    rules: Any = thinker.service._media
    assert rules.prepare("digest", DecodedAudio(speech()[:201]), "audio 1").tokens == 1
    for samples in (1, 200):
        with pytest.raises(MediaError, match="audio 1: the model cannot take it: it is too short"):
            rules.prepare("digest", DecodedAudio(speech()[:samples]), "audio 1")


@given(times=st.integers(1, 6), height=st.integers(1, 12), width=st.integers(1, 4), heard=st.integers(1, 60))
def test_sound_and_pictures_alternate_as_the_references(
    reference: Reference, times: int, height: int, width: int, heard: int
) -> None:
    clock = TokenClock(13.0, 0, 2)
    grid = Grid.of((times, 2 * height, 2 * width), 1.0, clock)
    span = VisualSpan(4, grid, heard)
    runs = [
        IDS[f"<|{kind}_pad|>"]
        for kind, first, last in clock.interleave(grid, heard)
        for _ in range(last - first)
    ]
    frames = next(count for count in range(1, 1000) if ChunkWindows.tokens(count) == heard)
    begin, end = ([IDS[f"<|{name}|>"] for name in names] for names in BORDERS)
    ids = [40, 41, *begin, *runs, *end, 60, 61]
    positions, delta = reference.model.thinker.get_rope_index(
        torch.tensor([ids]),
        video_grid_thw=torch.tensor([[times, 2 * height, 2 * width]]),
        attention_mask=torch.ones(1, len(ids)),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([frames]),
        second_per_grids=torch.tensor([1.0]),
    )
    found = mrope_positions(len(ids), [span], clock)
    assert found.tolist() == positions[:, 0].to(torch.int64).tolist()
    assert found.max() + 1 - len(ids) == int(delta)


@pytest.mark.parametrize("sections", [[24, 20, 20], [4, 2, 2], [2, 3, 3], [6, 1, 1], [8, 0, 0]])
@pytest.mark.parametrize("frequencies", [4, 8, 64])
def test_interleaved_axes_are_the_references(sections: list[int], frequencies: int) -> None:
    reference: Any = SimpleNamespace(mrope_section=sections)
    axes = torch.arange(3).view(3, 1, 1, 1).repeat(1, 1, 1, frequencies)
    chosen = Qwen3OmniMoeThinkerTextRotaryEmbedding.recomposition_frequencies(reference, axes)
    # Of each frequency transformers keeps a sine's and a cosine's place.
    assert interleaved(sections, frequencies) == chosen.flatten().tolist()[:frequencies]


def test_axes_beside_each_other() -> None:
    assert in_sections([1, 3, 2]) == [0, 1, 1, 1, 2, 2]


@needs_four_bits
@pytest.mark.long
def test_attention_of_four_bits_gives_the_rows_of_the_weights_it_stands_for(
    checkpoint: Path,
    reference: Reference,
    make_thinker: MakeThinker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With AMX vLLM would quantise what flows through, too, which has an error of its own.
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    attention = tuple(name for name in QUANTISED if name[0] in "qkvo")
    # On CPUs vLLM has no kernel for experts of four bits.
    others = ["visual", "audio_tower", "mlp"]
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise(checkpoint, "awq", packed, plain, parts=attention, modules_to_not_convert=others)
    # Rows of a recording are hidden states; those of text are functions of token ids.
    processor, conversation = Qwen3Processor(checkpoint), examples()["audio"]
    request = request_of("a", conversation, processor)
    rows = {}
    for directory in (packed, plain):
        rig = make_thinker(directory, dtype="bfloat16")
        rig.run(request)
        rows[directory] = rig.rows("a")[: len(request.prompt_token_ids)].float()
    exact, whole = (expected(conversation, processor, each).rows for each in (Reference(plain), reference))
    prompt = len(rows[plain])
    rounding, packed_off, whole_off = (
        float((each[:prompt] - exact[:prompt]).norm()) for each in (rows[plain], rows[packed], whole)
    )
    assert packed_off < 2 * rounding
    # The weights before they were quantised are further off, so the test sees what was loaded.
    assert whole_off > 2 * rounding
