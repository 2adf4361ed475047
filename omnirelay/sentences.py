"""Cuts a text into pieces that are spoken one after the other."""

import re
from collections.abc import Iterator
from typing import Final

LEAST: Final = 24
"""Characters below which a sentence is spoken together with the next one."""
MOST: Final = 240
"""Characters of the longest piece: about 16 seconds, which every talker speaks in one go."""
_END: Final = re.compile(
    r"[.!?\u2026]+[\"'\u201d\u2019)\]]*\s+|[\u3002\uff01\uff1f]+[\u201d\u2019\u300d\u300f\uff09]*\s*|\s*\n\s*"
)
_ABBREVIATION: Final = re.compile(r"(?:^|\W)(?:[A-Z][a-z]{0,2}|e\.g|i\.e)\.\s$")
_COMMA: Final = re.compile(r"[,;:]\s+|[\uff0c\uff1b\uff1a\u3001]")
_SPACE: Final = re.compile(r"\s+")


def pieces(text: str, ended: bool = True) -> Iterator[str]:
    """Cut a text behind sentences, or where one is too long, behind commas or words.

    Args:
        text: The text; its pieces together are the text.
        ended: Nothing follows the text; otherwise what may go on is not given.
    """
    start = 0
    for end in _sentence_ends(text):
        if end - start >= LEAST:
            yield from _short(text[start:end])
            start = end
    if ended and start < len(text):
        yield from _short(text[start:])


def _sentence_ends(text: str) -> Iterator[int]:
    for match in _END.finditer(text):
        if not _ABBREVIATION.search(text, max(0, match.end() - 8), match.end()):
            yield match.end()


def _short(sentence: str) -> Iterator[str]:
    while len(sentence) > MOST:
        ends = (
            [match.end() for match in pause.finditer(sentence, LEAST, MOST)] for pause in (_COMMA, _SPACE)
        )
        end = next((each[-1] for each in ends if each), MOST)
        yield sentence[:end]
        sentence = sentence[end:]
    if sentence:
        yield sentence
