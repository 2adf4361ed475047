"""What a user does on the page, in a real Chromium, before a gateway with imitated stages."""

import asyncio
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared.messages import SAMPLE_RATE, ThinkRequest
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, melody, speak, speaking
from tests.gateway.test_say import said
from tests.page.browser import ANSWER, DONE, IDLE, READY, STATE, TEXT_ONLY, Before, Page
from tests.page.test_page import TOLD, report_of

pytestmark = pytest.mark.page

TURNS = "[...document.querySelectorAll('.turn .words')].map(each => each.textContent.trim())"
NOTICE = "document.getElementById('notice').textContent"
LONG_ENOUGH = "parseFloat(document.getElementById('clock').textContent) >= 0.5"
END = f"{ANSWER}.getBoundingClientRect().bottom"
RECORDING = "!document.getElementById('recording').hidden"
TITLES = "[...document.querySelectorAll('.open')].map(each => each.firstChild.textContent)"
PLACE = "document.getElementById('{}').getBoundingClientRect().toJSON()"
PLAYS = "[...document.querySelectorAll('.play')].map(each => each.ariaLabel)"


async def answered(b: HttpBench, page: Page, question: str, text: str) -> ThinkRequest:
    """Ask, and have it answered in writing."""
    count = len(b.stages.requests)
    await page.ask(question)
    request = await b.stages.request(count)
    await b.stages.answer(request, b.encode(text))
    # And kept: a reload before that would lose it.
    await page.until(f"{DONE} && {IDLE} && {ANSWER}.querySelector('.words').textContent.trim() === {text!r}")
    return request


async def half_answered(b: HttpBench, page: Page) -> ThinkRequest:
    """Ask the first question, and begin to answer it."""
    await page.ask("First")
    request = await b.stages.request(0)
    await b.stages.text(request.request_id, 0, b.encode("A half"))
    await page.until(f"{ANSWER}?.querySelector('.words').textContent.trim() === 'A half'")
    return request


async def test_a_conversation_survives_a_reload_and_new_begins_another(before: Before, picture: Path) -> None:
    async with before() as (b, page), speaking(b, "A house.", [melody()]):
        await page.drop(picture)
        await page.ask("What is it?")
        await page.until(f"{DONE} && {IDLE}")
        await page.open(b.url, "document.querySelectorAll('.turn').length === 2")
        assert await page.js(TURNS) == ["What is it?", "A house."]
        await page.until("document.querySelector('.user img.media').naturalWidth === 224")
        assert int(await page.js(f"{ANSWER}.dataset.samples")) == SAMPLE_RATE
        await page.click(".play")
        await page.until(f"{PLAYS}[0] === 'Pause'")
        # The next question is asked in the same conversation, the picture with it.
        await page.ask("And now?")
        await page.until("document.querySelectorAll('.assistant').length === 2")
        await page.until(f"{DONE} && {IDLE}")
        assert len(b.stages.requests[-1].media) == 1
        # What is attached makes the message field taller; the last answer stays above it.
        await page.resize(1200, 500)
        await page.js("scrollTo(0, 1e6)")
        await page.drop(picture)
        await page.until(f"{END} <= document.getElementById('row').getBoundingClientRect().top")
        await page.click("#reset")
        await page.until("document.querySelectorAll('.turn, #files li').length === 0")
        await page.open(b.url, READY)
        assert await page.js("document.querySelectorAll('.turn').length") == 0


async def test_earlier_conversations_are_listed_opened_and_deleted(before: Before) -> None:
    async with before(written=True) as (b, page):
        for number in range(22):
            await page.begin_anew()
            await answered(b, page, f"Question {number}", f"Answer {number}")
        await page.click("#menu-open")
        await page.until(f"{TITLES}.length")
        # The oldest two have made room.
        assert await page.js(TITLES) == [f"Question {number}" for number in reversed(range(2, 22))]
        assert await page.js("document.querySelectorAll('.open[aria-current]').length") == 1
        await page.click("#conversations li:nth-child(3) .open")
        await page.until(f"{TURNS}.join() === 'Question 19,Answer 19'")
        # It goes on where it was, and after a reload.
        request = await answered(b, page, "Go on", "Well")
        assert "Answer 19" in b.prompt_of(request)
        await page.open(b.url, f"{TURNS}.join() === 'Question 19,Answer 19,Go on,Well'")
        await page.click("#menu-open")
        await page.until(f"{TITLES}[0] === 'Question 19'")
        for left in (19, 18):
            await page.click("#conversations li:nth-child(1) .remove")
            await page.until(f"{TITLES}.length === {left}")
        # The first was the one that was open.
        assert await page.js(TITLES) == [
            f"Question {number}" for number in reversed(range(2, 22)) if number < 19 or number == 20
        ]
        assert await page.js("document.querySelectorAll('.turn').length") == 0
        await page.click("#menu-close")
        assert not await page.js("document.getElementById('menu').open")


STORE = """(async () => {
    const { Store } = await import(new URL("store.js", document.querySelector("script[type=module]").src));
    const asked = (order, words) => ({ order, words, files: [], answer: null });
    const words = async (store) => (await store.load()).map((each) => each.words).join();
    %s
})()"""


async def test_two_tabs_with_one_conversation_do_not_overwrite_each_other(before: Before) -> None:
    """As where a tab was duplicated: both have its session storage."""
    tabs = """
    const one = await Store.open();
    await one.save(asked(0, "First"));
    const two = await Store.open();
    await two.load();
    await one.save(asked(1, "One"));
    await two.save(asked(1, "Two"));
    await two.save(asked(2, "Two more"));
    await one.save(asked(2, "One more"));
    return [await words(one), await words(two), (await one.list()).length, one.current !== two.current];
    """
    async with before() as (_, page):
        assert await page.js(STORE % tabs) == ["First,One,One more", "First,Two,Two more", 2, True]


async def test_pages_of_different_versions_do_not_wait_for_each_other(before: Before) -> None:
    newer = """
    await words(await Store.open()); // as the page does before
    const opening = indexedDB.open("omnirelay", 3);
    const opened = await new Promise((done) => {
        opening.onblocked = () => done("blocked");
        opening.onsuccess = () => done("opened");
    });
    // The page's menu opens without its conversations.
    document.getElementById("menu-open").click();
    return opened;
    """
    older = """
    const done = (request) => new Promise((resolve) => (request.onsuccess = resolve));
    await done(indexedDB.deleteDatabase("omnirelay"));
    await done(indexedDB.open("omnirelay", 1));
    return String(await Store.open());
    """
    async with before() as (b, page):
        assert await page.js(STORE % newer) == "opened"
        await page.until("document.getElementById('menu').open")
        await page.open(b.url, READY)
        assert await page.js(STORE % older) == "null"


async def test_instructions_precede_every_conversation(before: Before) -> None:
    async with before(written=True) as (b, page):
        await page.click("#menu-open")
        await page.until("document.getElementById('menu').open")
        await page.click("#system")
        await page.write("Answer in one word.")
        await page.press("Escape")
        for _ in range(2):
            request = await answered(b, page, "Why?", "So")
            assert b.prompt_of(request).count("Answer in one word.") == 1
            await page.open(b.url, READY)
            await page.js(TEXT_ONLY)
            await page.begin_anew()


@pytest.mark.parametrize("width", [320, 375])
async def test_on_a_phone_there_is_room_to_type_with_a_file(
    before: Before, picture: Path, width: int
) -> None:
    async with before() as (b, page):
        await page.resize(width, 640, phone=True)
        await half_answered(b, page)
        await page.drop(picture)
        places = {
            name: await page.js(PLACE.format(name)) for name in ("text", "send", "stop", "live", "attach")
        }
        assert places["text"]["width"] >= 240
        assert places["stop"]["left"] - places["send"]["right"] >= 6
        assert places["send"]["left"] - places["live"]["right"] >= 6
        assert all(0 <= each["left"] < each["right"] <= width for each in places.values())
        assert await page.js("document.documentElement.scrollWidth") == width
        assert await page.js("document.querySelector('.bar').clientHeight") < 80
        assert await page.js(TOLD) == "Ready · model checkpoint"


async def test_an_answer_in_writing_is_read_aloud_and_then_has_its_speech(before: Before) -> None:
    async with before(written=True) as (b, page):
        await page.ask("First")
        await b.stages.answer(await b.stages.request(0), b.encode("A **red** house."))
        await page.until(DONE)
        read = f"{ANSWER}.querySelector('.read')"
        await page.click(".assistant .read")
        failed = await b.stages.request(1)
        await b.stages.audio(failed.request_id, 0, melody().tobytes())
        await page.until(f"parseFloat({ANSWER}.dataset.heard) > 0")
        await b.stages.fail(failed.request_id, "talker", "internal", "the engine failed")
        await page.until(f"!{read}.disabled && {ANSWER}.querySelector('.wrong') !== null")
        await page.click(".assistant .read")
        stopped = await b.stages.request(2)
        await b.stages.audio(stopped.request_id, 0, melody().tobytes())
        await page.until(f"{ANSWER}.dataset.samples === '{SAMPLE_RATE}'")
        await page.click("#stop")
        await page.until(f"!{read}.disabled && document.querySelectorAll('.sound').length === 0")
        await page.click(".assistant .read")
        request = await b.stages.request(3)
        assert said(b, request) == "A red house."
        await speak(b, request, "", [melody(0.3), melody(0.7)])
        await page.until(f"{IDLE} && {ANSWER}.dataset.samples === '{SAMPLE_RATE}' && !{read}")
        await page.open(b.url, f"{PLAYS}[0] === 'Play the answer'")


async def test_escape_cancels_at_every_stage(before: Before) -> None:
    async with before() as (b, page):
        name = (await half_answered(b, page)).request_id
        # Where it closes the dialog it does nothing else.
        await page.click("#menu-open")
        await page.until("document.getElementById('menu').open")
        await page.press("Escape")
        await page.until("!document.getElementById('menu').open")
        assert await page.js(STATE) is None
        await page.press("Escape")
        await page.until(f"{STATE} === 'stopped'")
        await b.stages.aborted(name)
        assert (await report_of(b.url, name))["state"] == "cancelled"


async def test_a_failed_answer_is_retried_in_its_place(before: Before) -> None:
    async with before(written=True) as (b, page):
        request = await half_answered(b, page)
        await b.stages.fail(request.request_id, "thinker", "internal", "the engine failed")
        await page.until(f"{STATE} === 'failed'")
        await answered(b, page, "Second", "Two")
        await page.click(".assistant .again")
        again = await b.stages.request(2)
        await b.stages.answer(again, b.encode("One"))
        await page.until(f"{TURNS}.join() === 'First,One,Second,Two'")
        # It was asked without what came after it.
        assert again.prompt_token_ids == request.prompt_token_ids


async def test_a_killed_gateway_is_noticed_at_once_and_waiting_for_its_successor_can_be_stopped(
    before: Before,
) -> None:
    async with before(written=True) as (b, page):
        await half_answered(b, page)
        await b.process.stop()
        await page.until("document.getElementById('stack').dataset.state === 'away'", seconds=10)
        assert await page.js(f"{STATE}") is None
        await page.click("#stop")
        await page.until(f"{STATE} === 'stopped'")
        assert await page.js("document.querySelector('.again').textContent") == "Try again"
        page.problems.clear()


async def test_while_a_stage_is_away_the_answer_says_so(before: Before) -> None:
    async with before(written=True) as (b, page):
        await page.ask("First")
        request = await b.stages.request(0)
        b.stages.alive.discard("talker")
        await page.until(f"{ANSWER}.querySelector('.facts').textContent.includes('the talker is down')")
        await b.stages.answer(request, b.encode("Done"))
        await page.until(DONE)
        assert "talker" not in await page.js(f"{ANSWER}.querySelector('.facts').textContent")
        # Browsers log each answer of status 503.
        page.problems = [each for each in page.problems if "503" not in each]


async def test_what_is_told_of_a_stage_too_late_is_not_shown_beside_a_whole_answer(before: Before) -> None:
    async with before() as (b, page):
        await page.js("""
            const fetched = window.fetch;
            window.fetch = async (url, options) => {
                if (!url.pathname.endsWith("/readyz")) return fetched(url, options);
                await new Promise((told) => (window.tell = told));
                return new Response('{"reasons": ["the talker is down"]}', { status: 503 });
            };
        """)
        await page.ask("First")
        request = await b.stages.request(0)
        # Nothing comes, so the page asks why; then all of it does.
        waiting = f"{ANSWER}.querySelector('.facts').textContent.match(/waiting ([0-9.]+)/)"
        await page.until(f"window.tell && {waiting} && {waiting}[1] > 4")
        await speak(b, request, "Done", [melody(1.0)])
        await page.until(DONE)
        await page.js("tell()")
        await page.until(f"{IDLE} && document.getElementById('stack').dataset.state === 'away'")
        assert "talker" not in await page.js(f"{ANSWER}.querySelector('.facts').textContent")


async def test_files_are_checked_before_they_are_uploaded(
    before: Before, picture: Path, tmp_path: Path
) -> None:
    media = {"max_item_bytes": 200_000, "max_request_bytes": 300_000, "max_images": 1}
    async with before(media=media) as (b, page):
        large = tmp_path / "noise.png"
        pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
        Image.fromarray(pixels).save(large)
        broken = tmp_path / "photo.heic.png"
        broken.write_bytes(b"this is no picture")
        notes = tmp_path / "notes.txt"
        notes.write_text("words", encoding="utf-8")
        for path, words in (
            (large, "“noise.png” has 0.8 MiB; a file may have 0.2"),
            (broken, "Save it as"),
            (notes, "notes.txt"),
        ):
            await page.offer(path)
            await page.until(f"{NOTICE}.includes({words!r})")
        await page.click("#text")
        await page.write("What?")
        assert await page.js(NOTICE) == ""
        await page.drop(picture)
        await page.drop(picture)
        await page.until("document.querySelectorAll('#files li').length === 2")
        await page.press("Enter")
        # Nothing was sent, and nothing is lost.
        await page.until(f"{NOTICE} === 'A message may have 1 pictures at most.'")
        assert await page.js("document.getElementById('text').value") == "What?"
        await page.click("#files button")
        await page.until("document.querySelectorAll('#files li').length === 1")
        assert not b.stages.requests
        await page.click("#text")
        await page.press("Enter")
        await b.stages.answer(await b.stages.request(0), b.encode("Well."))
        await page.until(DONE)


async def test_what_the_gateway_refuses_can_be_edited(before: Before) -> None:
    async with before(max_prompt_tokens=40) as (_, page):
        await page.ask("long " * 60)
        await page.until(f"{STATE} === 'failed'")
        await page.click(".again")
        await page.until("document.querySelectorAll('.turn').length === 0")
        assert await page.js("document.getElementById('text').value") == ("long " * 60).strip()
        page.problems = [each for each in page.problems if "400" not in each]


async def test_one_answer_sounds_at_a_time_and_pause_is_pause(before: Before) -> None:
    async with before() as (b, page), speaking(b, "Hello", [melody(4.0)]):
        for count in (1, 2):
            await page.ask("Say it")
            await page.until(f"document.querySelectorAll('.assistant').length === {count} && {DONE}")
            await page.press("Escape")
            await page.until(IDLE)
        first, second = (f".assistant:nth-of-type({at}) .play" for at in (2, 4))
        await page.click(first)
        await page.until(f"{PLAYS}.join() === 'Pause,Play the answer'")
        await page.click(second)
        await page.until(f"{PLAYS}.join() === 'Play the answer,Pause'")
        await page.click(second)
        await page.until(f"{PLAYS}[1] === 'Continue'")
        output = "import('/page/player.js').then(({ output }) => output().%s)"
        await page.until(output % "state === 'suspended'")
        at = await page.js(output % "currentTime")
        await asyncio.sleep(0.3)
        assert at == await page.js(output % "currentTime")
        assert not await page.js(IDLE)
        await page.click(second)
        await page.until(f"{PLAYS}[1] === 'Pause'")
        await page.press("Escape")
        await page.until(f"{IDLE} && {PLAYS}.join() === 'Play the answer,Play the answer'")


async def test_a_short_press_records_and_send_sends_it(before: Before) -> None:
    async with before() as (b, page), speaking(b, "Yes", [melody(0.2)]):
        await page.click("#text")
        await page.write("Listen: ")
        await page.js("void (MediaRecorder = class extends MediaRecorder { me = window.recorder = this; })")
        for count, send in enumerate((("click", "#send"), ("press", "Enter"), ("click", "#talk")), 1):
            await page.click("#talk")
            await page.until(f"{RECORDING} && {LONG_ENOUGH}")
            assert "Press again to send" in await page.js("document.getElementById('talk').title")
            if count == 1:
                # The microphone is unplugged: what was said before is sent.
                await page.js("recorder.stream.getTracks()[0].stop()")
                await page.until("recorder.state === 'inactive'")
            await getattr(page, send[0])(send[1])
            await page.until(f"document.querySelectorAll('.assistant').length === {count}")
            await page.until(f"{DONE} && {IDLE} && !{RECORDING}")
            assert len(b.stages.requests[-1].media) == count
        assert (await page.js(TURNS))[0] == "Listen:"
        # What is not wanted is not sent.
        for discard in (
            lambda: page.click("#discard"),
            lambda: page.press("Escape"),
            lambda: page.click("#reset"),
        ):
            await page.click("#talk")
            await page.until(RECORDING)
            await discard()
            await page.until(f"!{RECORDING}")
            assert await page.js("document.activeElement.id") == "text"
        x, y = await page.place("#talk")
        await page.pointer("mousePressed", x, y)
        await page.until(f"{RECORDING} && {LONG_ENOUGH}")
        await page.pointer("mouseReleased", x - 200, y - 200)
        await page.until(f"!{RECORDING}")
        assert len(b.stages.requests) == 3


async def test_markdown_is_rendered_and_nothing_else(before: Before) -> None:
    text = (
        "# Title\n**bold** <img src=x onerror=alert(1)> [link](https://a.example) [bad](javascript:alert(1))"
    )

    async with before(written=True) as (b, page):
        await page.ask("Markdown")
        await b.stages.answer(await b.stages.request(0), b.encode(text))
        await page.until(DONE)
        html = await page.js(f"{ANSWER}.querySelector('.words').innerHTML")
        assert "<h1>Title</h1>" in html
        assert "<strong>bold</strong>" in html
        assert 'href="https://a.example"' in html
        assert 'rel="noopener noreferrer"' in html
        assert "&lt;img src=x onerror=alert(1)&gt;" in html
        assert "javascript:" not in html


async def test_an_answer_can_be_downloaded_and_copied(before: Before, tmp_path: Path) -> None:
    async with before() as (b, page), speaking(b, "Hello", [melody(0.5)]):
        await page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        await page.ask("Say it")
        await page.until(f"{DONE} && {IDLE}")
        await page.click(".actions a")
        file = tmp_path / "answer.wav"
        await until(lambda: file.exists() and file.stat().st_size == 44 + SAMPLE_RATE, "the file")
        with wave.open(str(file)) as speech:
            assert (speech.getframerate(), speech.getnframes()) == (SAMPLE_RATE, SAMPLE_RATE // 2)
        await page.js("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        await page.js("document.querySelector('.actions button').click()")
        await page.until("window.copied === 'Hello'")


async def test_files_are_pasted_anywhere_and_phones_keep_their_keyboard_down(before: Before) -> None:
    paste = """(() => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(8)], 'tone.wav', { type: 'audio/wav' }));
        document.body.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true }));
    })()"""

    async with before() as (b, page), speaking(b, "Hello", [melody(0.2)]):
        await page.js("document.activeElement.blur()")
        await page.js(paste)
        await page.until("document.querySelector('#files .name')?.textContent === 'tone.wav'")
        await page.click("#files button")
        await page.resize(390, 844, phone=True)
        await page.js("document.activeElement.blur()")
        await page.js("document.querySelector('.idea').click()")
        await page.until(f"{DONE} && {IDLE}")
        assert await page.js("document.activeElement.id") != "text"


async def test_a_long_conversation_keeps_no_memory_after_new(before: Before) -> None:
    async with before() as (b, page), speaking(b, "Hello", [melody(2.0)]):
        sizes = []
        for _ in range(3):
            for count in range(1, 7):
                await page.ask("Say it")
                await page.until(f"document.querySelectorAll('.assistant').length === {count} && {DONE}")
                await page.press("Escape")
            await page.begin_anew()
            await page.call("HeapProfiler.collectGarbage")
            counted = await page.call("Memory.getDOMCounters")
            sizes.append((counted["nodes"], counted["jsEventListeners"]))
        # Less than what one of the twelve exchanges since comes to.
        assert sizes[2][0] <= sizes[0][0] + 50
        assert sizes[2][1] <= sizes[0][1] + 5
