"""Where media stand in a prompt: tokens and position ids against transformers', for whatever comes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
)

from omnirelay.errors import InvalidRequestError
from services.families.qwen_media.media import Features, Piece, QwenMediaItem, Windows, alternating, lay_out
from services.families.qwen_media.spans import Clock, Marks, prompt_positions
from services.thinker.media.rules import check_placeholders
from shared.messages import MediaItem, MediaKind
from shared.messages.payloads import Blob
from tests.support.answers import Reference
from tests.support.conversations import Processor

WINDOWS = Windows(200)
CLOCK = Clock(positions_per_second=25, chunk=50, merge=2)
AROUND: dict[str, tuple[str, str]] = {
    "audio": ("<|audio_bos|>", "<|audio_eos|>"),
    "image": ("<|vision_bos|>", "<|vision_eos|>"),
    "video": ("<|vision_bos|>", "<|vision_eos|>"),
}


@dataclass(frozen=True)
class Medium:
    """An item by its measures alone.

    Attributes:
        kind: Its kind.
        frames: Mel frames of its sound.
        patches: Of its pictures: temporal, rows, columns.
        seconds: Of one temporal patch.
    """

    kind: MediaKind
    frames: int = 0
    patches: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 1.0

    @property
    def windows(self) -> list[Features]:
        return list(WINDOWS.cut(_item("audio", input_audio_features=torch.zeros(1, self.frames))))

    @property
    def audio_tokens(self) -> int:
        return sum(window.tokens for window in self.windows)

    def prepared(self, heard: bool) -> QwenMediaItem:
        if self.kind == "audio":
            return QwenMediaItem("digest", tuple(map(Piece.of, self.windows)))
        times, rows, columns = self.patches
        measures = {f"{self.kind}_grid_thw": torch.tensor(self.patches)}
        if self.kind == "video":
            measures["second_per_grid_ts"] = torch.tensor(self.seconds)
            measures["pixel_values_videos"] = torch.arange(times * rows * columns)
        data = _item(self.kind, **measures)
        if self.kind == "video" and heard:
            frames = np.arange(2 * times, dtype=np.uint8)[:, None]
            return QwenMediaItem("digest", tuple(alternating(data, frames, self.windows, CLOCK)))
        return QwenMediaItem(
            "digest", (Piece.of(Features("digest", self.kind, data, times * rows * columns // 4)),)
        )


def _item(kind: str, **tensors: torch.Tensor) -> MultiModalKwargsItem:
    field = MultiModalBatchedField()
    elements = {name: MultiModalFieldElem(data=tensor, field=field) for name, tensor in tensors.items()}
    if kind == "audio":
        elements["audio_feature_lengths"] = MultiModalFieldElem(data=torch.tensor(0), field=field)
    return MultiModalKwargsItem(elements)


sides = st.integers(1, 6).map(lambda side: 2 * side)
sounds = st.integers(3, 700)
media = st.one_of(
    st.builds(Medium, st.just("audio"), sounds),
    st.builds(Medium, st.just("image"), patches=st.tuples(st.just(1), sides, sides)),
    st.builds(
        Medium,
        st.just("video"),
        sounds,
        st.tuples(st.integers(1, 8), sides, sides),
        st.sampled_from([0.5, 1.0, 4 / 3, 2.0, 3.3]),
    ),
)
parts = st.lists(st.one_of(media, st.sampled_from(["a question", "and now", "x"])), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def marks(reference: Reference) -> Marks:
    return Marks.of(reference.model.config.thinker_config, "{}_token_index")


@settings(max_examples=60, deadline=None)
@given(parts=parts, heard=st.booleans())
def test_tokens_and_positions_are_transformers(
    parts: list[Medium | str], heard: bool, processor: Processor, reference: Reference, marks: Marks
) -> None:
    items = [part for part in parts if isinstance(part, Medium)]
    text = "".join(part if isinstance(part, str) else place(part) for part in [*parts, "answer"])
    tokenizer = processor._processor.tokenizer
    laid = lay_out(tokenizer(text)["input_ids"], [item.prepared(heard) for item in items], marks)
    ids = laid["prompt_token_ids"]
    assert ids == tokenizer(their_text(text, items, heard, processor))["input_ids"]
    positions = prompt_positions(len(ids), specs_of(laid), CLOCK)
    expected, delta = their_positions(ids, items, heard, reference)
    assert positions.tolist() == expected.tolist()
    assert positions.max() + 1 - len(ids) == delta


def place(medium: Medium) -> str:
    before, after = AROUND[medium.kind]
    return f"{before}<|{medium.kind.upper()}|>{after}"


def their_text(text: str, items: list[Medium], heard: bool, processor: Processor) -> str:
    videos = [item for item in items if item.kind == "video"]
    (expanded,) = processor._processor.replace_multimodal_special_tokens(
        [text],
        iter(item.audio_tokens for item in items if item.kind == "audio" or (heard and item in videos)),
        iter(np.array(item.patches) for item in items if item.kind == "image"),
        iter(np.array(item.patches) for item in videos),
        video_second_per_grid=iter(item.seconds for item in videos),
        use_audio_in_video=heard,
        position_id_per_seconds=25,
        seconds_per_chunk=2.0,
    )
    return str(expanded)


def their_positions(ids: list[int], items: list[Medium], heard: bool, reference: Reference) -> Any:
    images = [item.patches for item in items if item.kind == "image"]
    videos = [item for item in items if item.kind == "video"]
    heard_frames = [item.frames for item in items if item.kind == "audio" or (heard and item in videos)]
    tokens = torch.tensor([ids])
    positions, deltas = reference.model.thinker.get_rope_index(
        tokens,
        torch.tensor(images) if images else None,
        torch.tensor([item.patches for item in videos]) if videos else None,
        torch.ones_like(tokens),
        heard,
        torch.tensor(heard_frames) if heard_frames else None,
        torch.tensor([item.seconds for item in videos]) if videos else None,
    )
    return positions[:, 0], int(deltas)


def specs_of(laid: Any) -> list[MultiModalFeatureSpec]:
    """What the engine makes of it."""
    return [
        MultiModalFeatureSpec(data=data, modality=kind, identifier=name, mm_position=place)
        for kind, places in laid["mm_placeholders"].items()
        for data, name, place in zip(laid["mm_kwargs"][kind], laid["mm_hashes"][kind], places, strict=True)
    ]


def test_a_video_with_sound_says_which_tokens_are_whose(marks: Marks) -> None:
    video = Medium("video", frames=500, patches=(5, 4, 4))
    prompt = [7, marks.placeholders["video"], 8]
    laid = lay_out(prompt, [video.prepared(heard=True)], marks)
    ids, places = laid["prompt_token_ids"], laid["mm_placeholders"]
    assert [(each.offset, each.length) for each in places["video"]] == [(2, 58), (60, 58), (118, 29)]
    for pictures, sound in zip(places["video"], places["audio"], strict=True):
        assert (pictures.offset, pictures.length) == (sound.offset, sound.length)
        assert (pictures.is_embed ^ sound.is_embed).all()
    assert [each.get_num_embeds() for each in places["video"]] == [8, 8, 4]
    assert ids[:2] == [7, marks.audio_begin]
    assert ids[-2:] == [marks.audio_end, 8]


@given(seconds=st.integers(1, 9), more=st.integers(1, 300), patches=st.sampled_from([(4, 4), (2, 6)]))
def test_what_is_settled_of_a_video_stays_when_it_goes_on(
    seconds: int, more: int, patches: tuple[int, int], marks: Marks
) -> None:
    begun = Medium("video", frames=100 * seconds, patches=(seconds, *patches))
    whole = Medium("video", frames=100 * seconds + more, patches=(seconds + -(-more // 100), *patches))
    kept = WINDOWS.settled(begun.prepared(heard=True).pieces)
    assert len(kept) == (seconds - 1) // 2
    prompt = [7, 8, marks.placeholders["video"]]
    early = lay_out(prompt, [QwenMediaItem("digest", kept)], marks)
    later = lay_out([*prompt, 8, 9], [whole.prepared(heard=True)], marks)
    length = len(early["prompt_token_ids"]) - bool(kept)
    assert length == 2 + bool(kept) + sum(each.tokens for piece in kept for each in piece.features)
    assert early["prompt_token_ids"][:length] == later["prompt_token_ids"][:length]
    for kind, names in early["mm_hashes"].items():
        assert names == later["mm_hashes"][kind][: len(names)]
        assert len({*names}) == len(names)
    at = [
        prompt_positions(len(laid["prompt_token_ids"]), specs_of(laid), CLOCK)[:, :length]
        for laid in (early, later)
    ]
    assert at[0].tolist() == at[1].tolist()


@pytest.mark.parametrize(
    ("found", "given", "message"),
    [
        (["audio"], [], "places for audio, but none came"),
        ([], ["image"], "places for none, but image came"),
        (["image", "audio"], ["audio", "image"], "places for image, audio, but audio, image came"),
        (["video"], ["video", "video"], "places for video, but video, video came"),
    ],
)
def test_places_that_are_not_the_items_are_refused(
    found: list[MediaKind], given: list[MediaKind], message: str, marks: Marks
) -> None:
    prompt = [1, *(marks.placeholders[kind] for kind in found), 2]
    items = [MediaItem(kind=kind, data=Blob(b"x")) for kind in given]
    with pytest.raises(InvalidRequestError, match=message):
        check_placeholders(prompt, items, marks.placeholders)
