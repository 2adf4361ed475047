"""What a model family is."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnirelay.errors import CheckpointError
from shared.messages import StageName

if TYPE_CHECKING:
    from services.talker.family import TalkerFamily
    from services.thinker.family import ThinkerFamily
    from services.token2wav.family import SynthesisFamily


@dataclass(frozen=True)
class Paged:
    """What a stage's model keeps for each position, and how it can be divided; see ``docs/memory.md``."""

    positions: int  # Most positions of one request, as the checkpoint has it
    elements: int  # Numbers a position: keys and values of all layers, and a conditioning row
    row: int = 0  # Those of the row, which keep the model's dtype beside a quantised KV cache
    divided: Mapping[str, int] = field(default_factory=dict)  # Sizes that workers divide, by what they count
    key_value_heads: int = 0  # Of its attention; workers have as many each, or as many workers have one
    step: int = 0  # Numbers that a token takes in a step; 0: estimated as a share of the weights
    media: int = 0  # Numbers that the largest media item takes while it is encoded


@dataclass(frozen=True)
class SynthesisBytes:
    """Estimated, of the released sizes: what token2wav takes beside its weights."""

    solver_frame: int  # Of 10 ms that its solver advances in a step
    vocoder_frame: int  # Of 10 ms that become audio in a step
    stream: int  # What an open stream keeps


@dataclass(frozen=True)
class Family:
    """A model family, found by the ``model_type`` of a checkpoint's ``config.json``.

    The parts of the stages load PyTorch and vLLM, so they are functions, called in the stage's process once
    its environment is prepared.  ``check_files``, which loads no model, and ``paged``, what the KV caches
    hold by the content of ``config.json``, raise CheckpointError.

    ``models`` says where vLLM's worker processes find the models, ``module:class`` (:mod:`services.plugin`).
    """

    model_type: str
    files: tuple[str, ...]  # That the stages read besides the weights and the tokenizer
    check_files: Callable[[Path], None]
    weights: Mapping[StageName, str]  # The prefix of each stage's tensors, up to the first dot
    models: tuple[str, ...]
    paged: Callable[[Mapping[str, Any]], dict[StageName, Paged]]
    synthesis: SynthesisBytes
    thinker: "Callable[[], ThinkerFamily]"
    talker: "Callable[[], TalkerFamily]"
    token2wav: "Callable[[], SynthesisFamily]"


def sizes_of(config: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, int]:
    """The sizes that a part of ``config.json`` has, by what errors call them."""
    return {name: int(config[key]) for key, name in names.items() if config and key in config}


def encoders_divided(thinker: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the encoders that ``tensor_parallel_size`` must divide."""
    audio = sizes_of(thinker.get("audio_config"), {"encoder_attention_heads": "audio encoder's heads"})
    return audio | sizes_of(thinker.get("vision_config"), {"num_heads": "image encoder's heads"})


def decoder_paged(
    config: Mapping[str, Any], row: int, divided: Mapping[str, int], step: int = 0, media: int = 0
) -> Paged:
    """What a decoder of these sizes keeps for each position, with a conditioning row of ``row`` numbers."""
    heads = int(config["num_key_value_heads"])
    keys_and_values = 2 * int(config["num_hidden_layers"]) * heads * head_size(config)
    positions = int(config["max_position_embeddings"])
    return Paged(positions, keys_and_values + row, row, divided, heads, step, media)


def head_size(config: Mapping[str, Any]) -> int:
    """Numbers of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


@contextmanager
def reading_config() -> Iterator[None]:
    """Turn what values that are missing or strange raise within into CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json lacks a value, or has a strange one: {error!r}") from error


def part(path: str) -> Callable[[], Any]:
    """What loads a stage's part of a family, ``module:name``, with PyTorch and vLLM, when it is called."""
    module, _, name = path.partition(":")
    return lambda: getattr(import_module(module), name)
