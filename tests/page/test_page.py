"""The page in a real Chromium, before the real stack."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.page.browser import Page, browser
from tests.support.http import Readings, get

pytestmark = pytest.mark.page

ANSWER_S = 240.0
ANSWER = "document.querySelector('.assistant:last-of-type')"
IDLE = "document.getElementById('stop').hidden"
READY = "document.getElementById('stack').dataset.state === 'ready'"

Open = Callable[[], Any]


@pytest.fixture
def opened(url: str, microphone: Path, tmp_path: Path) -> Open:
    """Opens the page; at its end nothing must have gone wrong."""

    @asynccontextmanager
    async def open_page() -> AsyncIterator[Page]:
        async with browser(tmp_path, microphone) as page:
            await page.resize(1200, 800)
            await page.open(url)
            await page.until(READY)
            yield page
            assert page.problems == []
            assert [each for each in page.requests if not each.startswith((url, "blob:", "data:"))] == []

    return open_page


async def said(page: Page) -> dict[str, Any]:
    """Wait until the last answer was made and played; gives what the page knows of it."""
    await page.until(f"{ANSWER}?.dataset.state && {IDLE}", ANSWER_S)
    facts: dict[str, Any] = json.loads(await page.js(f"JSON.stringify({ANSWER}.dataset)"))
    facts["text"] = await page.js(f"{ANSWER}.querySelector('.words').textContent")
    return facts


async def check_spoken(page: Page, url: str) -> dict[str, Any]:
    """The last answer was written, and played to the last sample."""
    facts = await said(page)
    assert facts["state"] == "done", facts
    assert facts["text"]
    assert int(facts["scheduled"]) == int(facts["samples"]) > 0
    assert float(facts["heard"]) > 0.01
    assert int(facts["firstAudioMs"]) > 0
    report = await report_of(url, facts["request"])
    assert report["state"] == "completed"
    assert round(report["audio_seconds"] * 24_000) == int(facts["samples"])
    print(f"first audio after {facts['firstAudioMs']} ms, {facts['gaps']} gaps, {facts['samples']} samples")
    return {**facts, **report}


async def report_of(url: str, request: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        report: dict[str, Any] = (await http.get(f"/v1/requests/{request}")).json()
        return report


async def underruns(url: str) -> float:
    """How often, by the gateway's count, speech came later than it was to be heard."""
    metrics = (await asyncio.to_thread(get, url.replace("http:", "tcp:"), "/metrics")).metrics
    return Readings(metrics.values())("omnirelay_playback_underruns_total")


async def offer(page: Page, path: Path) -> None:
    """Drop a file that need not be taken."""
    x, y = await page.place("main")
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        await page.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)


async def drop(page: Page, path: Path) -> None:
    await offer(page, path)
    await page.until("document.querySelector('#files li') !== null")


async def sideways(page: Page) -> int:
    """By how many pixels the page is too wide."""
    width: int = await page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


async def test_pieces_of_all_sizes_are_played_as_one(opened: Open) -> None:
    sizes = [5760, 1, 2879, 11520, 37, 480, 24_000, 3]
    play = """(async () => {
        const { Playback, output } = await import('/page/player.js');
        await new Promise(async (ended) => {
            window.played = new Playback(ended);
            const piece = (size) => new Float32Array(size).fill(0.5);
            // However slow the machine, none comes too late: the clock stands still until all are there.
            await output().suspend();
            SIZES.forEach((size, at) => setTimeout(() => window.played.push(piece(size)), 20 * at));
            setTimeout(() => { window.played.end(); output(); }, 20 * SIZES.length + 100);
        });
        const { scheduled, gaps } = window.played;
        return [scheduled, gaps, Math.round(window.played.position())];
    })()"""

    async with opened() as page:
        await page.click("#text")
        await page.js("import('/page/player.js').then(({ output }) => { output(); })")
        assert await page.js(play.replace("SIZES", str(sizes))) == [sum(sizes), 0, sum(sizes)]


async def test_playing_begins_when_advised_or_when_all_is_there_and_waits_longer_after_one_gap(
    opened: Open,
) -> None:
    play = """(async () => {
        const { Playback, output } = await import('/page/player.js');
        const context = output();
        const leads = [];
        const start = AudioBufferSourceNode.prototype.start;
        AudioBufferSourceNode.prototype.start = function (at) {
            leads.push(Math.round(10 * (at - context.currentTime)) / 10);
            start.call(this, at);
        };
        const until = async (condition) => {
            while (!condition()) await new Promise((go) => setTimeout(go, 5));
        };
        const piece = new Float32Array(240).fill(0.5);
        const began = performance.now();
        const advised = new Playback(() => {});
        advised.wait(700);
        advised.push(piece);
        advised.push(piece);
        const held = advised.scheduled === 0;
        await until(() => advised.scheduled === 480);
        const waited = performance.now() - began;
        advised.stop();
        const whole = new Playback(() => {});
        whole.wait(60000);
        whole.push(piece);
        whole.end();
        const atOnce = whole.scheduled === 240;
        whole.stop();
        leads.length = 0;
        const late = new Playback(() => {});
        for (let each = 1; each <= 4; each++) {
            late.push(piece);
            await until(() => late.position() === 240 * each);
            const heard = context.currentTime;
            await until(() => context.currentTime > heard + 0.05);
        }
        const { gaps } = late;
        late.stop();
        AudioBufferSourceNode.prototype.start = start;
        return [held, waited >= 450, atOnce, leads, gaps];
    })()"""

    async with opened() as page:
        await page.click("#text")
        await page.js("import('/page/player.js').then(({ output }) => { output(); })")
        assert await page.js(play) == [True, True, True, [0.2, 1.2, 0.2, 0.2], 3]


async def test_a_typed_question_is_answered_in_writing_and_aloud(opened: Open, url: str) -> None:
    async with opened() as page:
        assert await page.js("[...document.querySelectorAll('#voice option')].map(o => o.value)") == [
            "Chelsie",
            "Ethan",
            "(text only)",
        ]
        await page.click("#text")
        await page.write("Good morning")
        await page.click("#send")
        await page.until(f"{ANSWER}?.querySelector('.words').textContent")
        # Written and heard while it comes, not at the end.
        await page.until(f"Number({ANSWER}.dataset.scheduled) > 0")
        facts = await check_spoken(page, url)
        await page.click(".assistant .play")
        await page.until("document.querySelector('.play').ariaLabel === 'Pause'")
        await page.until("document.querySelector('.play').ariaLabel.startsWith('Play')")
        await page.js("document.getElementById('voice').value = '(text only)'")
        await page.ask("And now?")
        await page.until("document.querySelectorAll('.assistant').length === 2")
        quiet = await said(page)
        assert quiet["state"] == "done"
        assert int(quiet["samples"]) == 0
        report = await report_of(url, quiet["request"])
        # The first question and its answer were sent again; one question alone comes to 24 tokens here:
        # without speech the template's own system message stands before it, which is shorter.
        assert report["prompt_tokens"] > 24 + facts["text_tokens"]


async def test_a_dropped_picture_and_speech_are_sent_and_shown(opened: Open, url: str, picture: Path) -> None:
    async with opened() as page:
        await drop(page, picture)
        late = [await underruns(url)]
        await page.ask("What can you see in this picture?")
        first = await check_spoken(page, url)
        late.append(await underruns(url))
        assert first["prompt_tokens"] > 60
        assert await page.js("document.querySelector('.user img.media').naturalWidth") == 224
        await hold_to_talk(page)
        second = await check_spoken(page, url)
        late.append(await underruns(url))
        # Others may keep the machine from making sound as fast as it is heard, which the gateway sees;
        # and the page from taking it in time, but not both times.
        gaps = int(first["gaps"]), int(second["gaps"])
        assert gaps[0] <= late[1] - late[0] or gaps[1] <= late[2] - late[1], (gaps, late)
        assert second["prompt_tokens"] > first["prompt_tokens"] + 30
        await page.until("document.querySelector('.user audio.media').duration > 1")
        await page.js("scrollTo(0, 1e6)")
        assert await sideways(page) == 0
        for width in (390, 320):
            await page.resize(width, 844, phone=True)
            assert await sideways(page) == 0
        await page.click("#reset")
        await page.until("document.querySelectorAll('.turn').length === 0")
        assert await sideways(page) == 0


async def hold_to_talk(page: Page) -> None:
    x, y = await page.place("#talk")
    await page.pointer("mousePressed", x, y)
    await page.until("parseFloat(document.getElementById('clock').textContent) >= 2")
    assert await page.js("document.getElementById('talk').ariaPressed") == "true"
    before = await page.js("document.querySelectorAll('.assistant').length")
    await page.pointer("mouseReleased", x, y)
    await page.until(f"document.querySelectorAll('.assistant').length === {before + 1}")


async def test_escape_cancels_at_every_stage(opened: Open, url: str) -> None:
    async with opened() as page, httpx.AsyncClient(base_url=url, trust_env=False) as http:
        await page.ask("Tell me everything.")
        await page.until(f"{ANSWER}?.querySelector('.words').textContent && {ANSWER}.dataset.request")
        await page.press("Escape")
        facts = await said(page)
        assert facts["state"] == "stopped"
        async with asyncio.timeout(30):
            while (report := await report_of(url, facts["request"]))["state"] != "cancelled":
                await asyncio.sleep(0.05)
            while any(held(each) for each in (await http.get("/health")).json()["stages"]):
                await asyncio.sleep(0.05)
        assert report["error"] == "cancelled"


def held(stage: dict[str, Any]) -> int:
    """What a stage holds of requests."""
    return sum(stage["load"][name] for name in ("running", "waiting", "held_bytes", "outbox_bytes"))


async def test_the_keyboard_is_enough(opened: Open, url: str) -> None:
    async with opened() as page:
        # The message field has the focus from the beginning.
        await page.write("One")
        await page.press("Enter", modifiers=8)
        await page.write("Two")
        assert await page.js("document.getElementById('text').value") == "One\nTwo"
        await page.press("Enter")
        await check_spoken(page, url)
        await page.key("keyDown", "F2")
        await page.until("parseFloat(document.getElementById('clock').textContent) >= 1")
        await page.key("keyUp", "F2")
        await page.until("document.querySelectorAll('.assistant').length === 2")
        await check_spoken(page, url)
        reached = set()
        for _ in range(24):
            await page.press("Tab")
            reached.add(await page.js("document.activeElement.id || document.activeElement.className"))
        assert {"voice", "reset", "attach", "text", "talk", "send", "play"} <= reached
        # A recording that is not wanted is not sent.
        await page.key("keyDown", "F2")
        await page.until("!document.getElementById('recording').hidden")
        await page.press("Escape")
        await page.key("keyUp", "F2")
        await page.until("document.getElementById('recording').hidden")
        assert await page.js("document.querySelectorAll('.user').length") == 2
