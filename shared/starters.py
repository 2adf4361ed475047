"""``starters.json``: questions that a checkpoint brings for people who try it, with their files."""

import logging
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

STARTERS_FILE: Final = "starters.json"
MOST_FILE_BYTES: Final = 2**14
MOST_MEDIA_BYTES: Final = 2**20
RECIPE_FILE: Final = "checkpoint_recipe.json"
"""What a checkpoint of this project was made from."""

FileName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")]
Words = Annotated[str, Meta(max_length=200)]

log = logging.getLogger(__name__)


class Starter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One question.

    Attributes:
        text: What is typed.
        audio: A file of the checkpoint in which it is asked.
        says: What that file says.
        image: A file of the checkpoint that it is asked over.
    """

    text: Words = ""
    audio: FileName | None = None
    says: Words = ""
    image: FileName | None = None

    @property
    def typed(self) -> bool:
        """It is words alone."""
        return bool(self.text) and self.audio is None and self.image is None


class _Recipe(msgspec.Struct):
    trained: bool = False


Starters = Annotated[list[Starter], Meta(max_length=12)]


def load_starters(directory: Path) -> list[Starter]:
    """Return the questions that a checkpoint brings; none if it brings none, or they cannot be used."""
    try:
        content = _read(directory / STARTERS_FILE, MOST_FILE_BYTES)
        starters = msgspec.json.decode(content, type=Starters)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("%s of %s is not used: %s", STARTERS_FILE, directory, error)
        return []
    return [each for each in starters if (each.text or each.audio) and _has_media(directory, each)]


def _has_media(directory: Path, starter: Starter) -> bool:
    try:
        for name in (starter.audio, starter.image):
            if name is not None and (directory / name).stat().st_size > MOST_MEDIA_BYTES:
                raise ValueError(f"{name} has more than {MOST_MEDIA_BYTES} bytes")
    except (OSError, ValueError) as error:
        log.warning("a starter of %s is not used: %s", directory, error)
        return False
    return True


def read_media(directory: Path, name: str) -> bytes:
    """Return a file that a starter names.

    Raises:
        OSError: It cannot be read.
        ValueError: It is too large.
    """
    return _read(directory / name, MOST_MEDIA_BYTES)


def has_random_weights(directory: Path) -> bool:
    """Whether a checkpoint was made by this project without training, so that its answers mean nothing."""
    try:
        return not msgspec.json.decode(_read(directory / RECIPE_FILE, MOST_FILE_BYTES), type=_Recipe).trained
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        log.warning("%s of %s is passed over: %s", RECIPE_FILE, directory, error)
        return False


def _read(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} has more than {most} bytes")
    return content
