"""The page where there are two gateways: it goes on at the other one."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from omnirelay import Client
from omnirelay.errors import GatewayUnreachableError
from tests.page.browser import browser
from tests.page.test_page import ANSWER, READY, report_of, run, said
from tests.page.test_page_resume import SAMPLES, ask
from tests.support.processes import wait_until
from tests.support.stack import RunningStack, addresses_of_several, make_config

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    limits = {"max_text_tokens": 60, "max_codec_tokens": 500}
    config = make_config(tiny_checkpoint, gateway={"replicas": 2, "limits": limits, **addresses_of_several()})
    with RunningStack(config, tmp_path_factory.mktemp("gateways")) as stack:
        yield stack


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
def test_an_answer_goes_on_at_the_other_gateway(
    stack: RunningStack, microphone: Path, tmp_path: Path, fault: signal.Signals
) -> None:
    gateway = stack.config["gateway"]
    first = gateway["http"].replace("tcp:", "http:")
    host, _, port = first.rpartition(":")
    second = f"{host}:{int(port) + 100}"
    pid = gateway_pid(gateway["listen"])

    async def scenario() -> None:
        async with browser(tmp_path, microphone) as page:
            await page.open(first)
            await page.until(READY)
            await ask(page)
            whole = await said(page)
            await page.click("#reset")
            await page.until("document.querySelectorAll('.turn').length === 0")
            await ask(page)
            await page.until(f"{SAMPLES} > 0")
            before = await page.js(f"{ANSWER}.dataset.request")
            os.kill(pid, fault)
            facts = await said(page)
            assert facts["state"] == "done", facts
            assert facts["text"] == whole["text"]
            assert facts["request"] != before
            report = await report_of(second, facts["request"])
            assert round(report["audio_seconds"] * 24_000) == int(facts["samples"]) == int(facts["scheduled"])
            # A further question goes there from the start.
            await page.until(READY)
            await ask(page)
            again = await said(page)
            assert again["state"] == "done", again
            await report_of(second, again["request"])
            assert [each for each in page.problems if '"source": "network"' not in each] == []

    try:
        run(scenario())
    finally:
        if fault == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
