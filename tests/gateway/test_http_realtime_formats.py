"""Sessions that hear and speak G.711, and speak faster or slower."""

import base64
import io
import wave
from typing import Any

import numpy as np
import pytest

from gateway.http.encoding import tempo
from gateway.http.encoding.g711 import G711Decoder, G711Encoder, Law, to_codes
from tests.gateway.bench import Configure
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speaking
from tests.gateway.test_http_realtime import CHUNKS, HELLO, SAID, TONE, ask, take, talking

SPOKEN = "one two three four five six"


async def update(c: Any, **session: Any) -> Any:
    await c.send({"type": "session.update", "session": session})
    return (await take(c, "session.updated"))[-1].session


def said(events: list[Any]) -> bytes:
    return b"".join(
        base64.b64decode(each.delta) for each in events if each.type == "response.output_audio.delta"
    )


@pytest.mark.parametrize("law", ["pcmu", "pcma"])
@pytest.mark.parametrize("beta", [False, True], ids=["api", "beta"])
async def test_telephone_speech_in_and_out(web: HttpBench, law: Law, beta: bool) -> None:
    async with speaking(web, SPOKEN, CHUNKS), talking(web) as c:
        if beta:
            name = {"pcmu": "g711_ulaw", "pcma": "g711_alaw"}[law]
            session = await update(c, input_audio_format=name, output_audio_format=name)
        else:
            form = {"type": f"audio/{law}"}
            session = await update(c, audio={"input": {"format": form}, "output": {"format": form}})
        assert session.audio.input.format.type == session.audio.output.format.type == f"audio/{law}"
        codes = to_codes(np.frombuffer(TONE, "<i2")[::3], law)
        for at in range(0, len(codes), 777):
            await c.input_audio_buffer.append(audio=base64.b64encode(codes[at : at + 777]).decode())
        await c.input_audio_buffer.commit()
        await take(c, "conversation.item.done")
        events = await ask(c)
        encoder = G711Encoder(law)
        pcm = (np.clip(SAID, -1, 1) * 32767).round().astype("<i2").tobytes()
        assert said(events) == encoder.push(pcm) + encoder.finish()
        assert events[-1].response.audio.output.format.type == f"audio/{law}"
        [request] = web.stages.requests
        with wave.open(io.BytesIO(bytes(request.media[0].data.view))) as file:
            assert file.getframerate() == 24_000
            assert file.readframes(10**6) == G711Decoder(law).push(codes)
        # Its time is that of the speech, whatever its bytes are.
        item = events[-1].response.output[0]
        await c.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=1200)
        await take(c, "conversation.item.truncated")


async def test_a_sound_of_an_item_is_of_the_sessions_format(configure: Configure) -> None:
    sound = {"type": "input_audio", "audio": base64.b64encode(bytes(range(256))).decode()}
    item: Any = {"type": "message", "role": "user", "content": [sound]}
    large = {"type": "input_audio", "audio": base64.b64encode(bytes(2**21 + 1)).decode()}

    async with http_bench(configure(http_gateway())) as b, speaking(b, SPOKEN, CHUNKS), talking(b) as c:
        await update(c, audio={"input": {"format": {"type": "audio/pcma"}}})
        await c.conversation.item.create(item=item)
        await take(c, "conversation.item.done")
        item["content"] = [large]
        await c.conversation.item.create(item=item)
        [error] = (await take(c, "error"))[-1:]
        assert error.error.param == "item.content[0].audio"
        await ask(c)
        with wave.open(io.BytesIO(bytes(b.stages.requests[0].media[0].data.view))) as file:
            assert file.readframes(10**6) == G711Decoder("pcma").push(bytes(range(256)))


async def test_formats_that_are_refused(configure: Configure) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"audio": {"output": {"format": {"type": "audio/opus"}}}}, "audio.output.format.type"),
        (
            {"audio": {"input": {"format": {"type": "audio/pcmu", "rate": 24000}}}},
            "session.audio.input.format.rate",
        ),
        ({"audio": {"output": {"format": {"rate": 16000}}}}, "session.audio.output.format.rate"),
        ({"input_audio_format": "g711"}, "input_audio_format"),
        ({"audio": {"output": {"speed": 1.6}}}, "audio.output.speed"),
        ({"audio": {"output": {"speed": 0.2}}}, "audio.output.speed"),
    ]

    async with http_bench(configure(http_gateway())) as b, talking(b) as c:
        for session, param in wrong:
            event: Any = {"type": "session.update", "session": session}
            await c.send(event)
            [error] = await take(c, "error")
            assert error.error.param == param
        late: Any = {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}
        await c.send({"type": "response.create", "response": late})
        [error] = await take(c, "error")
        assert error.error.param == "response.audio.input.format"


@pytest.mark.parametrize("speed", [0.5, 1.5])
async def test_an_answer_at_another_speed_is_cut_by_its_own_time(web: HttpBench, speed: float) -> None:
    async with speaking(web, SPOKEN, CHUNKS), talking(web) as c:
        session = await update(c, audio={"output": {"speed": speed}})
        assert session.audio.output.speed == speed
        await c.conversation.item.create(item=HELLO)
        events = await ask(c)
        samples = np.frombuffer(said(events), "<i2")
        assert samples.size == round(SAID.size / speed)
        item = events[-1].response.output[0]
        half = int(500 * SAID.size / speed / 24_000)
        await c.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=half)
        await take(c, "conversation.item.truncated")
        kept: Any = {"type": "conversation.item.retrieve", "item_id": item.id}
        await c.send(kept)
        found = (await take(c, "conversation.item.retrieved"))[-1].item
        assert found.content[0].transcript == "one two three"


async def test_text_that_was_ahead_of_a_cancelled_answers_speech_is_not_kept(web: HttpBench) -> None:
    async with talking(web) as c:
        await c.conversation.item.create(item=HELLO)
        await take(c, "conversation.item.done")
        await c.response.create()
        request = await web.stages.request(0)
        await web.stages.text(request.request_id, 0, web.encode(" ".join([SPOKEN] * 5)), "stop")
        await web.stages.audio(request.request_id, 0, SAID[:24_000].tobytes())
        item_id = (await take(c, "response.output_audio.delta"))[-1].item_id
        # Also ends the answer.
        await c.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=1000)
        await take(c, "conversation.item.truncated")
        kept: Any = {"type": "conversation.item.retrieve", "item_id": item_id}
        await c.send(kept)
        [content] = (await take(c, "conversation.item.retrieved"))[-1].item.content
        assert content.transcript == "one two three"


async def test_speed_without_its_library_is_told(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempo, "find_spec", lambda _: None)

    async with http_bench(configure(http_gateway())) as b, talking(b) as c:
        faster: Any = {"type": "session.update", "session": {"audio": {"output": {"speed": 1.5}}}}
        await c.send(faster)
        updated: Any = (await take(c, "session.updated"))[-1]
        assert [each["param"] for each in updated.warnings] == ["session.audio.output.speed"]
        assert updated.session.audio.output.speed == 1
