"""Evaluates the trained parts on held-out data, with transformers' own classes."""

import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from labs.training import export
from labs.training.card import FIGURES_FILE
from labs.training.data import world
from labs.training.data.corpus import SENTENCES, VOICES, SpeechCorpus, Utterance
from labs.training.data.questions import Question, all_questions
from labs.training.data.synthesis import Speak, Wave, synthesize
from labs.training.files import replacing
from labs.training.measure.recognizer import Recognizer, word_error_rate
from labs.training.parts import dit, thinker, vocoder
from labs.training.parts.batches import Batcher
from labs.training.parts.loop import weights_file
from labs.training.parts.vocabulary import load_processor

_MOST_WORDS = 24
_SEED = 11

_logger = logging.getLogger(__name__)

Figures = dict[str, str]


def evaluate(state: Path, corpus: SpeechCorpus, codes: npt.NDArray[np.int64], count: int = 100) -> Figures:
    """Measure every part that has weights; log the figures and keep them for the model card."""
    found: Figures = {}
    if weights_file(state, vocoder.NAME).is_file():
        found |= speech_figures(state, corpus, codes, count)
    if weights_file(state, thinker.NAME).is_file():
        found |= answer_figures(state, count)
    for name, value in found.items():
        _logger.info("%s: %s", name, value)
    with replacing(state / FIGURES_FILE) as path:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def speech_figures(state: Path, corpus: SpeechCorpus, codes: npt.NDArray[np.int64], count: int) -> Figures:
    """Return pocketsphinx's word error on held-out sentences, as made by the vocoder and by token2wav."""
    listener = Recognizer(world.spoken_sentences(SENTENCES)[0])
    model = export.trained_token2wav(state)
    names = dit.speakers(corpus)

    def from_mel(item: Utterance) -> Wave:
        made: Wave = model.code2wav_bigvgan_model(torch.from_numpy(corpus.mel(item)).T[None]).numpy()
        return made

    def from_codes(item: Utterance) -> Wave:
        ids = torch.from_numpy(codes[item.first : item.first + item.codes])[None]
        speaker = names[item.voice]
        torch.manual_seed(_SEED)
        made: Wave = model(ids, speaker.cond[None], speaker.ref_mel[None]).numpy()
        return made

    stages: dict[str, Callable[[Utterance], Wave]] = {"flite": corpus.wave, "vocoder": from_mel}
    if weights_file(state, dit.NAME).is_file():
        stages["token2wav"] = from_codes
    found: Figures = {}
    with torch.no_grad():
        for stage, make in stages.items():
            for voice in VOICES:
                kept = corpus.of(voice, held_out=True)
                items = random.Random(_SEED).sample(kept, min(count, len(kept)))
                rate = word_error_rate([(item.text, listener.hear(make(item))) for item in items])
                found[f"word error, {stage}, {voice}"] = f"{rate:.1%}"
    return found


def answer_figures(state: Path, count: int, speak: Speak = synthesize) -> Figures:
    """Return the thinker's exact-match accuracy on held-out questions."""
    judge = _Judge(state, speak)
    return {kind: judge.share(questions) for kind, questions in all_questions(count).items()}


class _Judge:
    """Compares the thinker's replies with the expected ones."""

    def __init__(self, state: Path, speak: Speak) -> None:
        self._model = export.trained_thinker(state)
        self._processor = load_processor(state / "processor")
        self._batcher = Batcher(self._processor)
        self._speak = speak

    def share(self, questions: Sequence[Question]) -> str:
        right = [self._is_right(question, question.wave(self._speak)) for question in questions]
        return f"{sum(right)} of {len(right)}"

    def _is_right(self, question: Question, wave: Wave | None) -> bool:
        dialogue, waves = question.dialogue, [] if wave is None else [wave]
        batch = self._batcher([dialogue], random.Random(_SEED), waves)
        inputs: dict[str, Any] = dict(batch.inputs)
        for name in ("input_ids", "attention_mask"):
            inputs[name] = inputs[name][:, : batch.prompts[0]]
        made = self._model.generate(**inputs, max_new_tokens=_MOST_WORDS, do_sample=False)
        reply = self._processor.tokenizer.decode(made[0, batch.prompts[0] :], skip_special_tokens=True)
        wanted = dialogue.turns[-1].reply
        if reply != wanted:
            _logger.info("asked %r, said %r", dialogue.turns[-1].question, reply)
        return bool(reply == wanted)
