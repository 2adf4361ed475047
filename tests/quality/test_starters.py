"""What a newcomer is offered to ask is answered well."""

from pathlib import Path

import pytest

from omnirelay import AsyncClient
from shared.starters import load_starters, read_media
from tests.support.restarting import RestartingStack

pytestmark = [pytest.mark.quality, pytest.mark.timeout(300)]

REPLIES = [
    "twenty plus sixteen is thirty six",
    "sixteen minus five is eleven",
    "i can see and hear and count",
    "eight plus seven is fifteen",
    "it is a big purple triangle",
]


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
