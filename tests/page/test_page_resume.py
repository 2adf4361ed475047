"""The page when its gateway is lost: it goes on with the answer by itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.messages import STAGES
from tests.page.browser import Page, browser
from tests.page.test_page import ANSWER, READY, report_of, said
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config

pytestmark = pytest.mark.page

QUESTION = "Tell me a story about a fox and a dog."
SAMPLES = f"Number({ANSWER}?.dataset.samples ?? 0)"


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    limits = {"max_text_tokens": 60, "max_codec_tokens": 500}
    config = make_config(tiny_checkpoint, gateway={"limits": limits, "resume_wait_s": 60.0})
    with Processes(config, tmp_path_factory.mktemp("resume")) as processes:
        for name in ("gateway", *STAGES):
            processes.start(name)
        wait_until(processes.ready, "the stack is ready")
        yield processes


async def ask(page: Page) -> None:
    await page.click("#text")
    await page.write(QUESTION)
    await page.press("Enter")


async def test_an_answer_outlives_its_gateway(stack: Processes, microphone: Path, tmp_path: Path) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")

    async with browser(tmp_path, microphone) as page:
        await page.open(url)
        await page.until(READY)
        await ask(page)
        whole = await said(page)
        await page.click("#reset")
        await page.until("document.querySelectorAll('.turn').length === 0")
        await ask(page)
        await page.until(f"{SAMPLES} > 0")
        before = await page.js(f"{ANSWER}.dataset.request")
        await asyncio.to_thread(stack.kill, "gateway")
        stack.start("gateway")
        facts = await said(page)
        assert facts["state"] == "done", facts
        assert facts["text"] == whole["text"]
        assert facts["request"] != before
        report = await report_of(url, facts["request"])
        # What the gateway says of the whole answer is what the page has of it.
        assert round(report["audio_seconds"] * 24_000) == int(facts["samples"]) == int(facts["scheduled"])
        # That the gateway was away is all that went wrong.
        assert [each for each in page.problems if '"source": "network"' not in each] == []
    wait_until(stack.ready, "the stack is ready again")
