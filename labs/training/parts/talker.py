"""Trains the talker: codec ids from the frozen thinker's conditioning rows, as the reference lays them out.

A row is the thinker's last hidden state plus the embedding of its input, which is zero for media.  After the
prompt's rows come the voice's token with the codec pad's embedding and the reply's first row with the codec
start's; then one position for each codec id, over the reply's other rows, the text's end and its padding.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniTalkerForConditionalGeneration

from checkpoint.config import CODEC_IDS, CODEC_VOCABULARY
from checkpoint.shape import SPEAKING, CheckpointShape
from labs.training.data import world
from labs.training.data.corpus import SENTENCES, VOICES, SpeechCorpus, Utterance
from labs.training.data.hearing import Hearing
from labs.training.parts import thinker, vocabulary
from labs.training.parts.alignment import said_tokens
from labs.training.parts.batches import Batch
from labs.training.parts.loop import Losses, Recipe, Step, Stop, Training, device, in_16_bits
from labs.training.parts.origin import WEIGHTS, copy_origin, origin_of

NAME = "talker"
RECIPE = Recipe(steps=16_000, rate=1.5e-3, weight_decay=0.05)
# From weights that are finished.
TUNING = Recipe(steps=5_000, rate=8e-4, warmup=100, weight_decay=0.05, average=0.995)
# After "said", replies are any texts of the corpus: read aloud, or to questions that they do not answer.
_KINDS = ("said read", "said text", "said read", "image", "said read", "said long", "text", "audio")
_SIZE, _SIZE_OF_LONG = 14, 6
# So many times more texts are drawn, for those of a batch to be about as long.
_DRAWN = 4
_WORDS_WEIGHT = 0.4
# How often texts that are no answers are drawn: what follows in them has to be read, not known.
_OF_NO_ANSWERS = 3
# Share of input codes that are replaced, so that the talker recovers from its own errors.
_REPLACED = 0.1
_SEED = 0
_PAD, _START, _END = (CODEC_IDS[f"tts_codec_{name}_token_id"] for name in ("pad", "start", "end"))


class Talker(nn.Module):
    """The talker, and the rows of the thinker's embedding that only the talker reads.

    Attributes:
        talker: ``Qwen2_5OmniTalkerForConditionalGeneration`` with shared rows.
        marks: embeddings of :func:`mark_ids`, in their order.
        words: tells from a state the token that is said, and the next one; only for training.
    """

    def __init__(self, shape: CheckpointShape = SPEAKING) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            config = vocabulary.config(shape).talker_config
            self.talker = Qwen2_5OmniTalkerForConditionalGeneration._from_config(
                config, attn_implementation="sdpa"
            )
            used = vocabulary.used_codes(shape)
            width = shape.thinker["hidden_size"]
            self.talker.model.embed_tokens = vocabulary.SharedEmbedding(used, CODEC_VOCABULARY, width)
            self.talker.codec_head = vocabulary.SharedHead(
                used, CODEC_VOCABULARY, shape.talker["hidden_size"]
            )
            self.marks = nn.Parameter(torch.randn(len(mark_ids(shape)), width))
            self.words = nn.Linear(shape.talker["hidden_size"], 2 * (len(vocabulary.used_ids()) + 1))

    @torch.no_grad()
    def start_from(self, origin: Path) -> None:
        """Take the weights of a finished checkpoint."""
        copy_origin(origin, self.talker, f"{NAME}.")
        rows = load_file(origin / WEIGHTS)["thinker.model.embed_tokens.weight"]
        self.marks.copy_(rows[mark_ids()])


def mark_ids(shape: CheckpointShape = SPEAKING) -> list[int]:
    """Return the text ids of the voices, then those of the text's padding and its end."""
    ids = shape.vocabulary.ids
    return [*ids.speakers().values(), ids.speech_pad, ids.speech_end]


@dataclass(frozen=True)
class _Example:
    """One answer to be spoken: rows ``[positions, width]``, and what belongs to each position.

    Attributes:
        rows: what the codec embedding is added to.
        codes: the codec id whose embedding is added, -1 where there is none.
        text_ids: what M-RoPE positions are counted by.
        targets: the codec id to predict, -1 where there is none.
    """

    rows: torch.Tensor
    codes: torch.Tensor
    text_ids: torch.Tensor
    targets: torch.Tensor


def train(
    corpus: SpeechCorpus,
    codes: npt.NDArray[np.int64],
    hearing: Hearing,
    directory: Path,
    stop: Stop,
    recipe: Recipe | None = None,
) -> Training:
    """Train the talker on the thinker in ``directory``, resuming the state there or finished weights."""
    place = device()
    frozen = thinker.build()
    thinker.load(directory, frozen)
    frozen.requires_grad_(False).eval().to(place)
    model = Talker().to(place)
    origin = origin_of(directory)
    if origin is not None:
        model.start_from(origin)
    training = Training(NAME, model, recipe or (TUNING if origin else RECIPE), directory)
    spoken = {voice: {item.text: item for item in corpus.of(voice)} for voice in VOICES}
    sentences = list(spoken[next(iter(VOICES))])
    answers = {*world.spoken_sentences(SENTENCES)[0]}
    weights = [1 if text in answers else _OF_NO_ANSWERS for text in sentences]
    examples = thinker.Examples(
        vocabulary.load_processor(directory / "processor"), hearing, replies=set(sentences)
    )

    def losses_of(step: Step) -> Losses:
        drawn = _KINDS[step.number % len(_KINDS)]
        kind = drawn.removeprefix("said ")
        if kind != drawn:
            size, generator = _SIZE_OF_LONG if kind == "long" else _SIZE, random.Random(step.seed)
            pool = sorted(generator.choices(sentences, weights, k=_DRAWN * size), key=len)
            first = generator.randint(0, len(pool) - size)
            texts = pool[first : first + size]
            batch = examples.saying(texts, step.seed, kind)
        else:
            batch = examples.draw(kind, step.seed, _SIZE)
            texts = batch.texts
        speech = _speech(texts, spoken, codes, random.Random(step.seed))
        with in_16_bits(place):
            loss, *_, states = predicted(model, frozen, batch, speech)
            return {"codes": loss, "words": _WORDS_WEIGHT * _words_loss(model, frozen, states, texts, speech)}

    training.run(losses_of, stop)
    return training


def _speech(
    texts: Sequence[str],
    spoken: Mapping[str, Mapping[str, Utterance]],
    codes: npt.NDArray[np.int64],
    generator: random.Random,
) -> list[tuple[int, torch.Tensor]]:
    """Return for each text the number of a voice, and the codec ids in which it says it."""
    found = []
    for text in texts:
        number = generator.randrange(len(VOICES))
        item = spoken[list(VOICES)[number]][text]
        found.append((number, torch.from_numpy(codes[item.first : item.first + item.codes])))
    return found


def _words_loss(
    model: Talker,
    frozen: Any,
    states: torch.Tensor,
    texts: Sequence[str],
    speech: Sequence[tuple[int, torch.Tensor]],
) -> torch.Tensor:
    """Return the mean cross-entropy of the token that is said at each codec id, and of the one after it."""
    scores = model.words(states).unflatten(-1, (2, -1)).float()
    likely = scores[:, 0].detach().log_softmax(-1).cpu()
    index = frozen.model.embed_tokens.index
    said = [
        said_tokens(text, each, index.cpu())
        for text, each in zip(texts, likely.split([len(codes) + 1 for _, codes in speech]), strict=True)
    ]
    return functional.cross_entropy(scores.flatten(0, 1), torch.cat(said).flatten().to(scores.device))


def predicted(
    model: Talker,
    frozen: Any,
    batch: Batch,
    speech: list[tuple[int, torch.Tensor]],
    replaced: float = _REPLACED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean cross-entropy of the codec ids and their end, the logits, targets and hidden states.

    Args:
        model: the talker.
        frozen: the thinker.
        batch: what is answered.
        speech: for each reply the number of its voice, and its codec ids.
        replaced: which part of the codec ids that the talker reads are others.
    """
    place = model.marks.device
    inputs = batch.to(place)
    frozen.rope_deltas = None
    with torch.no_grad():
        states = frozen(**inputs, use_cache=False, output_hidden_states=True).hidden_states
    rows = states[-1] + states[0] * ~_media(inputs["input_ids"], frozen.config)[..., None]
    examples = [
        _lay_out(
            model, rows[i], inputs["input_ids"][i], batch.prompts[i], batch.replies[i], *speech[i], replaced
        )
        for i in range(len(speech))
    ]
    states, targets = _states(model.talker, examples, inputs)
    logits, targets = model.talker.codec_head(states), model.talker.codec_head.index[targets]
    return functional.cross_entropy(logits, targets), logits, targets, states


def _media(ids: torch.Tensor, config: Any) -> torch.Tensor:
    media = torch.tensor([config.audio_token_index, config.image_token_index, config.video_token_index])
    return torch.isin(ids, media.to(ids.device))


def _lay_out(
    model: Talker,
    rows: torch.Tensor,
    ids: torch.Tensor,
    prompt: int,
    reply: int,
    voice: int,
    codes: torch.Tensor,
    replaced: float,
) -> _Example:
    place = rows.device
    codes = codes.to(place)
    pad, end = model.marks[-2], model.marks[-1]
    # The reply's last token ends it and is not spoken.
    later = [*rows[prompt + 1 : prompt + reply - 1], end]
    later = [*later, *[pad] * (len(codes) - len(later))][: len(codes)]
    other = torch.randint_like(codes, 1, SPEAKING.dit["num_embeds"])
    heard = torch.where(torch.rand(len(codes), device=place) < replaced, other, codes)
    positions = prompt + 2 + len(codes)
    ids_of_codes = torch.full((len(codes),), mark_ids()[-2], device=place)
    inputs, targets = torch.full((2, positions), -1, device=place)
    inputs[prompt], inputs[prompt + 1], inputs[prompt + 2 :] = _PAD, _START, heard
    targets[prompt + 1 : -1], targets[-1] = codes, _END
    return _Example(
        rows=torch.cat([rows[:prompt], model.marks[voice][None], rows[prompt][None], torch.stack(later)]),
        codes=inputs,
        text_ids=torch.cat(
            [ids[:prompt], ids.new_tensor([mark_ids()[voice]]), ids[prompt][None], ids_of_codes]
        ),
        targets=targets,
    )


def _states(
    talker: Any, examples: list[_Example], inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states of the positions that have a target, and the targets."""
    rows = pad_sequence([example.rows for example in examples], batch_first=True)
    codes = pad_sequence([example.codes for example in examples], batch_first=True, padding_value=-1)
    ids = pad_sequence([example.text_ids for example in examples], batch_first=True)
    targets = pad_sequence([example.targets for example in examples], batch_first=True, padding_value=-1)
    mask = pad_sequence([torch.ones_like(example.codes) for example in examples], batch_first=True)
    heard = inputs.get("feature_attention_mask")
    positions, _ = talker.get_rope_index(
        ids, inputs.get("image_grid_thw"), None, mask, False, None if heard is None else heard.sum(-1)
    )
    embedded = talker.model.embed_tokens(codes.clamp(min=0)) * (codes >= 0)[..., None]
    states = talker.model(
        inputs_embeds=talker.thinker_to_talker_proj(rows + embedded),
        attention_mask=mask,
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    learnt = targets >= 0
    return states[learnt], targets[learnt]
