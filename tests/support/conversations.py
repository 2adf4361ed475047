"""Conversations with media: what our stack is given of them, and what transformers makes of them."""

from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal

import av
import numpy as np
import soundfile
import soxr
import torch
from PIL import Image
from transformers import Qwen2_5OmniProcessor
from transformers.image_utils import load_image
from transformers.video_utils import read_video_pyav

from shared.families import SPEECH_SYSTEM_PROMPT
from shared.messages import MediaItem, MediaKind
from shared.messages.payloads import Blob
from tests.support.answers import Answer, Reference
from tests.support.media import Samples, clip, picture, spoken

SAMPLING_RATE = 16_000


@dataclass(frozen=True)
class Item:
    """A file of a conversation."""

    kind: MediaKind
    data: bytes


@dataclass(frozen=True)
class Turn:
    """What one side says: texts and files."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[str | Item, ...]


@dataclass(frozen=True)
class Conversation:
    """Turns, and whether the sound of the videos is heard."""

    turns: tuple[Turn, ...]
    use_audio_in_video: bool = False

    @property
    def items(self) -> list[Item]:
        return [part for turn in self.turns for part in turn.parts if isinstance(part, Item)]

    @property
    def media(self) -> list[MediaItem]:
        """As the gateway sends them."""
        return [MediaItem(kind=item.kind, data=Blob(item.data)) for item in self.items]

    def plain(self) -> list[dict[str, Any]]:
        """As transformers' chat templates take them, without the data."""
        return [
            {
                "role": turn.role,
                "content": [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
                    for part in turn.parts
                ],
            }
            for turn in self.turns
        ]


def asks(*parts: str | Item, use_audio_in_video: bool = False) -> Conversation:
    """A single question."""
    return Conversation((Turn("user", parts),), use_audio_in_video)


def to_be_spoken(conversation: Conversation) -> Conversation:
    """What the model is given where the answer is spoken: the gateway's system message comes first."""
    if any(turn.role == "system" for turn in conversation.turns):
        return conversation
    return replace(conversation, turns=(Turn("system", (SPEECH_SYSTEM_PROMPT,)), *conversation.turns))


QUESTION: Final = "What do you hear and see?"


@cache
def examples() -> dict[str, Conversation]:
    """One of each kind, several of a kind, mixtures, and several turns."""
    speech = Item("audio", spoken("wav"))
    other_speech = Item("audio", spoken("mp3", "Good morning, how are you today?", 22_050))
    image = Item("image", picture("png", 1))
    other_image = Item("image", picture("jpeg", 2, 200, 360))
    video = Item("video", clip("mp4", 4.6, 8, 160, 112, text="A ball is rolling over the screen."))
    short_video = Item("video", clip("mp4", 1.5, 12, 112, 160, text="Hello!", seed=3))
    return {
        "audio": asks(speech, QUESTION),
        "image": asks(image, QUESTION),
        "video": asks(video, QUESTION),
        "video with its sound": asks(video, QUESTION, use_audio_in_video=True),
        "two audios": asks(speech, "and", other_speech, QUESTION),
        "two images": asks(image, other_image, QUESTION),
        "image, audio and text": asks(image, speech, QUESTION),
        "everything, with two videos' sound": asks(
            speech, video, "then", image, short_video, other_speech, use_audio_in_video=True
        ),
        "nothing but a sound": asks(other_speech),
        "three turns": Conversation(
            (
                Turn("system", ("You see and hear.",)),
                Turn("user", (image, "What is this?")),
                Turn("assistant", ("A drawing.",)),
                Turn("user", (speech,)),
                Turn("assistant", ("A fox.",)),
                Turn("user", (short_video, other_image, "And these?")),
            )
        ),
    }


class Processor:
    """transformers' own processor of a checkpoint, with files read by libraries of its choice."""

    frame_rate = 2.0

    def __init__(self, directory: Path, kind: Any = Qwen2_5OmniProcessor) -> None:
        self._processor: Any = kind.from_pretrained(directory)

    def prompt(self, conversation: Conversation) -> list[int]:
        """Token ids, one placeholder for each file."""
        ids: list[int] = self._processor.tokenizer(self._text(conversation))["input_ids"]
        return ids

    def inputs(self, *conversations: Conversation) -> dict[str, torch.Tensor]:
        """What ``generate`` takes, for one conversation or several in a batch padded on the left."""
        heard = conversations[0].use_audio_in_video
        items = [item for conversation in conversations for item in conversation.items]
        sounds = [
            read_sound(item.data)
            for item in items
            if item.kind == "audio" or (heard and item.kind == "video")
        ]
        inputs: dict[str, torch.Tensor] = self._processor(
            text=[self._text(conversation) for conversation in conversations],
            images=[load_image(_image(item.data)) for item in items if item.kind == "image"] or None,
            videos=[self._frames(item.data) for item in items if item.kind == "video"] or None,
            audio=sounds or None,
            use_audio_in_video=heard,
            padding=True,
            return_tensors="pt",
        )
        return dict(inputs)

    def _text(self, conversation: Conversation) -> str:
        text: str = self._processor.apply_chat_template(
            conversation.plain(), tokenize=False, add_generation_prompt=True
        )
        return text

    def _frames(self, data: bytes) -> Any:
        videos = self._processor.video_processor
        frames, _ = read_video_pyav(
            BytesIO(data), lambda metadata, **_: videos.sample_frames(metadata, fps=self.frame_rate)
        )
        return frames


TEXT_TOKENS: Final = 20


def expected(
    conversation: Conversation, processor: Processor, reference: Reference, text_tokens: int = TEXT_TOKENS
) -> Answer:
    """The text of transformers' answer."""
    (answer,) = reference.answers_to(
        processor.inputs(conversation),
        use_audio_in_video=conversation.use_audio_in_video,
        thinker_max_new_tokens=text_tokens,
        talker_max_new_tokens=2,
    )
    return answer


def read_sound(data: bytes) -> Samples:
    """The sound of a file as transformers' helpers read it: averaged over channels, resampled by soxr."""
    try:
        samples, rate = soundfile.read(BytesIO(data), dtype="float32", always_2d=True)
        samples = samples.mean(axis=1)
    except soundfile.LibsndfileError:
        samples, rate = _read_sound_track(data)
    resampled: Samples = samples if rate == SAMPLING_RATE else soxr.resample(samples, rate, SAMPLING_RATE)
    return resampled.astype(np.float32)


def _image(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data))


def _read_sound_track(data: bytes) -> tuple[Samples, int]:
    """Of a container that libsndfile does not know."""
    with av.open(BytesIO(data), "r") as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout.name)
        frames = [*container.decode(stream), None]
        pieces = [piece.to_ndarray() for frame in frames for piece in resampler.resample(frame)]
    return np.concatenate(pieces, axis=1).mean(axis=0), stream.rate
