"""The quality harness: what it asks, how it judges speech, and what its table says."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.quality.__main__ import missed, table
from benchmarks.quality.answers import Asked, Samples, SpokenReply, held_out_requests
from benchmarks.quality.figures import (
    LEAST_RIGHT,
    SENTENCES,
    Score,
    answer_figures,
    ends_right,
    pitch,
    speech_figures,
)
from labs.training.data import world
from omnirelay import AudioPart, ImagePart
from omnirelay.content import media_of
from omnirelay.values import SAMPLE_RATE
from tests.support.training import hum

SPEAKERS = ("Chelsie", "Ethan")
HERTZ = {"Chelsie": 190.0, "Ethan": 110.0}


def voice(hertz: float, seconds: float) -> Samples:
    """Something like a vowel, which dies away."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = sum(np.sin(2 * np.pi * hertz * k * time) / k for k in range(1, 12))
    fade = np.minimum(1, (seconds - time) / 0.1)
    return np.asarray(0.1 * tones * fade, dtype=np.float32)


def say(speaker: str, text: str) -> Samples:
    return voice(HERTZ[speaker], 0.3 * len(text.split()))


def reply(text: str, wanted: str | None = None, **changes: object) -> SpokenReply:
    kind, speaker = str(changes.get("kind", "text, sums")), str(changes.get("speaker", "Ethan"))
    samples = changes.get("samples", say(speaker, text) if text else np.zeros(0, np.float32))
    assert isinstance(samples, np.ndarray)
    return SpokenReply(
        Asked(kind, [], wanted or text, speaker), text, samples, bool(changes.get("ended", True))
    )


@pytest.mark.parametrize("hertz", [85.0, 110.0, 190.0, 260.0])
def test_pitch_is_that_of_the_voice_in_noise(hertz: float) -> None:
    noise = np.random.default_rng(0).standard_normal(SAMPLE_RATE) * 0.01
    assert pitch((voice(hertz, 1.0) + noise).astype(np.float32)) == pytest.approx(hertz, rel=0.03)


def test_what_is_no_voice_has_no_pitch() -> None:
    noise = np.random.default_rng(0).standard_normal(SAMPLE_RATE).astype(np.float32)
    assert pitch(noise) == 0
    assert pitch(np.zeros(SAMPLE_RATE, np.float32)) == 0
    assert pitch(np.zeros(10, np.float32)) == 0


def test_speech_ends_right_if_it_is_neither_cut_nor_goes_on() -> None:
    whole = voice(110, 1.5)
    assert ends_right(whole, 1.5, ended=True)
    assert not ends_right(whole, 1.5, ended=False)
    assert not ends_right(whole[: len(whole) * 9 // 10], 1.5, ended=True)
    assert not ends_right(voice(110, 0.9), 1.5, ended=True)
    assert not ends_right(voice(110, 2.4), 1.5, ended=True)
    assert not ends_right(np.zeros(0, np.float32), 1.5, ended=True)


def test_answers_are_counted_by_kind_and_group() -> None:
    replies = [
        *[reply("two", kind="text, sums")] * 97,
        *[reply("two", "three", kind="text, talk")] * 4,
        reply("hello", kind="speech, trained voices"),
        reply("hello", "goodbye", kind="speech, awb, never trained on"),
        reply("hello", kind="speech, kal, never trained on"),
    ]
    found = {figure.name: figure for figure in answer_figures(replies)}
    assert (found["right: text"].count, found["right: text"].of) == (97, 101)
    assert not found["right: text"].kept
    assert found["- text, talk"].count == 0
    assert found["right: speech, trained voices"].kept
    assert found["right: speech, other voices"].value == 0.5
    assert "right: images" not in found


def test_words_in_any_order_are_compared_with_what_is_heard_of_the_synthesizer() -> None:
    read = [
        reply("two plus two is nine", kind="reading, wrong sums"),
        reply("you ten me", kind="reading, any words"),
        # Only of the synthesizer nothing is heard.
        reply("omni", kind="reading, any words", samples=voice(150, 1.0)),
    ]
    written = {each.samples.tobytes(): each.text for each in read}

    def hear(samples: Samples) -> str:
        return written.get(samples.tobytes(), "")

    found = {each.name: each for each in speech_figures(read, [], SPEAKERS, hear, hear, say)}
    texts, any_words = (found[f"word error: {what} read aloud"] for what in ("texts", "words in any order"))
    assert (texts.count, texts.of, texts.most) == (0, 5, 0.04)
    assert found["word error: words in any order read by the synthesizer"].value == 0.25
    assert (any_words.count, any_words.of, any_words.most) == (0, 4, 0.29)


def test_speech_is_heard_compared_and_told_apart() -> None:
    texts = ["one two three", "good night", "two plus two is four", "hello"]
    streamed = [reply(text, speaker=who) for text in texts for who in SPEAKERS]
    offline = [SpokenReply(each.asked, each.text, each.samples, each.ended) for each in streamed[:4]]
    babble = voice(HERTZ["Chelsie"], 4.0)
    streamed.append(reply("my name is omni", speaker="Ethan", samples=babble))
    streamed.append(reply("", "lost", speaker="Ethan"))
    written = {each.samples.tobytes(): each.text for each in streamed if each.samples is not babble}
    for each in [say(who, "my name is omni") for who in SPEAKERS]:
        written[each.tobytes()] = "my name is omni"

    def hear(samples: Samples) -> str:
        return written.get(samples.tobytes(), "my name is")

    found = {each.name: each for each in speech_figures(streamed, offline, SPEAKERS, hear, hear, say)}
    assert found["word error: the synthesizer, Ethan"].count == 0
    assert (found["word error: streamed, Ethan"].count, found["word error: streamed, Ethan"].of) == (1, 15)
    assert found["word error: streamed, Chelsie"].kept
    assert found["word error: offline, Ethan"].of == found["word error: streamed, same, Ethan"].of == 5
    assert (found["- word error: streamed, calculations"].of, found["- word error: streamed, images"].of) == (
        10,
        0,
    )
    assert found["- word error: streamed, other sentences"].count == 1
    assert found["- word error: streamed, digits and counting"].of == 6
    ended, apart = found["speech ends by itself, at the right place"], found["voices told apart by pitch"]
    assert (ended.count, ended.of) == (8, 9) == (apart.count, apart.of)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("minus two plus twenty five is twenty three", "calculations"),
        ("you said one plus", "digits and counting"),
        ("i see a red star and an orange circle", "images"),
        ("yes it is red", "images"),
        ("yes i can see", "other sentences"),
        ("i do not know", "other sentences"),
    ],
)
def test_each_reply_is_of_one_kind(text: str, kind: str) -> None:
    assert [name for name, begins in SENTENCES.items() if begins.match(text)] == [kind]


def test_the_table_shows_what_missed_its_bound() -> None:
    ours = [Score("right", 97, 100, least=0.97), Score("error", 6, 100, most=0.05), Score("said", 1, 2)]
    assert table(ours).rows == [
        ["right", "97.0% (97 of 100)", "at least 97%", "kept"],
        ["error", "6.0% (6 of 100)", "at most 5.0%", "**missed**"],
        ["said", "50.0% (1 of 2)", "", ""],
    ]
    assert missed(ours) == ["error: 6.0% (6 of 100), at most 5.0%"]
    assert missed(ours, few=True) == []


def test_few_cases_miss_a_bound_only_where_chance_does_not_explain_it() -> None:
    assert Score("right", 34, 40, least=0.97).kept is False
    assert Score("right", 37, 40, least=0.97).plausible
    assert not Score("right", 30, 40, least=0.97).plausible
    assert Score("error", 12, 140, most=0.05).plausible
    assert not Score("error", 40, 140, most=0.05).plausible


def test_requests_are_of_every_kind_and_hold_nothing_that_was_trained() -> None:
    requests = held_out_requests(4, hum)
    kinds = list(dict.fromkeys(each.kind for each in requests))
    groups = [kind.partition(",")[0] for kind in kinds]
    assert groups[:12] == ["text"] * 4 + ["images"] * 2 + ["speech"] * 6
    known = {*LEAST_RIGHT, "speech", "reading"}
    assert {*groups} | {"speech, trained voices", "speech, other voices"} == known
    assert {each.speaker for each in requests} == set(SPEAKERS)
    trained = {fact.reply for fact in world.FACTS if not fact.is_held_out}
    assert not {each.reply for each in requests if each.kind.startswith("text")} & trained
    written = {"text", "typed", "unknown", "reading"}
    expected: dict[str, list[type]] = {each: [] if each in written else [AudioPart] for each in groups}
    expected["images"] = [ImagePart]
    for each in requests:
        media = [part for _, part in media_of(each.messages)]
        wanted = expected[each.kind.partition(",")[0]]
        assert [type(part) for part in media][: len(wanted)] == wanted
        roles = [message.role for message in each.messages]
        assert roles[0] == "user"
        assert roles[-1] == "user"
        assert all(first != second for first, second in pairwise(roles))
    again = held_out_requests(4, hum)
    assert [each.messages for each in again] == [each.messages for each in requests]
    assert [each.seed for each in again] == [each.seed for each in requests]
