"""Puts the trained parts together as one checkpoint in the released layout."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from checkpoint.config import write_processors
from checkpoint.shape import SPEAKING
from checkpoint.writer import RECIPE_FILE, complete_directory
from labs.training import card
from labs.training.data.corpus import SpeechCorpus
from labs.training.data.synthesis import Speak, synthesize
from labs.training.parts import dit, talker, thinker, vocabulary, vocoder
from labs.training.parts.loop import load_average, weights_file
from labs.training.parts.origin import copy_origin, origin_of
from labs.training.starters import write_starters
from omnirelay.errors import CheckpointError

VOICES = "spk_dict.pt"
PARTS = (vocoder.NAME, dit.NAME, thinker.NAME, talker.NAME)

_logger = logging.getLogger(__name__)


def export(state: Path, corpus: SpeechCorpus | None, directory: Path, speak: Speak = synthesize) -> None:
    """Write the checkpoint made of the parts in ``state`` to ``directory``.

    Without a ``corpus`` the voices are those of the checkpoint that the training started from, as are
    all parts that were not trained.

    Raises:
        CheckpointError: a part has not been trained at all.
    """
    missing = [name for name in PARTS if not weights_file(state, name).is_file()]
    if missing and origin_of(state) is None:
        raise CheckpointError(f"{state} holds no weights of {', '.join(missing)}; train these parts first")
    model = assemble(state)
    with complete_directory(directory) as partial:
        model.save_pretrained(partial)
        vocabulary.write_processor(partial)
        # save_pretrained writes a generation config of its own.
        write_processors(partial, SPEAKING)
        if corpus is not None:
            torch.save(voices(corpus), partial / VOICES)
        elif (origin := origin_of(state)) is not None:
            shutil.copyfile(origin / VOICES, partial / VOICES)
        recipe = {"trained": True, "shape": dataclasses.asdict(SPEAKING)}
        (partial / RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
        write_starters(partial, speak)
        (partial / "README.md").write_text(card.model_card(state), encoding="utf-8")
    _logger.info("wrote %s", directory)


def voices(corpus: SpeechCorpus) -> dict[str, dict[str, Any]]:
    """Return what ``spk_dict.pt`` holds."""
    tokens = SPEAKING.vocabulary.ids.speakers()
    return {
        name: {"cond": speaker.cond[None], "ref_mel": speaker.ref_mel[None], "bos_token": tokens[name]}
        for name, speaker in dit.speakers(corpus).items()
    }


@torch.no_grad()
def assemble(state: Path) -> Any:
    """Return a ``Qwen2_5OmniForConditionalGeneration`` with the averaged weights of every part."""
    with torch.random.fork_rng(devices=[]):
        model = transformers.Qwen2_5OmniForConditionalGeneration(vocabulary.config()).eval()
    if (origin := origin_of(state)) is not None:
        copy_origin(origin, model)
    if weights_file(state, thinker.NAME).is_file():
        model.thinker = trained_thinker(state)
    if weights_file(state, talker.NAME).is_file():
        speaks = talker.Talker()
        load_average(state, talker.NAME, speaks)
        _copy(speaks.talker, model.talker)
        model.thinker.model.embed_tokens.weight[talker.mark_ids()] = speaks.marks
    model.token2wav = trained_token2wav(state)
    return model


@torch.no_grad()
def trained_thinker(state: Path) -> Any:
    """Return transformers' thinker with the averaged weights, a row for every id."""
    trained = thinker.build()
    thinker.load(state, trained)
    with torch.random.fork_rng(devices=[]):
        model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(vocabulary.config().thinker_config)
    _copy(trained, model)
    ids = SPEAKING.vocabulary.ids
    model.generation_config.eos_token_id = [ids.im_end, ids.end_of_text]
    model.generation_config.pad_token_id = ids.end_of_text
    return model.eval()


def trained_token2wav(state: Path) -> Any:
    """Return transformers' token2wav with the averaged weights of the parts of it that there are."""
    with torch.random.fork_rng(devices=[]):
        model = Qwen2_5OmniToken2WavModel(vocabulary.config().token2wav_config).eval()
    if (origin := origin_of(state)) is not None:
        copy_origin(origin, model, "token2wav.")
    for name, part in ((dit.NAME, model.code2wav_dit_model), (vocoder.NAME, model.code2wav_bigvgan_model)):
        if weights_file(state, name).is_file():
            load_average(state, name, part)
    return model


def _copy(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy parameters; a matrix of shared rows becomes a whole one."""
    rows = {
        f"{name}.weight": part
        for name, part in source.named_modules()
        if isinstance(part, vocabulary.SharedRows)
    }
    parameters = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        parameter.copy_(rows[name].whole() if name in rows else parameters[name])
