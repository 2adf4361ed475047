"""What the encoders hear and see is compared with what was said and drawn, in the text's own embedding."""

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from labs.training.data.augmentation import SILENT
from labs.training.data.hearing import make_hearing
from labs.training.data.images import Scene, Thing
from labs.training.parts import thinker, vocabulary
from labs.training.parts.alignment import (
    encoded,
    guessed,
    path,
    said_tokens,
    things_at,
    things_loss,
    words_loss,
)
from labs.training.parts.batches import Batch
from tests.support.training import hum

pytestmark = pytest.mark.training


LENGTHS = [15, 3]
SCENE = Scene((Thing("red", "circle", 0.1, 0.1, 0.1), Thing("blue", "square", 0.75, 0.75, 0.25)), ())


@pytest.fixture(scope="module")
def model() -> Any:
    return thinker.build()


def ids_of(text: str) -> list[int]:
    return vocabulary.tokenizer().encode(text, add_special_tokens=False).ids


def even(length: int) -> torch.Tensor:
    """The moments of tokens that are spread evenly over a question."""
    return (torch.arange(length) + 0.5) / length


def batch_of(model: Any, spoken: list[str], lengths: list[int]) -> Batch:
    """A batch of recordings that have so many audio tokens each."""
    audio, other = model.config.audio_token_index, ids_of(" what")[0]
    ids = [[other] + [audio] * length + [other] * (max(lengths) + 1 - length) for length in lengths]
    return Batch({"input_ids": torch.tensor(ids)}, [], [], [], spoken, [], [even(each) for each in lengths])


def encode(model: Any, kind: str, batch: Batch) -> None:
    place = torch.device("cpu")
    if kind == "words":
        model.get_audio_features(**batch.audio(place))
    else:
        model.get_image_features(**batch.images(place))


def outputs_for(model: Any, texts: list[str]) -> torch.Tensor:
    """Outputs of an encoder that hears each word for as long as it is thought to last."""
    ids = [guess(text, even(length)) for text, length in zip(texts, LENGTHS, strict=True)]
    return rows_of(model, torch.cat(ids))


def rows_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    embedding = model.model.embed_tokens
    return embedding.weight.detach()[embedding.index[ids]]


def guess(text: str, moments: torch.Tensor) -> torch.Tensor:
    """The token of each moment, before any was heard."""
    ids, beside = guessed(text, moments)
    return ids[path(-beside)]


def test_a_word_is_first_thought_to_last_as_long_as_it_has_letters() -> None:
    decode = vocabulary.tokenizer().decode
    said_at = [decode([index]).strip() for index in guess("what is zero", even(13)).tolist()]
    assert said_at == ["what"] * 5 + ["is"] * 3 + ["zero"] * 5
    assert set(guess("hello", even(7)).tolist()) == set(ids_of(" hello"))
    assert len(guess("what is two", even(2))) == 2
    assert guess("what is two", torch.tensor([0.0, 1.0])).tolist() == ids_of(" what") + ids_of(" two")


SIZES = st.tuples(st.integers(0, 4), st.integers(1, 4)).map(lambda size: (sum(size), size[1]))


@given(arrays(np.float32, SIZES, elements=st.floats(-9, 0, width=16)))
def test_words_are_found_in_their_order_where_they_are_likeliest(likely: npt.NDArray[np.float32]) -> None:
    moments, tokens = likely.shape
    ways = itertools.combinations_with_replacement(range(tokens), moments)
    whole = [list(way) for way in ways if len({*way}) == tokens]
    found = path(likely).tolist()
    assert found in whole
    best = max(likely[range(moments), way].sum() for way in whole)
    assert likely[range(moments), found].sum() == pytest.approx(best, abs=1e-4)


def test_a_word_is_wanted_where_it_is_heard_instead_of_where_it_was_guessed_to_be(model: Any) -> None:
    spoken = ["two plus two", "hello"]
    batch = batch_of(model, spoken, LENGTHS)
    later = torch.tensor(ids_of(8 * " two" + 4 * " plus" + 3 * " two" + LENGTHS[1] * " hello"))
    outputs = rows_of(model, later)
    assert words_loss(model, outputs, batch, finds=True) < 0.05
    assert words_loss(model, outputs, batch) > 1


def test_a_codec_id_says_a_word_where_it_is_told_to_and_the_one_after_it_is_next() -> None:
    one, two, ten = (ids_of(f" {word}")[0] for word in ("one", "two", "ten"))
    index = torch.arange(vocabulary.tokenizer().get_vocab_size() + 99)
    likely = torch.full((8, len(index)), -9.0)
    for moment, token in enumerate([one, two, two, two, two, two, ten, ten]):
        likely[moment, token] = -0.1
    found = said_tokens("one two ten", likely, index)
    assert found[:, 0].tolist() == [one, two, two, two, two, two, ten, ten]
    assert found[:, 1].tolist() == [two, ten, ten, ten, ten, ten, ten, ten]


def test_outputs_like_the_words_said_have_little_loss_and_others_more(model: Any) -> None:
    spoken = ["what is two plus two", "hello"]
    batch = batch_of(model, spoken, LENGTHS)
    right = words_loss(model, outputs_for(model, spoken), batch)
    wrong = words_loss(model, outputs_for(model, ["what is two plus three", "hello"]), batch)
    swapped = words_loss(model, outputs_for(model, ["hello", "two"]), batch)
    assert right < 0.05
    assert right + 0.5 < wrong < swapped


def test_two_recordings_of_one_dialogue_are_two(model: Any) -> None:
    spoken = ["what is two plus two", "hello"]
    audio, other = model.config.audio_token_index, ids_of(" what")[0]
    ids = [other, *[audio] * LENGTHS[0], other, *[audio] * LENGTHS[1], other]
    moments = [even(each) for each in LENGTHS]
    together = Batch({"input_ids": torch.tensor([ids])}, [], [], [], spoken, [], moments)
    outputs, apart = outputs_for(model, spoken), batch_of(model, spoken, LENGTHS)
    assert words_loss(model, outputs, together) == words_loss(model, outputs, apart)


def test_where_nothing_is_said_no_word_is_wanted(model: Any) -> None:
    spoken, silent = ["what is two plus two", "hello"], torch.full((4,), SILENT)
    lengths = [each + 4 for each in LENGTHS]
    batch = batch_of(model, spoken, lengths)
    said = [torch.cat([silent, even(LENGTHS[0])]), torch.cat([even(LENGTHS[1]), silent])]
    # The last token is one that only the codec's padding made.
    batch = dataclasses.replace(batch, moments=[said[0], said[1][:-1]])
    first, second = outputs_for(model, spoken).split(LENGTHS)
    other = outputs_for(model, ["goodbye", "goodbye"])[:4]
    outputs = torch.cat([other, first, second, other])
    assert words_loss(model, outputs, batch) < 0.05
    nobody = dataclasses.replace(batch, moments=[torch.full((each,), SILENT) for each in lengths])
    assert words_loss(model, outputs, nobody) < 0.01


def test_outputs_much_larger_than_text_are_pulled_towards_its_size(model: Any) -> None:
    batch = batch_of(model, ["hello", "hello"], LENGTHS)
    outputs = outputs_for(model, ["hello", "hello"])
    assert words_loss(model, outputs, batch) < words_loss(model, 40 * outputs, batch) - 1


def test_a_thing_is_seen_where_it_was_drawn() -> None:
    cells = [thing and thing.colour for thing in things_at(SCENE, 4, 4)]
    assert cells == [
        "red", None, None, None,
        None, None, None, None,
        None, None, "blue", "blue",
        None, None, "blue", "blue",
    ]  # fmt: skip
    assert [thing and thing.colour for thing in things_at(SCENE, 1, 2)] == ["red", "blue"]


def test_outputs_like_the_things_drawn_have_little_loss_and_others_more(model: Any) -> None:
    embedding = model.model.embed_tokens
    rows = embedding.weight.detach()

    def outputs(first: Scene) -> torch.Tensor:
        return torch.stack(
            [
                sum(rows[embedding.index[ids_of(f" {word}")[0]]] for word in (each.colour, each.shape))
                if each is not None
                else rows[embedding.index[ids_of(" what")[0]]]
                for each in things_at(first, 4, 4)
            ]
        )

    grid = torch.tensor([[1, 8, 8]])
    batch = Batch({"image_grid_thw": grid}, [], [], [], [], [SCENE])
    right = things_loss(model, outputs(SCENE), batch)
    other = Scene((dataclasses.replace(SCENE.things[0], colour="green"), SCENE.things[1]), ())
    neither = Scene(
        tuple(dataclasses.replace(each, colour="white", shape="star") for each in SCENE.things), ()
    )
    assert right < 0.1
    assert (
        right + 0.5 < things_loss(model, outputs(other), batch) < things_loss(model, outputs(neither), batch)
    )
    assert things_loss(model, 40 * outputs(SCENE), batch) > right + 1


@pytest.mark.parametrize("kind", ["words", "things"])
def test_the_loss_trains_the_encoder_and_leaves_the_text_embedding_alone(tmp_path: Path, kind: str) -> None:
    model = thinker.build().train()
    hearing = make_hearing(tmp_path / "hearing", 4, hum)
    examples = thinker.Examples(vocabulary.load_processor(tmp_path / "processor"), hearing)
    batch = examples.draw(kind, 1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    encoder, token = {
        "words": (model.audio_tower, model.config.audio_token_index),
        "things": (model.visual, model.config.image_token_id),
    }[kind]
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with encoded(model) as outputs:
            encode(model, kind, batch)
        (output,) = outputs.values()
        assert len(output) == (batch.inputs["input_ids"] == token).sum()
        loss = {"words": words_loss, "things": things_loss}[kind](model, output, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.model.embed_tokens.weight.grad is None
    assert any(each.grad is not None and each.grad.norm() > 0 for each in encoder.parameters())


def test_the_encoders_are_followed_no_longer_than_asked(model: Any) -> None:
    with pytest.raises(ZeroDivisionError), encoded(model):
        raise ZeroDivisionError
    assert not model.audio_tower._forward_hooks
    assert not model.visual._forward_hooks


def test_orders_are_compared_where_their_results_are_predicted(tmp_path: Path) -> None:
    processor = vocabulary.load_processor(tmp_path / "processor")
    equals, minus, seven = (
        processor.tokenizer(f" {word}")["input_ids"][0] for word in ("is", "minus", "seven")
    )
    examples = thinker.Examples(processor, make_hearing(tmp_path / "hearing", 4, hum))
    batch = examples.draw("orders", 1, 40)
    assert any(" is minus " in text for text in batch.texts)
    model = thinker.build().train()

    def differ(place: int) -> bool:
        """Whether another token there, counted from each result, gives another loss."""
        before = thinker.orders_losses(model, batch, equals, minus)
        changed = copy.deepcopy(batch)
        for ids, start, reply in zip(changed.inputs["input_ids"], batch.prompts, batch.replies, strict=True):
            at = start + ids[start:].tolist().index(equals) + 1
            ids[min(at + (ids[at] == minus) + place, start + reply - 1)] = seven
        after = thinker.orders_losses(model, changed, equals, minus)
        return any(not torch.equal(before[name], after[name]) for name in ("angle", "divergence"))

    assert [differ(place) for place in (-2, -1, 0)] == [True, True, False]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sums = []
    for _ in range(6):
        optimizer.zero_grad()
        losses = thinker.orders_losses(model, batch, equals, minus)
        (losses["angle"] + losses["divergence"]).backward()
        optimizer.step()
        sums.append(losses["angle"].item())
    assert 0 < sums[-1] < sums[0]
