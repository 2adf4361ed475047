"""What a model family says about media: placeholder tokens, the encoders' input, the layout of prompts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from vllm.inputs import MultiModalInput

from omnirelay.errors import InvalidRequestError, MediaTooLargeError
from services.thinker.media.decoded import Decoded
from shared.messages import MediaItem, MediaKind

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FrameSampling:
    """How many frames of a video the checkpoint looks at: a multiple of those of a temporal patch."""

    frames_per_second: float
    min_frames: int
    max_frames: int
    temporal_patch_size: int


class PreparedItem(Protocol):
    """An item of a request, ready for the encoders."""

    @property
    def digest(self) -> str:
        """Names the file and how it was read: equal digests have equal features."""

    @property
    def tokens(self) -> int:
        """Tokens that it takes in the prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


class MediaRules(Protocol):
    """How a family's checkpoint takes media; safe to use from any thread.

    A kind without placeholder is not taken; ``longest_audio_s`` is the longest sound that is.
    """

    placeholders: Mapping[MediaKind, int]
    sampling_rate: int
    longest_audio_s: float
    sampling: FrameSampling

    def prepare(self, digest: str, decoded: Decoded, name: str) -> PreparedItem:
        """Compute the encoders' input of an item, called ``name`` in errors; raises MediaError if refused."""

    def settled(self, item: Any) -> PreparedItem:
        """The part of what is recorded that what follows does not change, unless it is louder."""

    def lay_out(self, prompt: Sequence[int], items: Sequence[Any]) -> MultiModalInput:
        """Replace each placeholder of a prompt by the tokens of its item, as :meth:`prepare` returned it."""


def check_placeholders(
    prompt: Sequence[int], items: Sequence[MediaItem], placeholders: Mapping[MediaKind, int]
) -> None:
    """Raise InvalidRequestError at placeholders of other number, kind or order than the items."""
    kind_of = {token: kind for kind, token in placeholders.items()}
    found = [kind_of[token] for token in prompt if token in kind_of]
    given = [item.kind for item in items]
    if found != given:
        raise InvalidRequestError(
            f"the prompt has places for {_listed(found)}, but {_listed(given)} came with it"
        )


def check_encodable(prompt: MultiModalInput, most: int) -> None:
    """Raise MediaTooLargeError unless a step can encode each item; pictures and sound at one place are one.

    vLLM checks each alone, and would wait for ever to encode both.
    """
    tokens: Counter[int] = Counter()
    for ranges in prompt["mm_placeholders"].values():
        for place in ranges:
            tokens[place.offset] += place.get_num_embeds()
    if (largest := max(tokens.values(), default=0)) > most:
        raise MediaTooLargeError(
            f"an item has {largest} tokens, a video counted with its sound, and the thinker encodes at most "
            f"{most} in a step: send a shorter or smaller one"
        )


def _listed(kinds: Iterable[str]) -> str:
    return ", ".join(kinds) or "none"
