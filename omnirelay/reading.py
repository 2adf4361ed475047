"""Reading a text aloud: pieces that are spoken one after the other, each begun while another is spoken."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from typing import Any, Final, TypeVar

from omnirelay.events import AudioEvent

LEAST: Final = 24
"""Characters below which a sentence is spoken together with the next one."""
MOST: Final = 240
"""Characters of the longest piece: about 16 seconds, which every talker speaks in one go."""
# No text takes time that grows with its square: no match begins within a run, and none goes back.
_END: Final = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019)\]]*+\s++"
    r"|[\u3002\uff01\uff1f]++[\u201d\u2019\u300d\u300f\uff09]*+\s*+"
    r"|(?<![^\S\n])[^\S\n]*+\n\s*+"
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
            yield from _cut(text[start:end], 0)
            start = end
    yield from _cut(text[start:], 0 if ended else MOST)


async def growing_pieces(texts: AsyncIterable[str]) -> AsyncGenerator[str, None]:
    """Yield the pieces of a text that grows, as soon as each is complete."""
    rest = ""
    async for text in texts:
        rest += text
        given = 0
        for piece in pieces(rest, ended=False):
            given += len(piece)
            yield piece
        rest = rest[given:]
    for piece in pieces(rest):
        yield piece


A = TypeVar("A", bound=AsyncIterable[Any])


async def one_ahead(answers: AsyncGenerator[A, None], end: Callable[[A], None]) -> AsyncGenerator[Any, None]:
    """Yield the events of answers one after the other.

    Args:
        answers: Gives, and so begins, an answer; asked when there is audio of the one before.
        end: Releases an answer, whether or not it is complete.
    """
    answer, ahead = await anext(answers, None), None
    try:
        while answer is not None:
            async for event in answer:
                if ahead is None and isinstance(event, AudioEvent):
                    ahead = asyncio.ensure_future(anext(answers, None))
                yield event
            end(answer)
            answer = None
            answer, ahead = await (ahead or anext(answers, None)), None
    finally:
        if answer is not None:
            end(answer)
        if ahead is not None:
            ahead.cancel()
            found = await asyncio.gather(ahead, return_exceptions=True)
            for late in found:
                if late is not None and not isinstance(late, BaseException):
                    end(late)
        await answers.aclose()


def _sentence_ends(text: str) -> Iterator[int]:
    for match in _END.finditer(text):
        if not _ABBREVIATION.search(text, max(0, match.end() - 8), match.end()):
            yield match.end()


def _cut(sentence: str, kept: int) -> Iterator[str]:
    """Yield pieces until at most ``kept`` characters are left."""
    start = 0
    while (left := len(sentence) - start) > kept:
        end = len(sentence)
        if left > MOST:
            most = start + MOST
            ends = (
                [match.end() for match in pause.finditer(sentence, start + LEAST, most)]
                for pause in (_COMMA, _SPACE)
            )
            end = next((each[-1] for each in ends if each), most)
        yield sentence[start:end]
        start = end
