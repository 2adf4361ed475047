"""A client that calls by WebRTC, with aiortc."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any

import httpx
import numpy as np
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame
from numpy.typing import NDArray

RATE = 48_000
FRAME = RATE // 50
EVENT_S = 60.0
LOUD = 200
"""Of samples, from -32768 to 32767: Opus' silence stays below it."""


class Microphone(MediaStreamTrack):
    """Says what it is given, at the pace of speech; then it is silent."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._samples = np.zeros(0, np.int16)
        self._begun: float | None = None
        self._pts = 0

    def say(self, pcm: bytes) -> None:
        """Say this, at 24 kHz, after what is being said."""
        self._samples = np.concatenate([self._samples, np.repeat(np.frombuffer(pcm, "<i2"), 2)])

    async def recv(self) -> AudioFrame:
        loop = asyncio.get_running_loop()
        if self._begun is None:
            self._begun = loop.time()
        await asyncio.sleep(max(0.0, self._begun + self._pts / RATE - loop.time()))
        said, self._samples = self._samples[:FRAME], self._samples[FRAME:]
        frame = AudioFrame.from_ndarray(np.pad(said, (0, FRAME - said.size))[np.newaxis], "s16", "mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._pts, Fraction(1, RATE)
        self._pts += FRAME
        return frame


class Caller:
    """One call.

    Attributes:
        location: The path of the call.
        microphone: What the gateway hears.
        heard: Frames of what it says, of 20 ms: stereo, 48 kHz.
    """

    def __init__(self, http: httpx.AsyncClient, headers: dict[str, str] | None = None) -> None:
        self.location = ""
        self.microphone = Microphone()
        self.heard: list[NDArray[np.int16]] = []
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.connection.addTrack(self.microphone)
        self.channel: RTCDataChannel = self.connection.createDataChannel("oai-events")
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ended = asyncio.Event()
        self._http = http
        self._headers = headers or {}
        self._listening: asyncio.Task[None] | None = None
        self.channel.on("message", lambda text: self.events.put_nowait(json.loads(text)))
        self.channel.on("close", self.ended.set)
        self.connection.on("track", self._listen)

    async def offer(self) -> str:
        """The SDP of an offer."""
        await self.connection.setLocalDescription(await self.connection.createOffer())
        return self.connection.localDescription.sdp

    async def call(self, session: dict[str, Any] | None = None) -> dict[str, Any]:
        """Connect, and return the session's settings."""
        offer = await self.offer()
        if session is None:
            headers = {**self._headers, "Content-Type": "application/sdp"}
            answer = await self._http.post("/v1/realtime/calls", content=offer, headers=headers)
        else:
            form = {"sdp": (None, offer), "session": (None, json.dumps(session))}
            answer = await self._http.post("/v1/realtime/calls", files=form, headers=self._headers)
        assert answer.status_code == 201, answer.text
        assert answer.headers["content-type"] == "application/sdp"
        self.location = answer.headers["location"]
        await self.connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        created: dict[str, Any] = (await self.take("session.created"))[-1]["session"]
        return created

    def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def take(self, last: str) -> list[dict[str, Any]]:
        """The events up to the first of this type."""
        events: list[dict[str, Any]] = []
        async with asyncio.timeout(EVENT_S):
            while not events or events[-1]["type"] != last:
                events.append(await self.events.get())
        return events

    async def hang_up(self) -> httpx.Response:
        """Ask the gateway to end the call."""
        return await self._http.post(f"{self.location}/hangup", headers=self._headers)

    async def end(self) -> None:
        """Wait until the gateway has ended the call."""
        await asyncio.wait_for(self.ended.wait(), EVENT_S)

    @property
    def loud(self) -> list[int]:
        """Which frames are no silence."""
        return [at for at, samples in enumerate(self.heard) if np.abs(samples).max(initial=0) > LOUD]

    def sound(self) -> NDArray[np.float32]:
        """All that was heard, at 24 kHz."""
        whole = np.concatenate(self.heard)
        return whole.reshape(-1, 2, 2).mean((1, 2)).astype(np.float32) / np.float32(32768)

    async def close(self) -> None:
        await self.connection.close()
        if self._listening is not None:
            await self._listening

    def _listen(self, track: MediaStreamTrack) -> None:
        self._listening = asyncio.create_task(self._record(track))

    async def _record(self, track: MediaStreamTrack) -> None:
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return
            assert isinstance(frame, AudioFrame)
            self.heard.append(frame.to_ndarray()[0])


@asynccontextmanager
async def calling(http: httpx.AsyncClient, headers: dict[str, str] | None = None) -> AsyncIterator[Caller]:
    """A caller that has not called yet."""
    caller = Caller(http, headers)
    try:
        yield caller
    finally:
        await caller.close()
