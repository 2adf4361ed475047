"""A conversation on the page with the checkpoint that comes with the package, as a newcomer has it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from tests.page.browser import ANSWER_S, DONE, READY, browser
from tests.support.stack import PATIENT, RunningStack, make_config

pytestmark = [pytest.mark.page, pytest.mark.timeout(600)]

PICTURE = os.environ.get("PAGE_PICTURE")
ANSWERS = ["six plus nine is fifteen", "fifteen plus one is sixteen"]
IDEAS = "[...document.querySelectorAll('.idea')].map(each => each.textContent)"


@pytest.fixture(scope="module")
def trained_url(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = make_config(speaking_checkpoint, gateway={**PATIENT, "webrtc": {"enabled": True}})
    with RunningStack(config, tmp_path_factory.mktemp("stack")):
        yield config["gateway"]["http"].replace("tcp:", "http:")


async def test_it_answers_what_it_is_asked(
    trained_url: str, speaking_checkpoint: Path, microphone: Path, tmp_path: Path
) -> None:
    starters = json.loads((speaking_checkpoint / "starters.json").read_text(encoding="utf-8"))
    typed = [each["text"] for each in starters if set(each) == {"text"}]
    if PICTURE:
        # A stack's first answer is slower: what is shown is not that.
        speech = {"model": "omnirelay", "voice": "Chelsie", "input": ANSWERS[0]}
        httpx.post(f"{trained_url}/v1/audio/speech", json=speech, timeout=60).raise_for_status()

    async with browser(tmp_path, microphone) as page:
        await page.resize(1100, 920)
        await page.open(trained_url, READY)
        assert await page.js("document.getElementById('random').hidden")
        assert await page.js(IDEAS) == typed
        answers = []
        for question in ("What is six plus nine?", "And plus one?"):
            await page.ask(question)
            answers.append(await page.said())
        assert [each["state"] for each in answers] == ["done"] * 2
        assert [each["text"] for each in answers] == ANSWERS
        assert page.problems == []
        if PICTURE:
            await page.js("scrollTo(0, 1e6)")
            await page.pointer("mouseMoved", 5, 300)
            await page.picture(Path(PICTURE))


async def test_it_answers_what_it_hears_in_a_call(
    trained_url: str, speaking_checkpoint: Path, tmp_path: Path
) -> None:
    starters = json.loads((speaking_checkpoint / "starters.json").read_text(encoding="utf-8"))
    recording = next(each["audio"] for each in starters if "audio" in each)
    question, rate = soundfile.read(speaking_checkpoint / recording, dtype="int16")
    before, after = np.zeros(rate // 2, np.int16), np.zeros(60 * rate, np.int16)
    microphone = tmp_path / "microphone.wav"
    soundfile.write(microphone, np.concatenate([before, question, after]), rate)

    async with browser(tmp_path, microphone) as page:
        await page.open(trained_url, READY)
        await page.click("#live")
        await page.until("document.getElementById('live').dataset.link === 'webrtc'")
        await page.until(DONE, ANSWER_S)
        words = "[...document.querySelectorAll('.turn .words')].map(each => each.textContent.trim())"
        # The transcript comes after the answer.
        await page.until(f"!{words}[0].includes('…')", ANSWER_S)
        assert (await page.js(words))[-1] == "eight plus seven is fifteen"
        await page.until("document.getElementById('live').dataset.energy > 0.0001")
        assert page.problems == []
