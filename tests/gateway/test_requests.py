"""Requests through a gateway with real sockets: the way of each to its one end."""

import threading
from typing import Any

import numpy as np
import pytest

from gateway.input.prompt import PromptBuilder
from omnirelay import (
    AsyncClient,
    AudioEvent,
    ChatMessage,
    DoneEvent,
    GenerateRequest,
    SamplingOverrides,
    TextEvent,
    errors,
)
from tests.gateway.bench import Bench, Configure, Patch, bench, fails
from tests.gateway.fake_stages import until


async def test_speech_answer_arrives_whole(tcp: Bench, client: AsyncClient) -> None:
    answer = client.chat("Hello world", seed=7)
    request = await tcp.stages.request(0)
    ids = tcp.encode("How are you? 😀")
    await tcp.stages.answer(request, ids)
    events = [event async for event in answer]
    assert [type(event) for event in events].count(AudioEvent) == 2
    texts = [event for event in events if isinstance(event, TextEvent)]
    assert "".join(event.text for event in texts) == "How are you? 😀"
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert (done.text, done.text_token_ids, done.codec_token_ids) == ("How are you? 😀", ids, [1, 2, 3, 4])
    assert done.prompt_token_ids == request.prompt_token_ids
    assert (done.finish_reason, done.codec_finish_reason) == ("stop", "length")
    assert done.audio_seconds == pytest.approx(360 / 24_000)
    assert (done.seed, done.speaker) == (7, "Chelsie")
    assert done.request_id == request.request_id == answer.request_id
    assert done.ttft_s is not None
    assert done.ttfa_s is not None
    assert 0 < done.ttft_s <= done.wall_s
    assert 0 < done.ttfa_s <= done.wall_s
    order = ["received", "queued", "thinking", "talking", "synthesizing", "completed"]
    assert list(done.state_seconds) == order
    assert sorted(done.state_seconds.values()) == list(done.state_seconds.values())
    assert (tcp.counts["completed"], tcp.stages.aborts["thinker"]) == (1, [])


async def test_result_joins_the_audio(tcp: Bench, client: AsyncClient) -> None:
    tcp.stages.serve(tcp.encode("Hello"))
    result = await client.chat("Hi").result()
    assert result.text == "Hello"
    expected = np.concatenate([np.zeros(240), np.full(120, 0.5)]).astype(np.float32)
    assert np.array_equal(result.audio, expected)


async def test_what_the_thinker_is_asked(tcp: Bench, client: AsyncClient) -> None:
    client.chat(
        "Hi",
        system="Be brief.",
        speaker="Ethan",
        streaming=False,
        priority=3,
        text_sampling=SamplingOverrides(temperature=0.5, max_tokens=9),
        codec_sampling=SamplingOverrides(top_k=5),
    )
    request = await tcp.stages.request(0)
    assert request.priority == 3
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 9)
    assert request.speech is not None
    speech = request.speech
    assert (speech.speaker, speech.streaming, speech.seed) == ("Ethan", False, request.seed)
    sampling = speech.sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (5, 0.8, 0.9)
    assert sampling.repetition_penalty == 1.05
    # What is left of the talker's 512 positions.
    assert sampling.max_tokens == 512 - 2 - len(request.prompt_token_ids)
    assert speech.chunk_frames == []
    client.chat("Hi", speech=False)
    text_only = await tcp.stages.request(1)
    assert text_only.speech is None
    assert text_only.sampling.temperature == 0
    assert text_only.sampling.max_tokens == 512 - len(text_only.prompt_token_ids)
    assert text_only.seed != request.seed
    client.chat("Hi", chunk_frames=(12, 24))
    cut = await tcp.stages.request(2)
    assert cut.speech is not None
    assert cut.speech.chunk_frames == [12, 24]


@pytest.mark.parametrize("seqs", [(1,), (0, 0), (0, 2)])
async def test_gap_or_repeat_fails_a_request(tcp: Bench, client: AsyncClient, seqs: tuple[int, ...]) -> None:
    answer = client.chat("Hi")
    name = (await tcp.stages.request(0)).request_id
    for seq in seqs:
        await tcp.stages.codec(name, seq, [1])
    await fails(answer, errors.StageFailedError, "codec message")
    await tcp.stages.aborted(name)
    await tcp.stages.text(name, 0, [1])
    await until(lambda: tcp.process.status().dropped_events == 1)
    assert tcp.counts["failed"] == 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("stage_failed", errors.StageFailedError),
        ("prompt_too_long", errors.PromptTooLongError),
        ("payload_invalid", errors.StageFailedError),
    ],
)
async def test_failure_of_a_stage(tcp: Bench, client: AsyncClient, code: str, kind: type[Exception]) -> None:
    answer = client.chat("Hi")
    request = await tcp.stages.request(0)
    await tcp.stages.fail(request.request_id, "talker", code, "it broke")
    with pytest.raises(kind, match="talker: it broke") as raised:
        await answer.result()
    assert type(raised.value) is kind
    await tcp.stages.aborted(request.request_id)


async def test_deadline_expires(configure: Configure) -> None:
    async with bench(configure(max_active=1)) as b, b.client() as client:
        active = client.chat("Hi", deadline_s=1.0)
        waiting = client.chat("Hi", deadline_s=0.5)
        name = (await b.stages.request(0)).request_id
        await fails(waiting, errors.DeadlineError, "queued")
        await fails(active, errors.DeadlineError, "thinking")
        await b.stages.aborted(name)
        assert b.counts["expired"] == 2
        assert len(b.stages.requests) == 1


async def test_cancel_by_id(configure: Configure) -> None:
    async with bench(configure(max_active=1)) as b, b.client() as client:
        first, second = client.chat("Hi"), client.chat("Hi")
        request = await b.stages.request(0)
        second.cancel()
        await fails(second, errors.CancelledRequestError)
        first.cancel()
        await fails(first, errors.CancelledRequestError)
        await b.stages.aborted(request.request_id)
        first.cancel()
        assert b.counts["cancelled"] == 2


async def test_an_unexpected_error_is_told_to_the_client(tcp: Bench, monkeypatch: Patch) -> None:
    def broken(_: PromptBuilder, messages: list[ChatMessage]) -> list[int]:
        raise ZeroDivisionError(f"of {len(messages)}")

    async with tcp.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(PromptBuilder, "build", broken)
            await fails(client.chat("Hi"), errors.RequestError, r"internal: .*ZeroDivisionError")
        again = client.chat("Hi")
        await tcp.stages.answer(await tcp.stages.request(0), tcp.encode("Hello"))
        assert (await again.result()).text == "Hello"


async def test_busy_is_told_before_the_prompt_is_made(configure: Configure, monkeypatch: Patch) -> None:
    """Or a flood of long prompts would wait, unbounded, for the one thread that makes them."""
    made = threading.Event()
    build = PromptBuilder.build

    def slow_build(builder: PromptBuilder, messages: list[ChatMessage]) -> list[int]:
        made.wait(60)
        return build(builder, messages)

    monkeypatch.setattr(PromptBuilder, "build", slow_build)

    async with bench(configure(max_active=1, max_queued=1)) as b, b.client() as client:
        taken = [client.chat("Hi") for _ in range(2)]
        try:
            raised = await fails(client.chat("Hi"), errors.BusyError)
            assert raised.retry_after_ms > 0
        finally:
            made.set()
        for index, answer in enumerate(taken):
            await b.stages.answer(await b.stages.request(index), b.encode("Hello"))
            assert (await answer.result()).text == "Hello"


async def test_one_client_cannot_take_all(configure: Configure) -> None:
    async with bench(configure(max_queued_per_client=1)) as b, b.client() as greedy, b.client() as other:
        greedy.chat("Hi")
        await fails(greedy.chat("Hi"), errors.BusyError, "this connection")
        other.chat("Hi")
        await b.stages.request(1)


async def test_many_at_once_keep_their_own_answers(configure: Configure) -> None:
    async with bench(configure(max_active=4)) as b, b.client() as client:
        answers = {seed: client.chat("Hi", seed=seed) for seed in range(12)}
        for index in range(12):
            request = await b.stages.request(index)
            await b.stages.answer(request, b.encode(f"number {request.seed}"))
        for seed, answer in answers.items():
            assert (await answer.result()).text == f"number {seed}"


async def test_stage_down_fails_its_requests_and_refuses_new_ones(configure: Configure) -> None:
    config = configure({"heartbeat_timeout_s": 0.3, "resume_wait_s": 0.2}, max_active=1)
    async with bench(config) as b, b.client() as client:
        active, waiting = client.chat("Hi"), client.chat("Hi")
        await b.stages.request(0)
        b.stages.alive.discard("talker")
        for answer in (active, waiting):
            await fails(answer, errors.StageUnavailableError, "talker")
        await fails(client.chat("Hi"), errors.StageUnavailableError, "talker is down")
        metrics = b.process.gateway.metrics.registry
        for outcome, count in {"failed": 2, "refused": 1}.items():
            assert metrics.get_sample_value("omnirelay_requests_total", {"outcome": outcome}) == count
        assert len(b.stages.requests) == 1
        text_only = client.chat("Hi", speech=False)
        await b.stages.answer(await b.stages.request(1), b.encode("Hello"))
        result = await text_only.result()
        assert result.text == "Hello"
        assert list(result.done.state_seconds) == ["received", "queued", "thinking", "completed"]
        assert result.done.speaker is None
        report = await client.status()
        assert [stage.state for stage in report.stages] == ["ready", "down", "ready"]
        b.stages.alive.add("talker")
        await until(lambda: b.process.status().ready)
        again = client.chat("Hi")
        await b.stages.answer(await b.stages.request(2), b.encode("Hello"))
        assert (await again.result()).text == "Hello"


async def test_a_stage_that_comes_back_hears_the_aborts_it_missed(configure: Configure) -> None:
    async with bench(configure(gateway={"heartbeat_timeout_s": 0.3})) as b, b.client() as client:
        b.stages.confirm = False
        answer = client.chat("Hi")
        name = (await b.stages.request(0)).request_id
        b.stages.alive.discard("talker")
        await fails(answer, errors.StageUnavailableError, "does not answer")
        await b.stages.aborted(name)
        heard = b.stages.aborts["talker"].count(name)
        b.stages.alive.add("talker")
        await until(lambda: b.stages.aborts["talker"].count(name) > heard, "the abort is repeated")


async def test_starting_stages_refuse_by_name(configure: Configure) -> None:
    async with bench(configure(), ready=False, alive=()) as b, b.client() as client:
        await fails(client.chat("Hi"), errors.StageUnavailableError, "thinker is starting")


@pytest.mark.parametrize(
    ("aliases", "voices"),
    [
        ({}, {"alloy": "Chelsie", "onyx": "Ethan", "ethan": "Ethan"}),
        (
            {"voice_aliases": {"Ethan": "Chelsie", "deep": "Ethan", "lost": "Nobody"}},
            {"Ethan": "Ethan", "deep": "Ethan", "lost": "Chelsie"},
        ),
    ],
)
async def test_aliases_of_voices(
    configure: Configure, aliases: dict[str, Any], voices: dict[str, str]
) -> None:
    """Those of OpenAI, and those of the configuration; a voice's own name comes first, in any case."""
    async with bench(configure(aliases)) as b, b.client() as client:
        b.stages.serve([1, 2])
        for name in voices:
            await client.chat("Hi", speaker=name).result()
        assert [each.speech.speaker for each in b.stages.requests if each.speech] == [*voices.values()]
        if aliases:
            with pytest.raises(errors.UnknownSpeakerError, match=r"Chelsie \(and the aliases Ethan, deep"):
                await client.chat("Hi", speaker="alloy").result()


async def test_requests_that_are_wrong(configure: Configure) -> None:
    hello, blank = [ChatMessage("user", "Hi")], [ChatMessage("user", " \n")]
    empty, invalid, long = errors.EmptyPromptError, errors.InvalidRequestError, errors.PromptTooLongError
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (errors.UnknownSpeakerError, "Ethan, Chelsie", {"messages": hello, "speaker": "Nobody"}),
        (empty, "no text", {}),
        (empty, "no text", {"messages": blank}),
        (empty, "no text", {"messages": [ChatMessage("system", " ")]}),
        (empty, "no text", {"messages": [ChatMessage("system", "x"), *blank]}),
        (empty, "no tokens", {"prompt_token_ids": []}),
        (invalid, "must be from 0", {"prompt_token_ids": [10**6]}),
        (invalid, "must be from 0", {"prompt_token_ids": [-1]}),
        (invalid, "not both", {"prompt_token_ids": [1], "messages": hello}),
        (long, "401 tokens, this", {"prompt_token_ids": [1] * 401}),
        (long, "talker can take at most 397", {"prompt_token_ids": [1] * 398}),
        (long, "thinker", {"prompt_token_ids": [1] * 400, "speech": False}),
        (invalid, "deadline_s", {"messages": hello, "deadline_s": 0}),
        (invalid, "deadline_s", {"messages": hello, "deadline_s": float("nan")}),
        (invalid, "seed", {"messages": hello, "seed": -1}),
        (invalid, "priority", {"messages": hello, "priority": 1001}),
        (invalid, "chunk_frames needs", {"messages": hello, "chunk_frames": [12], "streaming": False}),
    ]
    samplings: list[dict[str, Any]] = [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 2.1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"repetition_penalty": 1e-300},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
    ]
    for values in samplings:
        overrides = SamplingOverrides(**values)
        for field in ("text_sampling", "codec_sampling"):
            # The last of them is found before the thinker's limits are looked at.
            name = f"{field}.{next(iter(values))}" if len(values) == 1 else next(iter(values))
            cases.append((invalid, name, {"messages": hello, field: overrides}))
        text_only = {"messages": hello, "speech": False, "codec_sampling": overrides}
        cases.append((invalid, next(iter(values)), text_only))
    config = configure(max_prompt_tokens=400, max_queued_per_client=4)
    async with bench(config, ready=False) as b, b.client() as client:
        b.stages.max_positions = 400
        await until(lambda: b.registry.max_positions("talker") == b.registry.max_positions("thinker") == 400)
        await until(lambda: b.process.status().ready)
        for kind, match, fields in cases:
            await fails(client.chat(GenerateRequest(**fields)), kind, match)
        # Not even a request: the message cannot be decoded.
        for sizes in ([12, 0], [12] * 1025):
            await fails(client.chat("Hi", chunk_frames=sizes), invalid, "chunk_frames")
        assert b.stages.requests == []
        assert (b.counts["refused"], b.counts["failed"]) == (len(cases), 0)
        client.chat(GenerateRequest(prompt_token_ids=[1] * 397))
        taken = await b.stages.request(0)
        assert taken.speech is not None
        assert taken.speech.sampling.max_tokens == 1
