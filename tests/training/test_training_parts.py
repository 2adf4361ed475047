"""Every part of the training makes a few steps, resumes, and gives a checkpoint that transformers loads."""

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from checkpoint.compact import COMPACT_FILE, compress, expand
from labs.training.__main__ import main
from labs.training.data import codes
from labs.training.data.corpus import make_corpus
from labs.training.data.dialogues import Dialogue, Turn
from labs.training.data.hearing import make_hearing
from labs.training.export import export
from labs.training.measure.evaluation import answer_figures
from labs.training.parts import dit, talker, thinker, vocabulary, vocoder
from labs.training.parts.batches import Batch, Batcher
from labs.training.parts.loop import Losses, Recipe, Step, Stop, Training, load_average
from labs.training.parts.origin import start_from
from omnirelay.errors import CheckpointError
from shared.manifest import MANIFEST_FILE, write_manifest
from tests.support.training import hum, sentences

pytestmark = pytest.mark.training


FEW = Recipe(steps=2, rate=1e-3, warmup=1)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state in which every part made two steps."""
    directory = tmp_path_factory.mktemp("state")
    corpus = make_corpus(directory / "corpus", sentences(), hum)
    ids = codes.make_codes(corpus, directory / "codes.safetensors", corpus, count=16)
    hearing = make_hearing(directory / "hearing", 8, hum)
    stop = Stop(hours=1)
    assert vocoder.train(corpus, directory, stop, FEW).finished
    assert dit.train(corpus, ids, directory, stop, FEW).finished
    assert thinker.train(hearing, directory, stop, FEW).finished
    assert talker.train(corpus, ids, hearing, directory, stop, FEW).finished
    return directory


@pytest.fixture(scope="module")
def exported(state: Path) -> Path:
    """The checkpoint of that state."""
    export(state, make_corpus(state / "corpus"), state / "checkpoint", hum)
    return state / "checkpoint"


@pytest.fixture(scope="module")
def model(exported: Path) -> Any:
    return transformers.Qwen2_5OmniForConditionalGeneration.from_pretrained(exported).eval()


def test_the_trained_checkpoint_answers_in_transformers(exported: Path, model: Any) -> None:
    processor = transformers.Qwen2_5OmniProcessor.from_pretrained(exported)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    unused = 2 * (1600 - len(vocabulary.used_ids())) * 192 + (8448 - 1028) * (192 + 256)
    assert 10e6 < parameters - unused < 14e6
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is one plus one"}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=prompt, return_tensors="pt")
    lengths = {"thinker_min_new_tokens": 3, "thinker_max_new_tokens": 6, "talker_max_new_tokens": 8}
    _, wave = model.generate(**inputs, speaker="Ethan", **lengths)
    assert len(wave) % 480 == 0
    assert "106 English words" in (exported / "README.md").read_text()
    # Else a stage would compute in another one than that of the weights.
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"


def test_parts_reach_the_checkpoint_unchanged(state: Path, model: Any) -> None:
    thinks, speaks = thinker.build(), talker.Talker()
    thinker.load(state, thinks)
    load_average(state, "talker", speaks)
    used = list(vocabulary.used_ids())
    whole = model.thinker.model.embed_tokens.weight
    marks = torch.isin(torch.tensor(used), torch.tensor(talker.mark_ids()))
    assert torch.equal(whole[used][~marks], thinks.model.embed_tokens.weight[:-1][~marks])
    assert torch.equal(whole[talker.mark_ids()], speaks.marks)
    unused = [index for index in range(len(whole)) if index not in set(used)]
    assert (whole[unused] == thinks.model.embed_tokens.weight[-1]).all()
    head = model.talker.codec_head.weight
    assert torch.equal(head[1:1025], speaks.talker.codec_head.weight[:1024])
    assert (head[1025:8292] == speaks.talker.codec_head.weight[-1]).all()


def test_hidden_states_are_as_large_as_embeddings_and_the_logits_are_the_same(state: Path) -> None:
    as_trained, loaded = thinker.build().eval(), thinker.build().eval()
    load_average(state, "thinker", as_trained)
    thinker.load(state, loaded)
    ids = torch.tensor([list(vocabulary.used_ids())[:20]])
    with torch.no_grad():
        before, after = (each(ids, output_hidden_states=True) for each in (as_trained, loaded))
    torch.testing.assert_close(after.logits, before.logits)
    embedded, hidden = (after.hidden_states[at].norm(dim=-1).mean() for at in (0, -1))
    assert 0.5 < hidden / embedded < 2
    assert before.hidden_states[-1].norm(dim=-1).mean() / embedded > 4


def test_the_thinker_trained_is_the_thinker_that_answers(state: Path, model: Any) -> None:
    ours = thinker.build().eval()
    thinker.load(state, ours)
    examples = thinker.Examples(
        vocabulary.load_processor(state / "processor"), make_hearing(state / "hearing", 8)
    )
    batches = [examples.draw(kind, 3, 3) for kind in ("text", "long", "audio", "image")]
    said = [examples.saying(["star two red", "it is big"], 3, kind) for kind in ("read", "text", "long")]
    for batch in [*batches, *said]:
        with torch.no_grad():
            expected = model.thinker(**batch.inputs, use_cache=False).logits[:, :-1]
            loss = thinker.reply_loss(ours, batch)
        places = thinker.learnt(batch)
        targets = batch.inputs["input_ids"][:, 1:][places]
        torch.testing.assert_close(loss, nn.functional.cross_entropy(expected[places], targets))


def test_replies_are_measured_on_held_out_questions(state: Path) -> None:
    figures = answer_figures(state, 2, hum)
    # Nobody has learnt anything in two steps.
    assert figures["text, unseen calculations"] == "0 of 2"
    assert figures["images, any question"] == "0 of 2"
    assert figures["speech, awb, never trained on"] == "0 of 2"


@pytest.fixture(scope="module")
def tuned(state: Path, exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state whose thinker and talker made two steps from the weights of that checkpoint."""
    directory = tmp_path_factory.mktemp("tuned")
    compress(exported, directory / "compact")
    start_from(directory / "compact", directory)
    shutil.copytree(state / "hearing", directory / "hearing")
    hearing = make_hearing(directory / "hearing")
    corpus = make_corpus(state / "corpus")
    ids = codes.make_codes(corpus, state / "codes.safetensors", corpus)
    assert thinker.train(hearing, directory, Stop(hours=1), FEW).finished
    assert talker.train(corpus, ids, hearing, directory, Stop(hours=1), FEW).finished
    return directory


def test_a_training_from_a_checkpoint_changes_what_it_trains_and_nothing_else(tuned: Path) -> None:
    assert main(["export", "--state", str(tuned)]) == 0
    before = load_file(tuned / "origin" / "model.safetensors")
    after = load_file(tuned / "checkpoint" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, value in before.items() if not torch.allclose(value, after[name], atol=1e-6)}
    assert {name.partition(".")[0] for name in changed} == {"thinker", "talker"}
    encoders = ("thinker.audio_tower.", "thinker.visual.")
    assert all(any(name.startswith(each) for name in changed) for each in encoders)
    # The talker's marks are rows of it.
    embedding = "thinker.model.embed_tokens.weight"
    assert all(name.startswith((*encoders, "talker.", embedding)) for name in changed)
    for name in ("spk_dict.pt", "tokenizer.json"):
        assert (tuned / "checkpoint" / name).read_bytes() == (tuned / "origin" / name).read_bytes()
    assert (tuned / "compact" / COMPACT_FILE).stat().st_size < 30e6


def test_a_state_that_was_begun_otherwise_takes_no_checkpoint(state: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a state directory of its own"):
        start_from(tmp_path, state)
    with pytest.raises(CheckpointError, match="takes a compact checkpoint"):
        start_from(tmp_path, tmp_path)


class Follow(LogitsProcessor):
    """Makes generation take the given tokens, and keeps the logits."""

    def __init__(self, tokens: list[list[int]]) -> None:
        self.tokens = tokens
        self.logits: list[torch.Tensor] = []

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = len(self.logits)
        self.logits.append(scores.clone())
        forced = torch.full_like(scores, float("-inf"))
        for row, tokens in enumerate(self.tokens):
            forced[row, tokens[min(step, len(tokens) - 1)]] = 0.0
        return forced


def test_the_talker_says_texts_that_are_read_and_answers(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(state, tmp_path / "state", ignore=shutil.ignore_patterns("talker.*"))
    directory, known = tmp_path / "state", {*sentences()[0]}
    corpus = make_corpus(directory / "corpus")
    ids = codes.make_codes(corpus, directory / "codes.safetensors", corpus, count=16)
    hearing = make_hearing(directory / "hearing", 8, hum)
    given: list[tuple[str, str]] = []
    say, draw = thinker.Examples.saying, thinker.Examples.draw

    def saying(self: thinker.Examples, texts: Sequence[str], seed: int, kind: str) -> Batch:
        assert known.issuperset(texts)
        given.append(("said", kind))
        return say(self, texts, seed, kind)

    def drawing(self: thinker.Examples, kind: str, *options: int) -> Batch:
        given.append(("answered", kind))
        return draw(self, kind, *options)

    monkeypatch.setattr(thinker.Examples, "saying", saying)
    monkeypatch.setattr(thinker.Examples, "draw", drawing)
    assert talker.train(corpus, ids, hearing, directory, Stop(hours=1), Recipe(8, 1e-3, warmup=1)).finished
    assert {("said", kind) for kind in ("read", "text", "long")} < set(given)
    assert {kind for way, kind in given if way == "answered"} == {"image", "audio", "text"}


def test_the_talker_is_trained_on_the_rows_and_positions_of_the_reference(state: Path, model: Any) -> None:
    """Two prompts of unequal length: transformers keeps their mask, and with it the start embeddings."""
    processor = transformers.Qwen2_5OmniProcessor.from_pretrained(state / "processor")
    dialogues = [
        Dialogue((Turn("what is one plus one", "one plus one is two"),)),
        Dialogue((Turn("hello", "hello nice to meet you"),)),
    ]
    batch = Batcher(processor)(dialogues, random.Random(0))
    end = [8294]
    spoken = [[5, 9, 3, 700, 12, 1024, 7, 7, 30], [4, 1, 99, 16, 16, 8, 15, 3, 77]]
    replies = [
        ids[start : start + length].tolist()
        for ids, start, length in zip(batch.inputs["input_ids"], batch.prompts, batch.replies, strict=True)
    ]
    texts = [
        processor.tokenizer.decode(ids[:start])
        for ids, start in zip(batch.inputs["input_ids"], batch.prompts, strict=True)
    ]
    inputs = processor(text=texts, padding=True, padding_side="left", return_tensors="pt")
    assert (inputs["attention_mask"] == 0).any()
    reference = Follow([codes + end for codes in spoken])
    model.generate(
        **inputs,
        speaker="Ethan",
        thinker_logits_processor=LogitsProcessorList([Follow(replies)]),
        thinker_max_new_tokens=12,
        talker_logits_processor=LogitsProcessorList([reference]),
        talker_do_sample=False,
        talker_repetition_penalty=1.0,
        talker_max_new_tokens=12,
    )
    ours, frozen = talker.Talker().eval(), thinker.build().eval()
    load_average(state, "talker", ours)
    thinker.load(state, frozen)
    with torch.no_grad():
        _, logits, *_ = talker.predicted(
            ours, frozen, batch, [(1, torch.tensor(codes)) for codes in spoken], replaced=0.0
        )
    for step in range(9):
        for row in range(2):
            torch.testing.assert_close(
                logits[row * 10 + step, :1024], reference.logits[step][row, 1:1025], atol=2e-4, rtol=1e-3
            )


def test_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    def losses(step: Step) -> Losses:
        noise = torch.rand(4, 3, generator=torch.Generator().manual_seed(step.seed))
        return {"square": models[-1](noise).square().mean()}

    recipe = Recipe(steps=6, rate=0.1, warmup=2)
    models = [nn.Linear(3, 2)]
    start = {name: value.clone() for name, value in models[0].state_dict().items()}
    whole = Training("part", models[0], recipe, tmp_path)
    whole.run(losses, Stop(hours=1))
    other = tmp_path / "other"
    other.mkdir()
    for steps in (2, 5, 6):
        models.append(nn.Linear(3, 2))
        models[-1].load_state_dict(start)
        part = Training("part", models[-1], dataclasses.replace(recipe, steps=steps), other)
        # The rate is that of all six steps; only the end comes sooner.
        part.recipe = recipe
        while part.steps < steps:
            part.run(losses, _After(part, steps))
    assert load_file(other / "part.safetensors").keys() == {"weight", "bias"}
    for name, value in load_file(tmp_path / "part.safetensors").items():
        assert torch.equal(load_file(other / "part.safetensors")[name], value)


class _After(Stop):
    """Stops a training when it has made so many steps."""

    def __init__(self, training: Training, steps: int) -> None:
        super().__init__(hours=1)
        self._training, self._steps = training, steps

    def __bool__(self) -> bool:
        return self._training.steps >= self._steps


def test_a_signal_stops_a_training_after_the_step_in_progress() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop(hours=1)
    with stop.on_signals():
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    assert signal.getsignal(signal.SIGTERM) == before


def test_hours_that_do_not_suffice_are_told_and_the_work_is_kept(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(state / "corpus", tmp_path / "corpus")
    assert main(["vocoder", "--state", str(tmp_path), "--hours", "0"]) == 3
    assert (tmp_path / "vocoder.state.pt").is_file()
    assert main(["export", "--state", str(tmp_path)]) == 1
    assert "holds no weights of dit, thinker, talker" in capsys.readouterr().err


def test_a_compact_checkpoint_becomes_the_same_one_again(exported: Path, tmp_path: Path) -> None:
    compress(exported, tmp_path / "compact")
    compact = {path.name: path for path in (tmp_path / "compact").iterdir()}
    assert sum(path.stat().st_size for path in compact.values()) < 30e6
    assert "model.safetensors" not in compact
    assert not any(path.suffix == ".pt" for path in compact.values())
    expand(tmp_path / "compact", tmp_path / "expanded")
    before = load_file(exported / "model.safetensors")
    after = load_file(tmp_path / "expanded" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], value.half().float()), name
    voices = torch.load(tmp_path / "expanded" / "spk_dict.pt", weights_only=True)
    assert voices.keys() == {"Chelsie", "Ethan"}
    assert voices["Ethan"]["ref_mel"].shape == (1, 300, 80)
    names = {path.name for path in exported.iterdir()}
    assert names | {MANIFEST_FILE} == {path.name for path in (tmp_path / "expanded").iterdir()}
    # It is one of this package, so a newer one may take its place.
    expand(tmp_path / "compact", tmp_path / "expanded")


def test_a_damaged_compact_checkpoint_is_not_expanded(tmp_path: Path) -> None:
    write_compact(tmp_path)
    with (tmp_path / COMPACT_FILE).open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError, match=r"compact\.safetensors is damaged"):
        expand(tmp_path, tmp_path / "expanded")


def head(**entry: Any) -> dict[str, str]:
    """What a compact file says of the rows of its only tensor."""
    return {"rows": json.dumps({"head": entry})}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (head(rows=8448), "missing required field `kept`"),
        (head(rows=1 << 40, kept=[]), "Expected `int` <= 1048576"),
        (head(rows=True, kept=[]), "Expected `int`, got `bool`"),
        (head(rows=8448, kept=[3, 2]), "do not ascend"),
        (head(rows=8448, kept=[8448]), "do not ascend"),
        (head(rows=8448, kept="all"), "Expected `array`, got `str`"),
        (head(rows=8448, kept=[1, 2]), "holds 2 rows"),
        ({"format": "another"}, "no compact checkpoint of the format"),
        ({"rows": "{"}, "its metadata is not what was written"),
        ({"rows": "[]"}, "Expected `object`, got `array`"),
        ({"voices": '{"Ethan": 1}'}, "the voice Ethan is incomplete"),
        ({"rows": '{"absent": {"rows": 2, "kept": []}}'}, "absent described, but not there"),
    ],
)
def test_a_compact_file_that_was_changed_is_refused(
    changed: dict[str, str], problem: str, tmp_path: Path
) -> None:
    write_compact(tmp_path, **changed)
    with pytest.raises(CheckpointError, match=problem):
        expand(tmp_path, tmp_path / "expanded")
    assert not (tmp_path / "expanded").exists()


def write_compact(directory: Path, **changed: str) -> None:
    metadata = {"format": "omnirelay-compact-1", "rows": "{}", "voices": "{}", **changed}
    save_file({"head": torch.zeros(2, 4)}, directory / COMPACT_FILE, metadata)
    write_manifest(directory)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / COMPACT_FILE).write_bytes(b"\xff" * 64)
    write_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        expand(tmp_path, tmp_path / "expanded")
    with pytest.raises(CheckpointError, match="holds no model"):
        compress(tmp_path, tmp_path / "compact")


def test_weights_beyond_16_bits_are_refused(tmp_path: Path) -> None:
    save_file({"large": torch.full((2,), 1e6)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="large holds values that 16 bits cannot"):
        compress(tmp_path, tmp_path / "compact")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["large"]


def test_a_signal_to_every_process_ends_no_drawing(tmp_path: Path) -> None:
    training = Training("part", nn.Linear(1, 1), Recipe(steps=60, rate=1e-3), tmp_path)
    drawn = training.drawn_ahead(lambda step: step.number)
    assert next(drawn) == 0
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGTERM)
    assert [*drawn] == [*range(1, 60)]
