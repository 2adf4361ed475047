"""Where media stand in a prompt: tokens and position ids against transformers', for whatever comes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import MultiModalKwargsItem

from omnirelay.errors import InvalidRequestError
from services.families.qwen_media.features import Features
from services.families.qwen_media.media import QwenMediaItem, lay_out
from services.families.qwen_media.spans import Clock, Grid, Marks, VisualSpan, mrope_positions
from services.thinker.media.rules import check_placeholders
from shared.messages import MediaItem, MediaKind
from shared.messages.payloads import Blob
from tests.support.answers import Reference
from tests.support.conversations import Processor

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
    def audio_tokens(self) -> int:
        return ((self.frames - 1) // 2 + 1 - 2) // 2 + 1

    def prepared(self, heard: bool) -> QwenMediaItem:
        features = []
        if self.kind != "audio":
            grid = Grid.of(self.patches, self.seconds, CLOCK)
            features.append(
                Features(f"digest.{self.kind}", self.kind, MultiModalKwargsItem({}), grid.tokens, grid)
            )
        if self.kind == "audio" or (self.kind == "video" and heard):
            features.append(Features("digest.audio", "audio", MultiModalKwargsItem({}), self.audio_tokens))
        return QwenMediaItem("digest", tuple(features))


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
    return Marks.of(reference.model.config.thinker_config)


@settings(max_examples=60, deadline=None)
@given(parts=parts, heard=st.booleans())
def test_tokens_and_positions_are_transformers(
    parts: list[Medium | str], heard: bool, processor: Processor, reference: Reference, marks: Marks
) -> None:
    items = [part for part in parts if isinstance(part, Medium)]
    text = "".join(part if isinstance(part, str) else place(part) for part in [*parts, "answer"])
    tokenizer = processor._processor.tokenizer
    laid = lay_out(tokenizer(text)["input_ids"], [item.prepared(heard) for item in items], marks, CLOCK)
    ids = laid["prompt_token_ids"]
    assert ids == tokenizer(their_text(text, items, heard, processor))["input_ids"]
    positions = mrope_positions(len(ids), spans_of(laid, items, heard), CLOCK)
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


def spans_of(laid: Any, items: list[Medium], heard: bool) -> list[VisualSpan]:
    spans = []
    for kind in ("image", "video"):
        grids = [Grid.of(item.patches, item.seconds, CLOCK) for item in items if item.kind == kind]
        frames = [item.audio_tokens for item in items if item.kind == kind]
        for grid, tokens, where in zip(grids, frames, laid["mm_placeholders"].get(kind, []), strict=True):
            audio_tokens = tokens if kind == "video" and heard else None
            spans.append(VisualSpan(where.offset, grid, audio_tokens))
    return sorted(spans, key=lambda span: span.offset)


def test_a_video_with_sound_says_which_tokens_are_whose(marks: Marks) -> None:
    video = Medium("video", frames=500, patches=(5, 4, 4))
    prompt = [7, marks.placeholders["video"], 8]
    laid = lay_out(prompt, [video.prepared(heard=True)], marks, CLOCK)
    (pictures,), (sound,) = laid["mm_placeholders"]["video"], laid["mm_placeholders"]["audio"]
    assert pictures.offset == sound.offset == 2
    assert pictures.length == sound.length == 20 + 125
    assert (pictures.is_embed ^ sound.is_embed).all()
    assert int(pictures.is_embed.sum()) == 20
    ids = laid["prompt_token_ids"]
    assert ids[:2] == [7, marks.audio_begin]
    assert ids[-2:] == [marks.audio_end, 8]
    assert laid["mm_hashes"] == {"video": ["digest.video"], "audio": ["digest.audio"]}


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
