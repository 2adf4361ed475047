"""The page in a real Chromium: questions by keyboard, voice and picture, answers in writing and sound."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.bench import keys_file
from tests.gateway.fake_stages import SPEAKERS
from tests.gateway.http_bench import HttpBench, melody, speaking
from tests.page.browser import ANSWER, DONE, IDLE, READY, TEXT_ONLY, Before, Page

pytestmark = pytest.mark.page

KEY = "omr_a-key-of-the-page"
STACK = "document.getElementById('stack').dataset.state"
TOLD = "document.getElementById('stack-text').textContent"


async def check_spoken(b: HttpBench, page: Page) -> dict[str, Any]:
    """The last answer was written, and played to the last sample."""
    facts = await page.said()
    assert facts["state"] == "done", facts
    assert facts["text"]
    assert int(facts["scheduled"]) == int(facts["samples"]) > 0
    assert float(facts["heard"]) > 0.01
    assert int(facts["firstAudioMs"]) > 0
    report = await report_of(b.url, facts["request"])
    assert report["state"] == "completed"
    assert round(report["audio_seconds"] * 24_000) == int(facts["samples"])
    return facts


async def report_of(url: str, request: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        report: dict[str, Any] = (await http.get(f"/v1/requests/{request}")).json()
        return report


async def sideways(page: Page) -> int:
    """By how many pixels the page is too wide."""
    width: int = await page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


async def test_pieces_of_all_sizes_are_played_as_one(before: Before) -> None:
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

    async with before() as (_, page):
        await page.click("#text")
        await page.js("import('/page/player.js').then(({ output }) => { output(); })")
        assert await page.js(play.replace("SIZES", str(sizes))) == [sum(sizes), 0, sum(sizes)]


async def test_playing_begins_when_advised_or_when_all_is_there_and_waits_longer_after_one_gap(
    before: Before,
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

    async with before() as (_, page):
        await page.click("#text")
        await page.js("import('/page/player.js').then(({ output }) => { output(); })")
        assert await page.js(play) == [True, True, True, [0.2, 1.2, 0.2, 0.2], 3]


async def test_a_typed_question_is_answered_in_writing_and_aloud(before: Before) -> None:
    async with before() as (b, page):
        voices = await page.js("[...document.querySelectorAll('#voice option')].map(o => o.value)")
        assert voices == [*SPEAKERS, "(text only)"]
        await page.click("#text")
        await page.write("Good morning")
        await page.click("#send")
        name = (await b.stages.request(0)).request_id
        await b.stages.text(name, 0, b.encode("Hello there"))
        await b.stages.audio(name, 0, melody(1.0).tobytes())
        # Written and heard while it comes, not at the end.
        await page.until(f"{ANSWER}?.querySelector('.words').textContent && {ANSWER}.dataset.scheduled > 0")
        await b.stages.text(name, 1, b.encode("."), "stop")
        await b.stages.codec(name, 0, [7] * 10, "stop")
        await b.stages.audio(name, 1, melody(0.5).tobytes(), last=True)
        assert (await check_spoken(b, page))["text"].strip() == "Hello there."
        await page.click(".assistant .play")
        await page.until("document.querySelector('.play').ariaLabel === 'Pause'")
        await page.until("document.querySelector('.play').ariaLabel.startsWith('Play')")
        await page.js(TEXT_ONLY)
        await page.ask("And now?")
        again = await b.stages.request(1)
        await b.stages.answer(again, b.encode("Well."))
        await page.until("document.querySelectorAll('.assistant').length === 2")
        quiet = await page.said()
        assert (quiet["state"], quiet["samples"], again.speech) == ("done", "0", None)
        # The first question and its answer were sent again.
        prompt = b.prompt_of(again)
        assert all(words in prompt for words in ("Good morning", "Hello there.", "And now?"))


async def test_a_dropped_picture_and_speech_are_sent_and_shown(before: Before, picture: Path) -> None:
    async with before() as (b, page), speaking(b, "A house.", [melody()]):
        await page.drop(picture)
        await page.ask("What can you see in this picture?")
        await check_spoken(b, page)
        assert await page.js("document.querySelector('.user img.media').naturalWidth") == 224
        await hold_to_talk(page)
        assert (await check_spoken(b, page))["gaps"] == "0"
        sent = [[item.kind for item in request.media] for request in b.stages.requests]
        assert sent == [["image"], ["image", "audio"]]
        await page.until("document.querySelector('.user audio.media').duration > 1")
        await page.js("scrollTo(0, 1e6)")
        assert await sideways(page) == 0
        for width in (390, 320):
            await page.resize(width, 844, phone=True)
            assert await sideways(page) == 0
        await page.begin_anew()
        assert await sideways(page) == 0


async def hold_to_talk(page: Page) -> None:
    x, y = await page.place("#talk")
    await page.pointer("mousePressed", x, y)
    await page.until("parseFloat(document.getElementById('clock').textContent) >= 2")
    assert await page.js("document.getElementById('talk').ariaPressed") == "true"
    before = await page.js("document.querySelectorAll('.assistant').length")
    await page.pointer("mouseReleased", x, y)
    await page.until(f"document.querySelectorAll('.assistant').length === {before + 1}")


async def test_the_keyboard_is_enough(before: Before) -> None:
    async with before() as (b, page), speaking(b, "Hello", [melody(0.5)]):
        # The message field has the focus from the beginning.
        await page.write("One")
        await page.press("Enter", modifiers=8)
        await page.write("Two")
        assert await page.js("document.getElementById('text').value") == "One\nTwo"
        await page.press("Enter")
        await check_spoken(b, page)
        await page.key("keyDown", "F2")
        await page.until("parseFloat(document.getElementById('clock').textContent) >= 1")
        await page.key("keyUp", "F2")
        await page.until("document.querySelectorAll('.assistant').length === 2")
        await check_spoken(b, page)
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


async def test_a_key_is_asked_for_and_kept_until_the_tab_is_closed(before: Before, tmp_path: Path) -> None:
    keys = str(keys_file(tmp_path / "keys.yaml", page={"key": KEY}))
    async with before(gateway={"api_keys": keys}, ready=False) as (b, page):
        b.stages.serve(b.encode("Hello"))
        await page.until("document.getElementById('key-field').hidden === false")
        assert await page.js(STACK) == "away"
        assert await page.js(TOLD) == "needs an API key"
        await page.resize(390, 844, phone=True)
        assert await sideways(page) == 0
        assert await page.js("document.getElementById('send').getBoundingClientRect().right") <= 390
        await page.click("#key")
        await page.write("omr_wrong")
        await page.press("Enter")
        await page.until(f"{TOLD} === 'the API key is not accepted'")
        await page.js("document.getElementById('key').select()")
        # An invisible sign, as chats put into what is copied, is not a part of it.
        await page.write(f"{KEY[:9]}\u200b{KEY[9:]}")
        await page.press("Enter")
        await page.until(READY)
        await page.ask("Hi")
        # And kept: a reload before that would lose it.
        await page.until(f"{DONE} && {IDLE}")
        assert await page.js(f"{ANSWER}.querySelector('.words').textContent") == "Hello"
        # It ends with the tab: neither other tabs nor a later visit have it.
        kept = "JSON.stringify([{...localStorage}, document.cookie, location.href])"
        assert KEY not in await page.js(kept)
        await page.open(b.url, READY)
        await page.until(f"{ANSWER}?.querySelector('.words').textContent === 'Hello'")
        # What was refused before, and nothing else.
        page.problems = [each for each in page.problems if "401" not in each]
        assert not any(KEY in each for each in page.requests)
