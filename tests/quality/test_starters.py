"""What a newcomer is offered to ask, or finds in the documentation and the examples, is answered well."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnirelay import AsyncClient, ChatMessage
from shared.starters import load_starters, read_media
from tests.support.children import ROOT
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.quality, pytest.mark.timeout(300)]

REPLIES = [
    "twenty plus sixteen is thirty six",
    "sixteen minus five is eleven",
    "i can see and hear and count",
    "eight plus seven is fifteen",
    "it is a big purple triangle",
]
ANSWERS = {
    "What is twenty plus sixteen?": "twenty plus sixteen is thirty six",
    "What is sixteen minus five?": "sixteen minus five is eleven",
    "And plus one?": "thirty six plus one is thirty seven",
    "Hello": "hello",
    "Hello!": "hello",
}
"""To typed questions; the third follows the first."""
FOR_OTHERS = {"Tell me more", "How is the weather in Ulm?", "How is the weather in Nairobi?"}
"""To a released model, or with a function."""
SHOWN = re.compile(
    r'(?:chat\(|omnirelay chat |"content": |"text": |"user", |QUESTION = |nargs="\?", default=|'
    r'for text in .*|\n +"? *)"([A-Z][^".]*)"([^\n]*)'
)


def shown() -> Iterator[str]:
    """Every typed question of the documentation and the examples, without those about files."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]:
        text = page.read_text(encoding="utf-8").replace('\\"', '"')
        for question, rest in SHOWN.findall(text):
            if not re.search("image|audio|video", rest + page.stem):
                yield question


async def test_every_question_that_is_shown_gets_a_right_answer(stack: RestartingStack) -> None:
    assert set(shown()) == ANSWERS.keys() | FOR_OTHERS, (
        "questions of a page or example, and their right answers"
    )
    conversation: list[ChatMessage] = []
    async with AsyncClient(stack.address) as client:
        for question, right in ANSWERS.items():
            history = conversation[:2] if question == "And plus one?" else []
            answer = (await client.chat(question, history=history, speech=False).result()).text
            assert answer == right
            conversation += [ChatMessage("user", question), ChatMessage("assistant", answer)]


async def test_the_checkpoint_answers_its_starters(stack: RestartingStack, speaking_checkpoint: Path) -> None:
    replies = []
    async with AsyncClient(stack.address) as client:
        for starter in load_starters(speaking_checkpoint):
            audio = read_media(speaking_checkpoint, starter.audio) if starter.audio else None
            image = read_media(speaking_checkpoint, starter.image) if starter.image else None
            answer = client.chat(
                starter.text or "", audio=[audio] if audio else (), images=[image] if image else ()
            )
            replies.append((await answer.result()).text)
    assert replies == REPLIES
