"""Starters of checkpoints: what is taken of them, and what is passed over."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.starters import (
    MOST_FILE_BYTES,
    MOST_MEDIA_BYTES,
    RECIPE_FILE,
    STARTERS_FILE,
    Starter,
    has_random_weights,
    load_starters,
    read_media,
)

GOOD: list[dict[str, Any]] = [
    {"text": "What is two plus two?"},
    {"audio": "a.wav", "says": "what is one plus one"},
    {"text": "What do you see?", "image": "b.png"},
]


def write(directory: Path, starters: object) -> None:
    (directory / "a.wav").write_bytes(b"RIFF")
    (directory / "b.png").write_bytes(b"PNG")
    (directory / STARTERS_FILE).write_text(json.dumps(starters))


def test_starters_are_read_with_their_files(tmp_path: Path) -> None:
    assert load_starters(tmp_path) == []
    write(tmp_path, GOOD)
    assert load_starters(tmp_path) == [Starter(**each) for each in GOOD]
    assert [each.typed for each in load_starters(tmp_path)] == [True, False, False]
    assert read_media(tmp_path, "b.png") == b"PNG"


@pytest.mark.parametrize(
    "starters",
    [
        {"text": "no list"},
        [{"text": "x" * 201}],
        [{"text": "x", "image": "../b.png"}],
        [{"text": "x", "image": "/etc/passwd"}],
        [{"text": "x", "url": "https://example.org"}],
        [{"text": 3}],
        [{"text": "x"}] * 13,
        [{"text": "x" * 150}] * 12 + [{"text": "y" * MOST_FILE_BYTES}],
    ],
)
def test_a_file_of_another_form_is_not_used(
    tmp_path: Path, starters: object, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, starters)
    assert load_starters(tmp_path) == []
    assert f"{STARTERS_FILE} of {tmp_path} is not used" in caplog.text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda at: (at / "b.png").unlink(), "No such file"),
        (lambda at: (at / "b.png").write_bytes(bytes(MOST_MEDIA_BYTES + 1)), "has more than 1048576 bytes"),
    ],
)
def test_a_starter_without_its_file_is_left_out(
    tmp_path: Path, change: Callable[[Path], object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [*GOOD, {"says": "nothing to send"}])
    change(tmp_path)
    assert load_starters(tmp_path) == [Starter(**each) for each in GOOD[:2]]
    assert why in caplog.text


@pytest.mark.parametrize(
    ("recipe", "random"),
    [
        (None, False),
        ('{"seed": 0, "shape": {}}', True),
        ('{"trained": true}', False),
        ('{"trained": 1}', False),
        ("{", False),
        (f'{{"trained": false, "more": "{"x" * MOST_FILE_BYTES}"}}', False),
    ],
)
def test_a_checkpoint_says_whether_its_weights_are_random(
    tmp_path: Path, recipe: str | None, random: bool
) -> None:
    if recipe is not None:
        (tmp_path / RECIPE_FILE).write_text(recipe)
    assert has_random_weights(tmp_path) is random
