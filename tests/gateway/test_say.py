"""Texts that are spoken as they are, in one piece and in many; and whose system message speech has."""

import asyncio
import base64
import json
import queue
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection
from websockets.asyncio.client import ClientConnection, connect

from omnirelay import (
    AsyncClient,
    AudioEvent,
    ChatMessage,
    Client,
    DoneEvent,
    GenerateRequest,
    SamplingOverrides,
    TextEvent,
)
from omnirelay.cli.main import main
from omnirelay.errors import EmptyPromptError, InvalidRequestError, PromptTooLongError
from omnirelay.protocol import PartialAnswer
from omnirelay.reading import LEAST, MOST, pieces
from shared.config.gateway import READ_PROMPT
from shared.families import SPEECH_SYSTEM_PROMPT
from shared.messages import ThinkRequest
from tests.gateway.bench import Bench, Configure, Output, Patch, bench, fails
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import MODEL, HttpBench, events_in, http_bench, http_gateway, speak
from tests.gateway.realtime import add, ask
from tests.gateway.scripted import CHUNKS, CODES, Script
from tests.support.terminal import piped, terminal

SAID = "Two plus two is five."
SENTENCES = [f"This is sentence number {number} of them." for number in ("one", "two", "three")]
LONG = " ".join(SENTENCES)


def said(b: Bench, request: ThinkRequest) -> str:
    """The text that the stages are told to speak."""
    assert request.resume is not None
    assert request.resume.finish_reason == "stop"
    *ids, end = request.resume.text_token_ids
    prompts = b.process._prompts
    assert prompts.token_bytes(end) == b"<|im_end|>"
    return b"".join(map(prompts.token_bytes, ids)).decode()


def prompt(b: Bench, request: ThinkRequest) -> str:
    return b"".join(map(b.process._prompts.token_bytes, request.prompt_token_ids)).decode()


async def test_a_text_is_spoken_instead_of_an_answer(tcp: Bench, client: AsyncClient) -> None:
    answer = client.chat(GenerateRequest(say=SAID))
    request = await tcp.stages.request(0)
    assert said(tcp, request) == SAID
    assert f"user\n{READ_PROMPT}<|im_end|>" in prompt(tcp, request)
    await Script(tcp).play(request)
    events = [event async for event in answer]
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert not any(isinstance(event, TextEvent) for event in events)
    assert [event.pcm for event in events if isinstance(event, AudioEvent)] == CHUNKS
    assert (done.text, done.finish_reason, done.codec_token_ids) == (SAID, "stop", CODES)


async def test_messages_before_it_are_its_context(tcp: Bench, client: AsyncClient) -> None:
    client.chat(GenerateRequest(messages=[ChatMessage("system", "Whisper.")], say=SAID))
    assert "Whisper." in (asked := prompt(tcp, await tcp.stages.request(0)))
    assert READ_PROMPT in asked
    client.chat(GenerateRequest(messages=[ChatMessage("user", "Who?")], say=SAID))
    assert "Who?" in (asked := prompt(tcp, await tcp.stages.request(1)))
    assert READ_PROMPT not in asked


async def test_it_goes_on_where_the_client_is(tcp: Bench) -> None:
    async with tcp.client(reconnect_s=30) as client:
        held = PartialAnswer(
            request_id="earlier", codec_token_ids=CODES[:16], chunk_samples=[len(CHUNKS[0]) // 4]
        )
        answer = client.chat(GenerateRequest(say=SAID, resume=held, resumable=True))
        request = await tcp.stages.request(0)
        assert said(tcp, request) == SAID
        assert request.resume is not None
        assert request.resume.speech is not None
        assert request.resume.speech.codec_token_ids == CODES[:16]
        await Script(tcp).play(request)
        result = await answer.result()
        assert (result.text, result.waveform) == (SAID, b"".join(CHUNKS[1:]))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"say": SAID, "speech": False}, "only an answer with speech"),
        ({"say": " \n"}, "is empty"),
        ({"say": "word " * 600}, "at most 100 are spoken at once"),
    ],
    ids=["no speech", "empty", "long"],
)
async def test_what_cannot_be_spoken_is_refused(
    tcp: Bench, client: AsyncClient, fields: dict[str, Any], problem: str
) -> None:
    request = GenerateRequest(text_sampling=SamplingOverrides(max_tokens=100), **fields)
    await fails(client.chat(request), InvalidRequestError, problem)
    await until(lambda: tcp.process.gateway._active == {})


async def test_errors_about_it_name_the_field_of_the_client(web: HttpBench) -> None:
    answer = await read(web, input=" \n")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def pcm(number: int) -> Any:
    return np.full(480, (number + 1) / 8, np.float32)


async def read(b: HttpBench, **fields: Any) -> Any:
    body = {"model": MODEL, "input": LONG, "response_format": "pcm", "stream_format": "sse", **fields}
    return await b.http.post("/v1/audio/speech", json=body)


async def test_a_long_text_is_read_in_pieces(web: HttpBench) -> None:
    """The next piece is begun while one is spoken, and all are of one voice and seed."""

    reading = asyncio.create_task(read(web, voice="Ethan", seed=3, instructions="Whisper."))
    for number, sentence in enumerate(SENTENCES):
        request = await web.stages.request(number)
        assert said(web, request) == sentence
        assert len(web.stages.requests) == number + 1
        assert request.speech is not None
        assert (request.seed, request.speech.speaker) == (3, "Ethan")
        assert "Whisper." in prompt(web, request)
        name = request.request_id
        await web.stages.audio(name, 0, pcm(2 * number).tobytes())
        if number + 1 < len(SENTENCES):
            await web.stages.request(number + 1)
        await web.stages.codec(name, 0, [7] * 2, "stop")
        await web.stages.audio(name, 1, pcm(2 * number + 1).tobytes(), last=True)
    answer = await reading
    *audio, done = events_in(answer.text)
    heard = b"".join(base64.b64decode(event["audio"]) for event in audio)
    samples = np.frombuffer(heard, "<i2")[::480] / 32768
    assert samples == pytest.approx([(number + 1) / 8 for number in range(6)], abs=1e-3)
    usage = done["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    text = sum(len(web.encode(sentence)) + 1 for sentence in SENTENCES)
    assert usage["output_tokens"] == text + 6


async def test_a_piece_that_fails_ends_the_reading(web: HttpBench) -> None:
    reading = asyncio.create_task(read(web))
    await speak(web, await web.stages.request(0), "", [pcm(0)])
    second = await web.stages.request(1)
    await web.stages.fail(second.request_id, "talker", "stage_failed", "broken")
    events = (await reading).text
    assert "stage_failed" in events
    assert "speech.audio.done" not in events
    assert len(web.stages.requests) == 2
    await until(lambda: web.process.gateway._active == {})


async def test_a_client_that_leaves_ends_the_piece_that_was_begun_for_it(web: HttpBench) -> None:
    reading = asyncio.create_task(read(web))
    first = await web.stages.request(0)
    await web.stages.audio(first.request_id, 0, pcm(0).tobytes())
    await web.stages.request(1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: web.process.gateway._active == {})


async def test_a_busy_gateway_is_asked_again_for_more_pieces(
    configure: Configure, monkeypatch: Patch
) -> None:
    async with http_bench(configure(gateway=http_gateway(), max_active=1, max_queued=0)) as b:
        reading = asyncio.create_task(read(b))
        for number in range(len(SENTENCES)):
            await speak(b, await b.stages.request(number), "", [pcm(number)])
        assert "speech.audio.done" in (await reading).text


async def test_the_client_reads_any_length(tcp: Bench, client: AsyncClient, tmp_path: Path) -> None:
    tcp.stages.serve([])
    with pytest.raises(EmptyPromptError, match="to be spoken is empty"):
        await anext(client.speak(""))
    events = [event async for event in client.speak(LONG, speaker="Ethan", seed=3)]
    done = [event for event in events if isinstance(event, DoneEvent)]
    assert [event.text for event in done] == SENTENCES
    assert {(event.speaker, event.seed) for event in done} == {("Ethan", 3)}
    whole = b"".join(event.pcm for event in events if isinstance(event, AudioEvent))

    def plainly() -> None:
        with Client(tcp.listen) as plain:
            with pytest.raises(EmptyPromptError, match="to be spoken is empty"):
                plain.speak(" \n")
            result = plain.speak(LONG)
            assert (result.text, result.waveform) == (LONG, whole)
            with pytest.raises(InvalidRequestError, match="a ChatResult does not know its prompt"):
                plain.chat("And again?", history=result)  # type: ignore[arg-type]

    await asyncio.to_thread(plainly)
    path = tmp_path / "said.wav"
    assert await asyncio.to_thread(main, ["say", LONG, "--out", str(path), "--gateway", tcp.listen]) == 0
    with wave.open(str(path)) as file:
        assert file.getnframes() == len(whole) // 4


async def test_lines_of_standard_input_are_read_as_they_come(
    tcp: Bench, monkeypatch: Patch, capsys: Output, tmp_path: Path
) -> None:
    tcp.stages.serve([])
    lines = queue.SimpleQueue[str]()
    monkeypatch.setattr("sys.stdin.readline", lines.get)
    out = ["--out", str(tmp_path / "said.wav"), "--json"]
    reading = asyncio.create_task(asyncio.to_thread(main, ["say", *out, "--gateway", tcp.listen]))
    lines.put(f"{SENTENCES[0]}\n")
    assert said(tcp, await tcp.stages.request(0)) == SENTENCES[0]
    lines.put("And the rest")
    lines.put("")
    assert await reading == 0
    assert said(tcp, await tcp.stages.request(1)) == "And the rest"
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["text"] for each in events if each["event"] == "done"] == [SENTENCES[0], "And the rest"]


async def test_what_waits_for_a_line_is_ended_by_ctrl_c(tcp: Bench, tmp_path: Path) -> None:
    tcp.stages.serve([])
    out = str(tmp_path / "said.wav")
    command = ("-m", "omnirelay.cli", "say", "--json", "--out", out, "--gateway", tcp.listen)
    async with terminal(*command) as shown:
        shown.type(f"{SENTENCES[0]}\n")
        await shown.see('"event": "done"')
        await shown.interrupt()
        assert await shown.ended() == 130
        assert "Traceback" not in shown.seen
    status, told, _ = await piped(*command, lines=b"\xff\n", env={"PYTHONIOENCODING": "utf-8:strict"})
    assert (status, json.loads(told)["code"]) == (1, "invalid_request")


def growing(b: HttpBench) -> connect:
    """A connection for a text that grows."""
    return connect(f"{b.url.replace('http', 'ws')}/v1/audio/speech/stream")


async def events_of(socket: ClientConnection) -> list[Any]:
    """What a client hears until the connection is closed."""
    return [message if isinstance(message, bytes) else json.loads(message) async for message in socket]


async def test_a_text_is_spoken_while_it_grows(web: HttpBench) -> None:
    async with growing(web) as socket:
        config = {"type": "session.config", "voice": "Ethan", "response_format": "pcm", "seed": 3}
        await socket.send(json.dumps(config))
        for word in [*SENTENCES[0].split(), "And"]:
            await socket.send(json.dumps({"type": "input.text", "text": f"{word} "}))
        first = await web.stages.request(0)
        assert (said(web, first), first.seed) == (SENTENCES[0], 3)
        await speak(web, first, "", [pcm(0), pcm(1)])
        await socket.send(json.dumps({"type": "input.text", "text": "the rest"}))
        await socket.send(json.dumps({"type": "input.done"}))
        second = await web.stages.request(1)
        assert said(web, second) == "And the rest"
        await speak(web, second, "", [pcm(2)])
        events = await events_of(socket)
    assert [event["type"] for event in events if isinstance(event, dict)] == [
        *["audio.start", "audio.done"] * 2,
        "session.done",
    ]
    assert (events[0]["sentence_text"], events[0]["format"]) == (SENTENCES[0], "pcm")
    heard = b"".join(event for event in events if isinstance(event, bytes))
    assert len(heard) == 3 * 480 * 2
    assert events[-1]["total_sentences"] == 2


WRONG: list[tuple[list[str], str]] = [
    (["{"], "cannot be read as a JSON object"),
    (["[]"], "cannot be read as a JSON object"),
    (["{}"], "an object with a type"),
    (["[" * 100_000], "cannot be read as a JSON object"),
    (['{"type": "session.config", "nothing": [' + 180_000 * "[]," + "0]}"], "more than 131072 lists"),
    (['{"type": "session.config"}', json.dumps({"type": "input.text", "text": 32_768 * "\U0001f600"}),
      '{"type": "other"}'], "no message of type 'other'"),
    (['{"type": "input.done"}'], "must be session.config"),
    (['{"type": "session.config", "voices": 1}'], "voices"),
    (['{"type": "session.config", "model": "other"}'], "no model"),
    (['{"type": "session.config"}', '{"type": "other"}'], "no message of type 'other'"),
    (['{"type": "session.config", "voice": "Nobody"}', '{"type": "input.text", "text": "Hi. "}',
      '{"type": "input.done"}'], "no speaker 'Nobody'"),
    (['{"type": "session.config"}', json.dumps({"type": "input.text", "text": 32_769 * "a"})], "length"),
    (['{"type": "session.config"}'], "no message came for 1 s"),
]  # fmt: skip


async def test_what_is_wrong_with_a_growing_text_is_said(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.openai.speech_socket.IDLE_S", 1.0)
    for messages, problem in WRONG:
        async with growing(web) as socket:
            for message in messages:
                await socket.send(message)
            [event] = await events_of(socket)
        assert event["type"] == "error"
        assert problem in event["error"]["message"]


async def test_a_client_of_a_growing_text_that_leaves_ends_its_requests(web: HttpBench) -> None:
    async with growing(web) as socket:
        for message in ({"type": "session.config"}, {"type": "input.text", "text": LONG}):
            await socket.send(json.dumps(message))
        await web.stages.audio((await web.stages.request(0)).request_id, 0, pcm(0).tobytes())
        await web.stages.request(1)
    await until(lambda: web.process.gateway._active == {})


@given(st.text(alphabet=st.sampled_from("ab.!? ,;\n\u3002\uff0c"), max_size=2 * MOST), st.booleans())
def test_pieces_are_the_text(text: str, ended: bool) -> None:
    found = list(pieces(text, ended))
    assert all(0 < len(each) <= MOST for each in found)
    assert text.startswith("".join(found))
    if ended:
        assert "".join(found) == text


@given(st.lists(st.sampled_from(["Dr. Who is here now, ", "It costs 3.5 e.g. today. ", "Yes! ", "no one. "])))
def test_what_grows_is_cut_as_the_whole(parts: list[str]) -> None:
    """Pieces given before the end are those that the whole text has."""
    whole, start, given_pieces = "".join(parts), 0, []
    for end in range(len(whole) + 1):
        for piece in pieces(whole[start:end], ended=False):
            given_pieces.append(piece)
            start += len(piece)
    assert given_pieces == list(pieces(whole))[: len(given_pieces)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run_of", [" ", ".", '."', "。 ", "\n ", "a"])
def test_a_text_ten_times_as_long_takes_ten_times_as_long(run_of: str) -> None:
    """Where the square of its length was taken, this took hours."""
    assert sum(map(len, pieces(run_of * 400_000 + "x"))) == len(run_of) * 400_000 + 1


def test_pieces_end_with_sentences() -> None:
    assert list(
        pieces("Dr. Smith met Mr. Jones at noon. He said \u201cHello!\u201d and left the house.")
    ) == ["Dr. Smith met Mr. Jones at noon. ", "He said \u201cHello!\u201d and left the house."]
    long = "a clause with some words, " * 20
    assert all(each.endswith(", ") and LEAST <= len(each) <= MOST for each in pieces(long))


TEMPLATES_OWN = "You are a helpful assistant."
SPEECH: Any = {"modalities": ["text", "audio"]}


def system_messages(b: Bench | HttpBench) -> list[str]:
    """The system messages of the prompts that the thinker was given."""
    tokenizer = b.process._prompts._tokenizer
    prompts = [
        tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in b.stages.requests
    ]
    assert all(
        prompt.startswith("<|im_start|>system\n") and prompt.count("system\n") == 1 for prompt in prompts
    )
    return [prompt.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0] for prompt in prompts]


@pytest.mark.parametrize("own", [None, "", "Speak slowly.", SPEECH_SYSTEM_PROMPT], ids=str)
async def test_whose_system_message_speech_has(configure: Configure, own: str | None) -> None:
    config = configure({} if own == SPEECH_SYSTEM_PROMPT else {"speech_system_prompt": own})
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, own or TEMPLATES_OWN),
        ({"system": "Be brief."}, "Be brief."),
        ({"speech": False}, TEMPLATES_OWN),
        ({"speech": False, "system": "Be brief."}, "Be brief."),
    ]

    async with bench(config) as b, b.client() as client:
        for count, (options, _) in enumerate(asked):
            client.chat("Hi", **options)
            await b.stages.request(count)
        assert system_messages(b) == [expected for _, expected in asked]
        ids = b.encode("Hello")
        client.chat(GenerateRequest(prompt_token_ids=ids))
        assert (await b.stages.request(len(asked))).prompt_token_ids == ids


async def test_a_system_message_counts_in_the_length_of_the_prompt(configure: Configure) -> None:
    async with bench(configure()) as b, b.client() as client:
        for count, speech in enumerate((False, True)):
            client.chat("Hi", speech=speech)
            await b.stages.request(count)
        text_only, spoken = (len(request.prompt_token_ids) for request in b.stages.requests)
    assert text_only < spoken
    async with bench(configure(max_prompt_tokens=spoken - 1)) as b, b.client() as client:
        await fails(client.chat("Hi"), PromptTooLongError, f"has {spoken} tokens")
        client.chat([ChatMessage("user", "Hi")], speech=False)
        assert len((await b.stages.request(0)).prompt_token_ids) == text_only


@pytest.mark.usefixtures("answers")
async def test_system_messages_of_a_realtime_session(web: HttpBench, c: Connection) -> None:
    await add(c)
    for options in ({}, {"instructions": "Be brief."}, {"output_modalities": ["text"]}):
        await ask(c, **options)
    assert system_messages(web) == [SPEECH_SYSTEM_PROMPT, "Be brief.", TEMPLATES_OWN]


@pytest.mark.usefixtures("answers")
async def test_instructions_alone_are_answered(web: HttpBench, c: Connection) -> None:
    alone: Any = [{"role": "system", "content": "Greet."}]
    await web.ai.chat.completions.create(model=MODEL, messages=alone, **SPEECH)
    for options in ({}, {"conversation": "none", "input": []}):
        last = (await ask(c, instructions="Greet.", **options))[-1]
        assert last.response.status == "completed"
    assert system_messages(web) == ["Greet."] * 3
