"""What sessions hear and speak: G.711, faster or slower speech, and what is kept of words and of items."""

import asyncio
import base64
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.fairness.quota import Hold, MemoryBudget
from gateway.http.encoding import tempo
from gateway.http.encoding.g711 import G711Decoder, G711Encoder, Law, to_codes
from gateway.http.realtime.audio import BYTES_PER_S, CHARACTER_MS, HEADER_BYTES, SentSpeech
from gateway.http.realtime.conversation import MAX_ITEMS, RealtimeConversation
from gateway.http.realtime.input_buffers import InputAudio
from gateway.http.realtime.items import Item
from omnirelay.content import AudioPart, TextPart
from omnirelay.errors import BusyError, InvalidRequestError, MediaTooLargeError, OmniRelayError
from shared.config import MediaConfig
from shared.messages import SAMPLE_RATE
from tests.gateway.bench import Patch
from tests.gateway.http_bench import HttpBench, speaking
from tests.gateway.realtime import (
    CHUNKS,
    SAID,
    TONE,
    add,
    append,
    ask,
    begin,
    commit,
    error_of,
    recording,
    retrieve,
    take,
    truncate,
    update,
)

SPOKEN = "one two three four five six"


def said(events: list[Any]) -> bytes:
    return b"".join(
        base64.b64decode(each.delta) for each in events if each.type == "response.output_audio.delta"
    )


@pytest.mark.parametrize("law", ["pcmu", "pcma"])
@pytest.mark.parametrize("beta", [False, True], ids=["api", "beta"])
async def test_telephone_speech(web: HttpBench, c: Connection, law: Law, beta: bool) -> None:
    async with speaking(web, SPOKEN, CHUNKS):
        if beta:
            name = {"pcmu": "g711_ulaw", "pcma": "g711_alaw"}[law]
            session = (await update(c, input_audio_format=name, output_audio_format=name)).session
        else:
            form = {"format": {"type": f"audio/{law}"}}
            session = (await update(c, audio={"input": form, "output": form})).session
        assert session.audio.input.format.type == session.audio.output.format.type == f"audio/{law}"
        codes = to_codes(np.frombuffer(TONE, "<i2")[::3], law)
        await append(c, codes, piece=777)
        await commit(c)
        events = await ask(c)
        encoder = G711Encoder(law)
        pcm = (np.clip(SAID, -1, 1) * 32767).round().astype("<i2").tobytes()
        assert said(events) == encoder.push(pcm) + encoder.finish()
        assert events[-1].response.audio.output.format.type == f"audio/{law}"
        [request] = web.stages.requests
        assert recording(request.media[0]) == G711Decoder(law).push(codes)
        # Its time is that of the speech, whatever its bytes are.
        await truncate(c, events[-1].response.output[0].id, 1200)


async def test_a_sound_has_the_sessions_format(web: HttpBench, c: Connection) -> None:
    def item(codes: bytes) -> Any:
        sound = {"type": "input_audio", "audio": base64.b64encode(codes).decode()}
        return {"type": "message", "role": "user", "content": [sound]}

    async with speaking(web, SPOKEN, CHUNKS):
        await update(c, audio={"input": {"format": {"type": "audio/pcma"}}})
        await add(c, item(bytes(range(256))))
        await c.conversation.item.create(item=item(bytes(2**21 + 1)))
        assert (await error_of(c)).param == "item.content[0].audio"
        await ask(c)
    assert recording(web.stages.requests[0].media[0]) == G711Decoder("pcma").push(bytes(range(256)))


@pytest.mark.parametrize("speed", [0.5, 1, 1.5])
async def test_what_was_not_heard_is_forgotten(web: HttpBench, c: Connection, speed: float) -> None:
    """Answers are cut by their own time."""
    async with speaking(web, SPOKEN, CHUNKS):
        assert (await update(c, audio={"output": {"speed": speed}})).session.audio.output.speed == speed
        await add(c)
        events = await ask(c)
        assert np.frombuffer(said(events), "<i2").size == round(SAID.size / speed)
        item = events[-1].response.output[0]
        await c.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=9000)
        error = await error_of(c)
        assert (error.param, f"{1200 / speed:.0f} ms" in error.message) == ("audio_end_ms", True)
        await truncate(c, item.id, int(500 * SAID.size / speed / 24_000))
        assert (await retrieve(c, item.id)).content[0].transcript == "one two three"
        await add(c)
        await ask(c)
    prompt = web.prompt_of(web.stages.requests[1])
    assert "one two three" in prompt
    assert "four" not in prompt


async def test_telephone_speech_may_be_faster(web: HttpBench, c: Connection) -> None:
    async with speaking(web, SPOKEN, CHUNKS):
        await update(c, audio={"output": {"format": {"type": "audio/pcmu"}, "speed": 1.5}})
        await add(c)
        assert len(said(await ask(c))) == round(SAID.size / 1.5) // 3


@pytest.mark.parametrize("how", ["cancelled", "with too few codes", "before its speech"])
async def test_text_ahead_of_its_speech_is_not_kept(web: HttpBench, c: Connection, how: str) -> None:
    request, ended, begun = await begin(web, c), how == "with too few codes", how != "before its speech"
    await web.stages.text(request.request_id, 0, web.encode(" ".join([SPOKEN] * 5)), "stop")
    if begun:
        await web.stages.codec(request.request_id, 0, [7] * 10, "length" if ended else None)
        await web.stages.audio(request.request_id, 0, SAID[:24_000].tobytes(), last=ended)
    word = "" if begun else "_transcript"
    item_id = (await take(c, f"response.output_audio{word}.delta"))[-1].item_id
    if ended:
        await take(c, "response.done")
    # Else it also ends the answer.
    await truncate(c, item_id, 1000 if begun else 0)
    [content] = (await retrieve(c, item_id)).content
    assert content.transcript == ("one two three" if begun else "")


async def test_speed_without_its_library_is_told(c: Connection, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tempo, "find_spec", lambda _: None)
    updated = await update(c, audio={"output": {"speed": 1.5}})
    assert [each["param"] for each in updated.warnings] == ["session.audio.output.speed"]
    assert updated.session.audio.output.speed == 1


TEXT = "one two three four"


def sound(ms: int, loud: bool = True) -> bytes:
    wave = np.sin(np.arange(ms * SAMPLE_RATE // 1000) / 20) * (8000 if loud else 30)
    return wave.astype("<i2").tobytes()


def speech(*pieces: bytes, complete: bool, speed: float = 1.0) -> SentSpeech:
    sent = SentSpeech(speed)
    for piece in pieces:
        sent.push(piece)
    sent.complete = complete
    return sent


@pytest.mark.parametrize(
    ("ms", "heard"),
    [
        (0, ""),
        (500, ""),
        (640, "one"),
        (1100, "one two"),
        (1600, "one two three"),
        (2000, TEXT),
        (3000, TEXT),
    ],
)
def test_silence_around_the_words_is_not_of_them(ms: int, heard: str) -> None:
    """18 characters and a pause take 1.52 s: 80 ms each."""
    sent = speech(sound(400, False), sound(1520), sound(1080, False), complete=True)
    assert sent.cut(TEXT, ms) == heard
    assert sent.ms == ms


def test_text_ahead_of_the_speech_is_not_kept() -> None:
    """Of a cancelled answer the text is there, and its speech is not."""
    ten = " ".join(["words"] * 10)
    sent = speech(sound(1000), complete=False)
    # Six characters a word.
    assert len(sent.cut(ten, 1000).split()) == round(1000 / (6 * CHARACTER_MS))
    faster = speech(sound(1000), complete=False, speed=1.5)
    assert len(faster.cut(ten, 1000).split()) == round(1500 / (6 * CHARACTER_MS))


def test_an_answer_may_be_cut_twice() -> None:
    sent = speech(sound(1520), complete=True)
    once = sent.cut(TEXT, 1200)
    assert once == "one two three"
    assert sent.cut(once, 1200) == once
    assert sent.cut(once, 350) == "one"


def test_a_text_without_spaces_is_cut_between_its_characters() -> None:
    sent = speech(sound(1000), complete=True)
    assert sent.cut("今天天气很好", 500) == "今天天"


@pytest.mark.parametrize("pcm", [b"", sound(5), sound(400, False), bytes(48_000)], ids=len)
def test_speech_that_says_nothing(pcm: bytes) -> None:
    sent = speech(pcm, complete=True)
    assert sent.cut("", sent.ms) == ""
    assert sent.cut(TEXT, 0) in ("", TEXT)


@given(
    text=st.text(max_size=80),
    sizes=st.lists(st.integers(0, 4000), max_size=8),
    share=st.floats(0, 1),
    complete=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_grows_with_time(text: str, sizes: list[int], share: float, complete: bool) -> None:
    def kept(part: float, pieces: list[bytes]) -> str:
        sent = speech(*pieces, complete=complete)
        return sent.cut(text, int(part * sent.ms))

    pcm = sound(1000)[: 2 * sum(sizes)]
    borders = [0, *np.cumsum(sizes).tolist()]
    pieces = [pcm[2 * a : 2 * b] for a, b in itertools.pairwise(borders)]
    heard = kept(share, pieces)
    assert text.startswith(heard)
    assert heard == kept(share, [pcm])
    assert kept(share / 2, pieces) == heard[: len(kept(share / 2, pieces))]


def held(limit: int = 10**9) -> Hold:
    return MemoryBudget(limit, lambda: 100).of("")


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 8000))
def test_what_is_appended_is_committed_or_refused(sizes: list[int], limit: int) -> None:
    room = held()
    audio = InputAudio(MediaConfig(max_audio_seconds=limit / BYTES_PER_S), room)
    kept, most = b"", audio.limit
    for at, size in enumerate(sizes):
        piece = bytes([at + 1]) * size
        try:
            asyncio.run(audio.append(piece))
        except MediaTooLargeError:
            assert size > most
        else:
            kept += piece
            # Half a sample stays.
            assert min(len(kept), most - most // 16 - 2) <= audio.size <= most + 1
            kept = kept[len(kept) - audio.size :]
        assert room.budget.total == len(kept)
    if not kept or len(kept) % 2:
        with pytest.raises(InvalidRequestError):
            audio.commit()
        audio.clear()
    else:
        wav, hold = audio.commit()
        assert bytes(wav[HEADER_BYTES:]) == kept
        hold.release()
    assert room.budget.total == 0


@given(st.lists(st.sampled_from(["text", "sound", "drop"]), max_size=30))
def test_a_conversation_always_fits_into_a_request(steps: list[str]) -> None:
    room = held(5000)
    media = MediaConfig(max_audios=2, max_request_bytes=1000, max_item_bytes=1000)
    conversation = RealtimeConversation(media, room)
    items: list[Item] = []
    for step in steps:
        if step == "drop" and items:
            conversation.remove(items.pop(0).id)
            continue
        part = AudioPart(data=memoryview(bytes(300))) if step == "sound" else TextPart("x" * 100)
        item = Item("user", [part], [])
        assert conversation.add(item) == (items[-1].id if items else None)
        items.append(item)
        forgotten = conversation.make_room()
        assert forgotten == items[: len(forgotten)]
        items = items[len(forgotten) :]
        assert len(conversation.messages()) == len(items) <= MAX_ITEMS
        assert room.budget.total == sum(each.weight for each in items) <= 1000
        assert sum(isinstance(each.parts[0], AudioPart) for each in items) <= 2
    conversation.clear()
    assert room.budget.total == 0


def test_no_more_is_kept_than_there_is_room_for_all() -> None:
    room = held(500)
    first, second = RealtimeConversation(MediaConfig(), room), RealtimeConversation(MediaConfig(), room)
    first.add(Item("user", [TextPart("x" * 400)], []))
    with pytest.raises(BusyError):
        second.add(Item("user", [TextPart("x" * 400)], []))
    with pytest.raises(OmniRelayError):
        first.get("nobody")
    first.clear()
    second.add(Item("user", [TextPart("x" * 400)], []))
    assert room.budget.total == 400
