"""The page when its gateway is lost: it goes on with the answer by itself, at another one if there is one."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from omnirelay import Client
from omnirelay.errors import GatewayUnreachableError
from tests.page.browser import ANSWER, READY, Page, browser
from tests.page.test_page import report_of
from tests.support.processes import Processes, wait_until
from tests.support.stack import RunningStack, addresses_of_several, make_config

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]

QUESTION = "Tell me a story about a fox and a dog."
SAMPLES = f"Number({ANSWER}?.dataset.samples ?? 0)"
LIMITS = {"max_text_tokens": 60, "max_codec_tokens": 500}


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A stack with one gateway."""
    config = make_config(tiny_checkpoint, gateway={"limits": LIMITS})
    with Processes(config, tmp_path_factory.mktemp("resume")) as processes:
        yield processes.start_all()


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack with two gateways."""
    config = make_config(tiny_checkpoint, gateway={"replicas": 2, "limits": LIMITS, **addresses_of_several()})
    with RunningStack(config, tmp_path_factory.mktemp("gateways")) as stack:
        yield stack


async def outlives(page: Page, first: str, lose: Callable[[], None], second: str) -> None:
    """An answer whose gateway is lost ends as one that is left alone does, with a report at the second."""
    await page.open(first, READY)
    await page.ask(QUESTION)
    whole = await page.said()
    await page.begin_anew()
    await page.ask(QUESTION)
    await page.until(f"{SAMPLES} > 0")
    before = await page.js(f"{ANSWER}.dataset.request")
    await asyncio.to_thread(lose)
    facts = await page.said()
    assert facts["state"] == "done", facts
    assert facts["text"] == whole["text"]
    assert facts["request"] != before
    report = await report_of(second, facts["request"])
    # What the gateway says of the whole answer is what the page has of it.
    assert round(report["audio_seconds"] * 24_000) == int(facts["samples"]) == int(facts["scheduled"])


def check_network_only(page: Page) -> None:
    """That the gateway was away is all that went wrong."""
    assert [each for each in page.problems if '"source": "network"' not in each] == []


async def test_an_answer_outlives_its_gateway(alone: Processes, microphone: Path, tmp_path: Path) -> None:
    url = alone.config["gateway"]["http"].replace("tcp:", "http:")

    def restart() -> None:
        alone.kill("gateway")
        alone.start("gateway")

    async with browser(tmp_path, microphone) as page:
        await outlives(page, url, restart, url)
        check_network_only(page)
    wait_until(alone.ready, "the stack is ready again")


def gateway_pid(address: str) -> int:
    """The process of a gateway, when it answers."""
    pids: list[int] = []

    def answers() -> bool:
        with suppress(GatewayUnreachableError), Client(address) as client:
            pids.append(client.status().gateway.pid)
        return bool(pids)

    wait_until(answers, "the gateway answers", 60)
    return pids[0]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_answer_goes_on_at_the_other_gateway(
    pair: RunningStack, microphone: Path, tmp_path: Path, fault: signal.Signals
) -> None:
    gateway = pair.config["gateway"]
    first = gateway["http"].replace("tcp:", "http:")
    host, _, port = first.rpartition(":")
    second = f"{host}:{int(port) + 100}"
    pid = gateway_pid(gateway["listen"])

    try:
        async with browser(tmp_path, microphone) as page:
            await outlives(page, first, lambda: os.kill(pid, fault), second)
            # A further question goes there from the start.
            await page.until(READY)
            await page.ask(QUESTION)
            again = await page.said()
            assert again["state"] == "done", again
            await report_of(second, again["request"])
            check_network_only(page)
    finally:
        if fault == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
