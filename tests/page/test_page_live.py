"""Conversations with an open microphone, in a real Chromium: by WebRTC, and by a WebSocket without it."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from services.thinker.media.decoded import Samples
from shared.messages import MediaItem, MediaKind
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, melody, speaking
from tests.gateway.test_http_calls import free
from tests.page.browser import ANSWER, READY, Before, Page
from tests.support.camera import read_file

pytestmark = pytest.mark.page

ANSWERED = "Very well, thanks."
SPEECH = (0.2 * melody(20.0)).astype(np.float32)
LIVE = "document.getElementById('live')"
WORDS = f"{ANSWER}?.querySelector('.words').textContent.includes('Very well')"
LIVE_STATE = "document.getElementById('live-state').textContent"
TWO_ANSWERS = "document.querySelectorAll('.turn.assistant').length === 2"
NOTE_STATES = """
    window.states = [];
    const note = ([change]) => window.states.push(change.target.textContent);
    new MutationObserver(note).observe(document.getElementById('live-state'), { childList: true });
    const Peer = RTCPeerConnection;
    window.RTCPeerConnection = class extends Peer { start = window.peer = this; };
"""


Talk = Callable[..., AbstractAsyncContextManager[tuple[HttpBench, Page]]]


def answering(b: HttpBench, speech: Samples = SPEECH) -> AbstractAsyncContextManager[None]:
    return speaking(b, ANSWERED, [speech])


@pytest.fixture
def talk(before: Before, sentence: Path) -> Talk:
    """Opens the page of a gateway that answers everything, and begins a conversation."""

    @asynccontextmanager
    async def talking(**gateway: Any) -> AsyncIterator[tuple[HttpBench, Page]]:
        async with before(sentence, gateway, answering, wide=False) as (b, page):
            await page.js(NOTE_STATES)
            await page.click("#live")
            yield b, page

    return talking


@pytest.mark.parametrize("kind", ["webrtc", "websocket"])
async def test_a_conversation_with_an_open_microphone(kind: str, talk: Talk) -> None:
    gateway = {"webrtc": {"enabled": True}} if kind == "webrtc" else {}
    async with talk(**gateway) as (b, page):
        await page.until(f"{LIVE}.dataset.link === '{kind}'")
        await page.until(WORDS)
        heard = f"{LIVE}.dataset.energy > 0.0001" if kind == "webrtc" else f"{ANSWER}.dataset.heard > 0.05"
        await page.until(heard)
        # It lasts for 20 s, and is interrupted when the microphone says the sentence again.
        await page.until(TWO_ANSWERS)
        assert await b.metric('omnirelay_realtime_turns_total{event="started"}') >= 2
        states = [each for each, _ in itertools.groupby(await page.js("states"))]
        assert states[:4] == ["Connecting …", "Listening", "Thinking", "Speaking"]
        # It shows how loud the microphone is, and nothing to type into.
        pixels = "document.getElementById('live-level').getContext('2d').getImageData(0, 0, 300, 40).data"
        assert await page.js(f"{pixels}.some(Boolean)")
        assert await page.js("document.getElementById('row').hidden")
        if kind == "webrtc":
            # As Chromium says some 20 s after the network is gone.
            await page.js("void Object.defineProperty(peer, 'connectionState', { value: 'failed' })")
            await page.js("peer.dispatchEvent(new Event('connectionstatechange'))")
        else:
            await page.click("#live-end")
        await page.until(f"{LIVE}.ariaPressed === 'false' && !document.getElementById('row').hidden")
        # What was said is still there, until the user begins anew.
        assert await page.js("document.querySelectorAll('.turn').length") >= 3
        await page.begin_anew()
        await free(b)


async def test_it_listens_again_after_an_answer_and_escape_ends_it(before: Before, sentence: Path) -> None:
    async with before(sentence, answers=partial(answering, speech=SPEECH[:9000]), wide=False) as (b, page):
        await page.js("localStorage.setItem('omnirelay-instructions', 'Answer in one word.')")
        await page.open(b.url, READY)
        await page.click("#live")
        await page.until(f"{LIVE_STATE} === 'Speaking'")
        await page.until(f"{LIVE_STATE} === 'Listening'")
        assert "Answer in one word." in b.prompt_of(b.stages.requests[0])
        # It was heard, whoever speaks while it is played again.
        play = f"{ANSWER}.querySelector('.play').click()"
        await page.js(f"{play}, {play}")
        await page.until(TWO_ANSWERS)
        assert ANSWERED in b.prompt_of(b.stages.requests[-1])
        await page.press("Escape")
        await page.until("document.getElementById('live-panel').hidden")


async def test_a_second_click_and_f2_open_no_second_microphone(before: Before, sentence: Path) -> None:
    async with before(sentence, wide=False) as (_, page):
        await page.js("""
            window.tracks = [];
            const { mediaDevices } = navigator, open = mediaDevices.getUserMedia.bind(mediaDevices);
            mediaDevices.getUserMedia = async (wanted) => {
                const stream = await open(wanted);
                window.tracks.push(...stream.getTracks());
                return stream;
            };
        """)
        await page.js(f"{LIVE}.click(), {LIVE}.click()")
        await page.until(f"{LIVE}.dataset.link === 'websocket'")
        await page.press("F2")
        await page.click("#live-end")
        await page.until("tracks.every(({ readyState }) => readyState === 'ended')", 10)
        # Another conversation may begin.
        await page.click("#live")
        await page.until(f"{LIVE}.dataset.link === 'websocket' && tracks.length === 2")
        # Its end is told, too, where the microphone is unplugged.
        await page.js("tracks[1].dispatchEvent(new Event('ended'))")
        await page.until("document.getElementById('notice').textContent.includes('microphone is gone')")


async def asked(b: HttpBench, kind: MediaKind) -> MediaItem:
    """The item with which a question ends, once it is of this kind; the microphone repeats itself."""
    await until(lambda: b.stages.requests and b.stages.requests[-1].media[-1].kind == kind, kind)
    return b.stages.requests[-1].media[-1]


@pytest.mark.parametrize("kind", ["webrtc", "websocket"])
async def test_what_the_camera_sees_goes_with_what_is_said(kind: str, talk: Talk) -> None:
    gateway = {"webrtc": {"enabled": True}} if kind == "webrtc" else {}
    async with talk(**gateway) as (b, page):
        await page.until(f"{LIVE}.dataset.link === '{kind}'")
        await page.click("#live-camera")
        view = "document.getElementById('live-view')"
        await page.until(f"{view}.videoWidth > 0 && !{view}.hidden")
        pictures, _, _ = read_file(bytes((await asked(b, "video")).data.view))
        seen = [Image.open(BytesIO(each)).convert("RGB") for each in pictures]
        assert all(each.size == seen[0].size and max(each.size) <= 448 for each in seen)
        # Chromium's camera shows a clock.
        assert len({each.tobytes() for each in seen}) > 1
        await page.click("#live-camera")
        assert await page.js(f"{view}.hidden && {view}.srcObject === null")
        await asked(b, "audio")
        await page.click("#live-camera")
        await page.until(f"!{view}.hidden")
        await page.click("#live-end")
        assert await page.js(f"{view}.srcObject === null")


async def test_a_camera_that_is_not_there(talk: Talk) -> None:
    async with talk() as (_, page):
        await page.until(f"{LIVE}.dataset.link === 'websocket'")
        missing = "new DOMException('no such device', 'NotFoundError')"
        await page.js(f"navigator.mediaDevices.getUserMedia = () => Promise.reject({missing})")
        await page.click("#live-camera")
        await page.until("document.getElementById('notice').textContent.includes('no such device')")
        assert await page.js("document.getElementById('live-camera').ariaPressed") == "false"
        assert await page.js(f"{LIVE}.dataset.link") == "websocket"


async def test_a_gateway_that_has_no_room(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.MAX_SESSIONS", 0)

    async with talk(webrtc={"enabled": True}) as (_, page):
        await page.until("document.getElementById('notice').textContent.includes('try again later')")
        assert await page.js(f"{LIVE}.ariaPressed") == "false"
        # The browser reports the response, too.
        page.problems.clear()


CALL = """(async () => {
    const peer = new RTCPeerConnection();
    const camera = document.createElement("canvas");
    camera.getContext("2d");
    const tracks = { video: camera.captureStream().getVideoTracks()[0] };
    tracks.audio = (await navigator.mediaDevices.getUserMedia({ audio: true })).getAudioTracks()[0];
    for (const kind of KINDS) peer.addTrack(tracks[kind]);
    const channel = peer.createDataChannel("oai-events");
    const created = new Promise((resolve) => channel.onmessage = resolve);
    await peer.setLocalDescription();
    const headers = { "Content-Type": "application/sdp" };
    const body = peer.localDescription.sdp;
    const answer = await fetch("/v1/realtime/calls", { method: "POST", headers, body });
    const sdp = await answer.text();
    await peer.setRemoteDescription({ type: "answer", sdp });
    const event = JSON.parse((await created).data).type;
    const media = sdp.match(/^m=\\w+ \\d/gm);
    peer.close();
    return { event, media };
})()"""


@pytest.mark.parametrize("kinds", [("audio", "video"), ("video", "audio")], ids=lambda kinds: kinds[0])
async def test_a_call_that_offers_video_is_one_of_audio(
    kinds: tuple[str, str], before: Before, sentence: Path
) -> None:
    async with before(sentence, {"webrtc": {"enabled": True}}, wide=False) as (_, page):
        called = await page.js(CALL.replace("KINDS", str(list(kinds))))
        assert called["event"] == "session.created"
        assert [each[2:7] for each in called["media"][:2]] == list(kinds)
        assert "m=video 0" in called["media"]
