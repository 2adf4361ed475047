"""Conversations with an open microphone that outlive their network, and their gateway, in a real Chromium."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile

from services.thinker.media.decoded import Samples
from shared.config import Config
from shared.messages import ThinkRequest
from tests.gateway.bench import make_config
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speaking
from tests.gateway.test_turns import SENTENCES, said
from tests.page.browser import ANSWER, DONE, READY, Page, browser
from tests.page.test_page_live import ANSWERED, LIVE, LIVE_STATE, SPEECH
from tests.support.proxy import Relay

pytestmark = pytest.mark.page

CUT_S = 10
SPOKEN_S = 2.0
"""The sentence with what turn detection leaves of the silence around it."""
QUESTION = np.repeat(np.frombuffer(said(SENTENCES[0]), "<i2"), 2)
SAMPLES = f"Number({ANSWER}?.dataset.samples ?? 0)"
TURNS = """[...document.querySelectorAll('.turn')].map((turn) =>
    [turn.classList[1], turn.querySelector('.words').textContent.trim()])"""
WRITTEN = f"JSON.stringify({TURNS}) === JSON.stringify({[[who, ANSWERED] for who in ('user', 'assistant')]})"
"""What the user said may be written down after the answer has come."""
RESUMED = 'omnirelay_realtime_resumes_total{outcome="taken_over"}'


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the microphone hears: a sentence, and nothing after it for as long as a test lasts."""
    path = tmp_path_factory.mktemp("microphone") / "once.wav"
    silence = np.zeros(48_000, np.int16)
    soundfile.write(path, np.concatenate([silence, QUESTION, *[silence] * 90]), 48_000)
    return path


@pytest.fixture
def config(checkpoint_dir: Path) -> Config:
    return make_config(checkpoint_dir, http_gateway())


@pytest.fixture
async def relayed(config: Config, tmp_path: Path, once: Path) -> AsyncIterator[tuple[HttpBench, Page, Relay]]:
    """A conversation whose connection can be cut."""
    async with gateway_at(config) as b, browser(tmp_path, once) as page:
        with Relay(config.gateway.http or "") as relay:
            await begin(page, relay.address.replace("tcp:", "http:"))
            yield b, page, relay


@asynccontextmanager
async def gateway_at(config: Config, speech: Samples = SPEECH) -> AsyncIterator[HttpBench]:
    """A gateway that answers every question."""
    pieces = np.split(speech, range(12_000, speech.size, 12_000))
    async with http_bench(config) as b, speaking(b, ANSWERED, pieces, 0.4):
        yield b


async def begin(page: Page, url: str) -> None:
    await page.open(url, READY)
    await page.click("#live")
    await page.until(f"{LIVE}.dataset.link === 'websocket'")


def heard_in(request: ThinkRequest) -> float:
    """The seconds of a question's recording."""
    with soundfile.SoundFile(BytesIO(bytes(request.media[-1].data.view))) as recording:
        return float(recording.frames / recording.samplerate)


async def cut(relay: Relay) -> None:
    """The network is gone, without a word to either side, for some time and until ``refuses`` is unset."""
    relay.refuses = True
    await asyncio.to_thread(relay.cut)
    await asyncio.sleep(CUT_S)


async def test_an_answer_outlives_the_network(relayed: tuple[HttpBench, Page, Relay]) -> None:
    b, page, relay = relayed
    await page.until(f"{SAMPLES} > 0")
    await cut(relay)
    assert await page.js(SAMPLES) < SPEECH.size
    relay.refuses = False
    await page.until(DONE)
    assert await page.js(SAMPLES) == SPEECH.size
    await page.until(WRITTEN)
    assert await b.metric(RESUMED) == 1


async def test_a_question_outlives_the_network(relayed: tuple[HttpBench, Page, Relay]) -> None:
    b, page, relay = relayed
    async with asyncio.timeout(30):
        while await b.metric('omnirelay_realtime_turns_total{event="started"}') == 0:
            await asyncio.sleep(0.02)
    await cut(relay)
    assert not b.stages.requests
    relay.refuses = False
    await page.until(f"{SAMPLES} > 0")
    assert heard_in(b.stages.requests[0]) == pytest.approx(SPOKEN_S, abs=0.3)
    assert await b.metric(RESUMED) == 1


@pytest.mark.parametrize("where", ["restarted", "another"])
async def test_an_answer_is_asked_for_again_where_its_gateway_is_lost(
    where: str, once: Path, checkpoint_dir: Path, tmp_path: Path
) -> None:
    gateways = [http_gateway(), http_gateway()]
    urls = [each["http"].replace("tcp:", "http:") for each in gateways]
    others = {"http_gateways": urls if where == "another" else []}
    configs = [make_config(checkpoint_dir, each | others) for each in gateways]
    async with browser(tmp_path, once) as page, AsyncExitStack() as second:
        async with gateway_at(configs[0]):
            if where == "another":
                other = await second.enter_async_context(gateway_at(configs[1]))
            await begin(page, urls[0])
            await page.until(f"{SAMPLES} > 0")
        if where == "restarted":
            other = await second.enter_async_context(gateway_at(configs[0]))
        await until(lambda: bool(other.stages.requests), "the question, again")
        assert heard_in(other.stages.requests[0]) == pytest.approx(SPOKEN_S, abs=0.3)
        await page.until(DONE)
        assert await page.js(SAMPLES) == SPEECH.size
        await page.until(WRITTEN)


async def test_a_conversation_goes_on_when_its_gateway_was_restarted(
    config: Config, sentence: Path, tmp_path: Path
) -> None:
    async with browser(tmp_path, sentence) as page:
        async with gateway_at(config, SPEECH[:8000]) as b:
            await begin(page, b.url)
            await page.until(f"{ANSWER}?.dataset.state === 'done' && {TURNS}.length === 2")
            await page.until(f"{TURNS}[0][1] === {ANSWERED!r}")
        async with gateway_at(config, SPEECH[:8000]) as b:
            await until(lambda: bool(b.stages.requests), "another question")
            request = b.stages.requests[0]
            assert b.prompt_of(request).count(ANSWERED) == 2
            assert len(request.media) == 1
            await page.until(f"{TURNS}.length === 4")


async def test_a_conversation_can_be_ended_while_there_is_no_gateway(
    config: Config, once: Path, tmp_path: Path
) -> None:
    async with browser(tmp_path, once) as page:
        async with gateway_at(config) as b:
            await begin(page, b.url)
            await page.until(f"{SAMPLES} > 0")
        await page.until(f"{LIVE_STATE} === 'Connecting …'")
        await page.click("#live-end")
        await page.until("document.getElementById('live-panel').hidden")
