"""The closed world of the speaking checkpoint: its words, its replies, and what its training never asks."""

import random

import numpy as np
import pytest

from labs.training.data import images, world
from labs.training.data.conditions import CONDITIONS
from labs.training.data.dialogues import (
    FOLLOWING,
    TRANSCRIBE,
    Conversations,
    Dialogue,
    Spoken,
    SpokenQuestions,
    Turn,
    as_typed,
    as_written,
    talk_exchanges,
    texts_to_read,
)
from labs.training.data.questions import all_questions
from labs.training.data.world import Fact
from labs.training.parts import vocabulary
from tests.support.training import hum

pytestmark = pytest.mark.training


WORDS = set(world.vocabulary())


def dialogues(count: int) -> list[Dialogue]:
    generator, conversations = random.Random(5), Conversations(alike=0.5)
    spoken = SpokenQuestions(conversations)
    found = [conversations.typed(generator) for _ in range(count)]
    found += [conversations.seen(generator) for _ in range(count)]
    found += [conversations.mixed(generator) for _ in range(count)]
    found += [conversations.long(generator) for _ in range(count // 4)]
    found += conversations.orders(generator, count)
    return found + [conversations.heard(spoken.draw(generator), generator) for _ in range(count)]


def test_every_reply_is_made_of_about_a_hundred_words() -> None:
    assert 95 <= len(WORDS) <= 115
    for dialogue in dialogues(300):
        for turn in dialogue.turns:
            assert set(turn.reply.split()) <= WORDS
    trained, held_out = world.spoken_sentences(400)
    assert {word for text in (*trained, *held_out) for word in text.split()} <= WORDS
    assert {word for text in world.word_sequences(400) for word in text.split()} == WORDS


def test_each_number_has_its_words() -> None:
    assert world.number(0) == "zero"
    assert world.number(19) == "nineteen"
    assert world.number(40) == "forty"
    assert world.number(-21) == "minus twenty one"
    assert world.number(100) == "one hundred"
    assert len({world.number(value) for value in range(-100, 101)}) == 201


def test_nothing_held_out_is_ever_asked() -> None:
    held_out = {fact.question for fact in world.FACTS if fact.is_held_out}
    greetings = {question for question, _ in talk_exchanges(held_out=True)}
    asked: set[str] = set()
    for dialogue in dialogues(1500):
        for turn in dialogue.turns:
            asked.add(turn.reply.partition(" is ")[0])
            assert turn.question.lower().rstrip("?.") not in greetings
    assert len(greetings) >= 3
    assert held_out
    assert not asked & held_out
    trained, kept = world.spoken_sentences(800)
    assert not set(trained) & set(kept)
    assert not {text.partition(" is ")[0] for text in trained} & held_out


def test_what_is_held_out_follows_from_what_is_trained() -> None:
    facts = {(fact.left, fact.operation, fact.right): fact for fact in world.FACTS}
    shares = {}
    for operation in ("plus", "times"):
        ours = [fact for fact in world.FACTS if fact.operation == operation]
        kept = [fact for fact in ours if fact.is_held_out]
        shares[operation] = len(kept) / len(ours)
        for fact in kept:
            assert not facts[fact.right, operation, fact.left].is_held_out
    assert all(0.02 < share < 0.12 for share in shares.values())
    assert sum(fact.is_held_out for fact in world.FACTS if world.is_easy(fact)) > 40


def test_each_calculation_is_followed_by_its_other_order() -> None:
    drawn = Conversations().orders(random.Random(3), 60)
    known = {fact.reply: fact for fact in world.FACTS}
    facts = [known[dialogue.turns[-1].reply] for dialogue in drawn]
    assert {fact.operation for fact in facts} == {*world.OPERATIONS}
    for one, other in zip(facts[:60], facts[60:], strict=True):
        assert (one.left, one.operation, one.right) == (other.right, other.operation, other.left)


def test_each_question_over_an_image_has_one_reply_and_every_thing_is_visible() -> None:
    generator = random.Random(2)
    for _ in range(60):
        scene = images.scene(generator)
        assert len(dict(scene.exchanges)) == len(scene.exchanges)
        drawn = np.asarray(scene.draw(generator), dtype=float)
        ground = drawn[0, 0]
        side = len(drawn)
        for thing in scene.things:
            centre = drawn[int(thing.y * side), int(thing.x * side)]
            assert np.abs(centre - ground).sum() > 60
            assert thing.radius < min(thing.x, thing.y, 1 - thing.x, 1 - thing.y)


@pytest.mark.parametrize(("alike", "share"), [(0.0, 0.75), (0.5, 0.45)])
def test_small_numbers_are_asked_more_often_unless_all_are_alike(alike: float, share: float) -> None:
    generator, conversations = random.Random(7), Conversations(alike)
    asked = [conversations.exchange(generator)[0].removeprefix("what is ") for _ in range(3000)]
    facts = [fact for fact in world.FACTS if fact.question in {*asked}]
    known = {fact.question: world.is_easy(fact) for fact in facts}
    easy = [known[question] for question in asked if question in known]
    assert sum(easy) / len(easy) == pytest.approx(share, abs=0.06)


def answered(conversations: Conversations, spoken: Spoken, generator: random.Random) -> Dialogue:
    """One in which the question is answered and not written down."""
    while (dialogue := conversations.heard(spoken, generator)).turns[-1].instruction:
        pass
    return dialogue


def test_some_questions_of_known_words_are_to_be_written_down() -> None:
    generator, conversations = random.Random(4), Conversations()
    known = [conversations.heard(Spoken("hello", "hello"), generator) for _ in range(200)]
    written = [dialogue for dialogue in known if dialogue.turns[-1].instruction == TRANSCRIBE]
    assert 10 < len(written) < 60
    other = Spoken("what is the weather", "i do not know")
    assert not any(conversations.heard(other, generator).turns[-1].instruction for _ in range(50))


def test_a_spoken_operation_goes_on_from_the_result_before_it() -> None:
    generator, conversations = random.Random(3), Conversations()
    for question, (operation, right) in FOLLOWING.items():
        dialogue = answered(conversations, Spoken(question), generator)
        before, last = dialogue.turns
        result = before.reply.partition(" is ")[2]
        assert last.spoken
        assert last.reply.startswith(f"{result} {operation} {world.number(right)} is ")


def test_an_image_comes_before_or_after_something_else() -> None:
    generator, conversations = random.Random(6), Conversations()
    drawn = [conversations.mixed(generator).turns for _ in range(100)]
    assert all(any(turn.scene is not None for turn in turns) for turns in drawn)
    assert {turns[0].scene is None for turns in drawn} == {True, False}
    assert {turns[-1].scene is None for turns in drawn} == {True, False}


def test_another_reply_takes_the_place_of_the_last() -> None:
    asked = Dialogue((Turn("hello", "hello"), Turn("what is one plus one", "one plus one is two")))
    other = asked.replying("it is red")
    assert [turn.reply for turn in other.turns] == ["hello", "it is red"]
    assert [turn.question for turn in other.turns] == [turn.question for turn in asked.turns]


def test_typing_changes_the_form_and_not_the_question() -> None:
    generator = random.Random(1)
    forms = {as_typed("what is twenty one plus five", generator) for _ in range(200)}
    assert {"what is 21 + 5", "What is twenty one plus five?", "what is 21 plus 5"} <= forms
    assert Fact(21, "plus", 5).reply == "twenty one plus five is twenty six"


def test_texts_to_read_are_of_any_kind_and_never_those_that_are_measured() -> None:
    texts = texts_to_read(400)
    assert texts_to_read(400) == texts
    assert len(set(texts)) == 400
    assert {word for text in texts for word in text.split()} <= WORDS
    right = {fact.reply for fact in world.FACTS}
    assert {text in right for text in texts if " plus " in text and " is " in text} == {True, False}
    measured = {
        question.reply
        for kind, questions in all_questions(40).items()
        if kind.startswith("reading")
        for question in questions
    }
    assert not measured & {
        *texts_to_read(3000),
        *world.word_sequences(1600),
        *world.spoken_sentences(6400)[0],
    }


def test_marks_and_capitals_are_written_and_not_spoken() -> None:
    generator = random.Random(3)
    forms = {as_written("it is red", generator) for _ in range(400)}
    assert {"it is red", "It is red.", "it is red?"} <= forms
    assert any("," in form for form in forms)
    assert {"".join(each for each in form.lower() if each not in ",.!?") for form in forms} == {"it is red"}


def test_held_out_questions_are_of_every_kind_and_the_same_again() -> None:
    found = all_questions(8)
    groups = {kind.partition(",")[0] for kind in found}
    assert groups >= {*CONDITIONS, "text", "images", "speech", "nobody speaks", "typed", "unknown", "reading"}
    assert all(found.values())
    again = all_questions(8)
    for kind, questions in found.items():
        for question, other in zip(questions, again[kind], strict=True):
            wave, repeated = question.wave(hum), other.wave(hum)
            assert question.reply == other.reply
            assert (wave is None) == (not question.dialogue.turns[-1].spoken)
            if wave is not None and repeated is not None:
                assert (wave == repeated).all()
    assert found["typed, in capitals"][0].dialogue.turns[-1].question.isupper()
    assert len(found["typed, after 30 turns"][0].dialogue.turns) == 31


def test_every_word_is_one_token_wherever_it_stands() -> None:
    tokenizer = vocabulary.tokenizer()
    used = set(vocabulary.used_ids())
    for word in WORDS:
        for form in (word, f" {word}", word.capitalize(), f" {word.upper()}"):
            ids = tokenizer.encode(form, add_special_tokens=False).ids
            assert len(ids) == 1, form
            assert ids[0] in used
    assert len(used) < 450


def test_equal_seeds_give_equal_dialogues() -> None:
    assert dialogues(20) == dialogues(20)
