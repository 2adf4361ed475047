"""How the training measures itself: by an independent listener, and by right and wrong replies."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labs.training import card
from labs.training.data import world
from labs.training.measure.recognizer import Recognizer, bigram, word_error_rate, word_errors
from omnirelay.errors import CheckpointError

pytestmark = pytest.mark.training


def test_word_errors_are_the_fewest_changes() -> None:
    assert word_errors("one two three", "one two three") == 0
    assert word_errors("one two three", "one three") == 1
    assert word_errors("one two", "one big two") == 1
    assert word_errors("one two three", "four") == 3
    assert word_errors("one", "") == 1
    assert word_error_rate([("one two", "one two"), ("one two", "two")]) == 0.25


def chances(text: str, section: str) -> Iterator[tuple[str, float]]:
    _, _, rest = text.partition(f"\\{section}-grams:\n")
    for line in rest.partition("\n\n")[0].splitlines():
        chance, *words = line.split()
        yield " ".join(words[: int(section)]), float(chance)


def test_the_bigram_counts_what_follows_what() -> None:
    text = bigram(["one two", "one two", "one three"])
    single, pairs = dict(chances(text, "1")), dict(chances(text, "2"))
    assert "ngram 1=5" in text
    assert f"ngram 2={len(pairs)}" in text
    assert single["<s>"] == -99
    assert pairs["one two"] > pairs["one three"]
    assert 10 ** pairs["one two"] == pytest.approx(0.8 * 2 / 3, rel=1e-3)
    assert "two three" not in pairs


def test_a_missing_recognizer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(CheckpointError, match=r"omnirelay-server\[training\]"):
        Recognizer(["one two"])


def test_the_card_says_what_it_knows_and_how_well(tmp_path: Path) -> None:
    text = card.model_card(tmp_path)
    assert "Not measured yet." in text
    assert all(word in text for word in world.vocabulary())
    (tmp_path / card.FIGURES_FILE).write_text('{"word error, vocoder, Ethan": "2.0%"}')
    (tmp_path / card.NOTES_FILE).write_text("Trained in another order.\n")
    text = card.model_card(tmp_path)
    assert "| word error, vocoder, Ethan | 2.0% |" in text
    assert "on a CPU.\n\nTrained in another order.\n\n## Figures" in text
