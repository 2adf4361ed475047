"""Trains the thinker: from text, audio and images to the text of the reply."""

import random
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration

from checkpoint.shape import SPEAKING, CheckpointShape
from labs.training.data import augmentation, world
from labs.training.data.dialogues import (
    Conversations,
    Dialogue,
    Turn,
    as_written,
    read_aloud,
    unspoken,
    written_down,
)
from labs.training.data.hearing import Clip, Hearing
from labs.training.data.synthesis import Wave
from labs.training.parts import vocabulary
from labs.training.parts.alignment import encoded, things_loss, words_loss
from labs.training.parts.batches import Batch, Batcher
from labs.training.parts.loop import (
    Losses,
    Recipe,
    Step,
    Stop,
    Training,
    device,
    in_16_bits,
    load_average,
    weights_file,
)
from labs.training.parts.origin import copy_origin, origin_of
from shared.families import SPEECH_SYSTEM_PROMPT

NAME = "thinker"
RECIPE = Recipe(steps=30_000, rate=1e-3, warmup=400, weight_decay=0.05)
# The encoders alone, from weights that are finished: what is read and said stays as it is.
TUNING = Recipe(steps=9_000, rate=8e-4, warmup=200, weight_decay=0.02)
# Text alone first, which is cheap; then the encoders alone; then all kinds by turns.
_TEXT_STEPS = 1000
_WORDS_STEPS = 1200
_THINGS_STEPS = 2000
_KINDS = ("image", "audio", "text", "orders", "audio", "image", "text", "audio", "long")
_TUNED_KINDS = ("words", "image", "audio")
_SIZES = {"text": 48, "orders": 40, "long": 6, "words": 24, "things": 24, "audio": 12, "image": 16}
# Share of the recordings in which nobody speaks.
_UNSPOKEN = 0.06
_SILENCES = (0.15, 0.5, 1.0)
_ALIGNMENT_WEIGHT = 0.3
# Share of calculations of any numbers: those of small ones alone are learnt by heart.
_ALIKE = 0.5
# Share of the dialogues in which something that has nothing to do with it was said before or is asked after.
_MIXED = 0.2
_SEED = 0


def build(shape: CheckpointShape = SPEAKING) -> Any:
    """Return a new thinker of transformers with shared rows, the same for every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = Qwen2_5OmniThinkerForConditionalGeneration._from_config(
            vocabulary.config(shape).thinker_config, attn_implementation="sdpa"
        )
        sizes = (shape.vocabulary.size, shape.thinker["hidden_size"])
        model.model.embed_tokens = vocabulary.SharedEmbedding(vocabulary.used_ids(), *sizes)
        model.lm_head = vocabulary.SharedHead(vocabulary.used_ids(), *sizes)
    return model


@torch.no_grad()
def load(directory: Path, model: Any) -> None:
    """Put the averaged weights into ``model``, with hidden states about as large as the embeddings.

    A conditioning row is the sum of both.  As they are trained, hidden states are 27 times as large, and the
    talker would hardly see which word is said.  The logits stay the same.  Those of a checkpoint that was
    started from are so already.
    """
    origin = origin_of(directory)
    if origin is not None:
        copy_origin(origin, model, f"{NAME}.")
        if weights_file(directory, NAME).is_file():
            load_average(directory, NAME, model)
        return
    load_average(directory, NAME, model)
    ratio = model.model.norm.weight.norm() / model.model.embed_tokens.weight.norm(dim=-1).mean()
    model.model.norm.weight /= ratio
    model.lm_head.weight *= ratio


class Examples:
    """Draws batches of one kind each.

    Args:
        processor: of the checkpoint.
        hearing: recordings of spoken questions.
        replies: the only ones wanted; all if none are named.
    """

    def __init__(self, processor: Any, hearing: Hearing, replies: Container[str] | None = None) -> None:
        self._batcher = Batcher(processor)
        self._conversations = Conversations(_ALIKE)
        self._hearing = hearing
        self._replies = replies

    def draw(self, kind: str, seed: int, size: int | None = None) -> Batch:
        """Return a batch of a kind: a key of ``_SIZES``; ``words`` and ``things`` have no question."""
        generator, noise = random.Random(seed), np.random.default_rng(seed)
        if kind == "orders":
            pairs = (size or _SIZES[kind]) // 2
            return self._batcher(self._conversations.orders(generator, pairs), generator)
        dialogues: list[Dialogue] = []
        heard: list[tuple[Wave, augmentation.Moments]] = []
        # For the whole batch, as mixed lengths cost padding.
        longest = augmentation.SILENCE_SECONDS * float(noise.choice(_SILENCES))
        while len(dialogues) < (size or _SIZES[kind]):
            if kind == "audio" and generator.random() < _UNSPOKEN:
                dialogue, wave = self._unspoken(generator, noise)
                dialogues.append(dialogue)
                heard.append(
                    (wave, np.full(len(wave) // augmentation.TOKEN, augmentation.SILENT, np.float32))
                )
                continue
            dialogue, clips = self._dialogue(kind, generator)
            if self._replies is not None and dialogue.turns[-1].reply not in self._replies:
                continue
            dialogues.append(dialogue)
            heard += [augmentation.vary(self._hearing.wave(clip), noise, longest) for clip in clips]
        waves, moments = [wave for wave, _ in heard], [each for _, each in heard]
        return self._batcher(dialogues, generator, waves, moments)

    def _unspoken(self, generator: random.Random, noise: np.random.Generator) -> tuple[Dialogue, Wave]:
        if generator.random() < 0.5:
            return unspoken(world.UNHEARD), augmentation.silence(noise)
        return unspoken(world.UNKNOWN), augmentation.noise_or_music(noise)

    def _dialogue(self, kind: str, generator: random.Random) -> tuple[Dialogue, list[Clip]]:
        """Return a dialogue, and the recordings of its spoken turns."""
        if kind in ("text", "long"):
            drawn = self._conversations.typed if kind == "text" else self._conversations.long
            return drawn(generator), []
        if kind == "things":
            return self._conversations.seen(generator), []
        if kind == "image":
            mixed = generator.random() < _MIXED
            return (self._conversations.mixed if mixed else self._conversations.seen)(generator), []
        clip, earlier = generator.choices(self._hearing.clips, k=2)
        if kind == "words":
            return written_down(clip.question), [clip]
        dialogue = self._conversations.heard(clip.spoken, generator)
        if earlier.reply and generator.random() < _MIXED / 2:
            return dialogue.after(Turn(earlier.question, earlier.reply, spoken=True)), [earlier, clip]
        return dialogue, [clip]

    def saying(self, texts: Sequence[str], seed: int, kind: str) -> Batch:
        """Return a batch of dialogues whose replies are ``texts``, as somebody might write them down.

        Args:
            texts: the replies.
            seed: draws the rest.
            kind: ``read`` for the request to read aloud, ``text`` for a typed question, ``long`` for many.
        """
        generator = random.Random(seed)
        dialogues = [
            read_aloud(as_written(text, generator))
            if kind == "read"
            else self._dialogue(kind, generator)[0].replying(as_written(text, generator))
            for text in texts
        ]
        return self._batcher(dialogues, generator, system=SPEECH_SYSTEM_PROMPT if kind == "read" else None)


def kind_of(step: int) -> str:
    """Return which kind of batch a step of the training takes."""
    if step < _TEXT_STEPS:
        return "text"
    if step < _TEXT_STEPS + _WORDS_STEPS:
        return "words"
    return "things" if step < _TEXT_STEPS + _WORDS_STEPS + _THINGS_STEPS else _KINDS[step % len(_KINDS)]


def train(hearing: Hearing, directory: Path, stop: Stop, recipe: Recipe | None = None) -> Training:
    """Train the thinker, resuming the state in ``directory``, or finished weights."""
    place = device()
    model = build().to(place)
    origin = origin_of(directory)
    if origin is not None:
        copy_origin(origin, model, f"{NAME}.")
        model.requires_grad_(False)
        model.audio_tower.requires_grad_(True)
        model.visual.requires_grad_(True)
    training = Training(NAME, model, recipe or (TUNING if origin else RECIPE), directory)
    processor = vocabulary.load_processor(directory / "processor")
    examples = Examples(processor, hearing)
    signs = [processor.tokenizer(f" {word}")["input_ids"][0] for word in ("is", "minus")]

    kind_at = kind_of if origin is None else lambda step: _TUNED_KINDS[step % len(_TUNED_KINDS)]
    batches = training.drawn_ahead(lambda step: examples.draw(kind_at(step.number), step.seed))

    def losses_of(step: Step) -> Losses:
        kind, batch = kind_at(step.number), next(batches)
        with in_16_bits(place), encoded(model) as outputs:
            if kind == "words":
                model.get_audio_features(**batch.audio(place))
                return {kind: words_loss(model, outputs["audio"], batch, finds=origin is not None)}
            if kind == "things":
                model.get_image_features(**batch.images(place))
                return {kind: things_loss(model, outputs["image"], batch)}
            losses = (
                orders_losses(model, batch, *signs) if kind == "orders" else {kind: reply_loss(model, batch)}
            )
        if kind == "audio":
            losses["words"] = _ALIGNMENT_WEIGHT * words_loss(
                model, outputs["audio"], batch, finds=origin is not None
            )
        if kind == "image":
            losses["things"] = _ALIGNMENT_WEIGHT * things_loss(model, outputs["image"], batch)
        return losses

    training.run(losses_of, stop)
    return training


def reply_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the replies' tokens."""
    return _reply_loss(model, batch, _computed(model, batch).logits)


def orders_losses(model: Any, batch: Batch, equals: int, minus: int) -> Losses:
    """Return the loss of calculations, and of how differently the other order of each is computed.

    Otherwise products, which are few, are learnt by heart in the order that is trained.  Compared is where a
    result is predicted, behind its sign: hidden states by their angle, predictions by their divergence.

    Args:
        model: the thinker.
        batch: of the kind ``orders``.
        equals: the token before a result.
        minus: the token of its sign.
    """
    computed = _computed(model, batch, output_hidden_states=True)
    ids = batch.to(computed.logits.device)["input_ids"]
    rows = torch.arange(len(ids), device=ids.device)
    places = (learnt(batch).to(ids.device) & (ids[:, 1:] == equals)).int().argmax(-1) + 1
    places += ids[rows, places + 1] == minus
    # The first layer hardly knows the calculation.
    orders = (state[rows, places].float().chunk(2) for state in computed.hidden_states[2:])
    angles = [1 - functional.cosine_similarity(one, other).mean() for one, other in orders]
    one, other = computed.logits[rows, places].float().log_softmax(-1).chunk(2)
    divergence = ((one.exp() - other.exp()) * (one - other)).sum(-1).mean() / 2
    loss = _reply_loss(model, batch, computed.logits)
    return {"orders": loss, "angle": torch.stack(angles).mean(), "divergence": divergence}


def _computed(model: Any, batch: Batch, **options: bool) -> Any:
    # Cached position offsets of an earlier batch must not be reused.
    model.rope_deltas = None
    return model(**batch.to(next(model.parameters()).device), use_cache=False, **options)


def _reply_loss(model: Any, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    places = learnt(batch).to(logits.device)
    targets = model.lm_head.index[batch.inputs["input_ids"].to(logits.device)[:, 1:]]
    return functional.cross_entropy(logits[:, :-1][places], targets[places])


def learnt(batch: Batch) -> torch.Tensor:
    """Return where a reply's token is to be predicted, ``[batch, tokens - 1]``."""
    positions = torch.arange(batch.inputs["input_ids"].shape[1] - 1)
    starts = torch.tensor(batch.prompts)[:, None] - 1
    return (positions >= starts) & (positions < starts + torch.tensor(batch.replies)[:, None])
