"""Requests that go on with a partial answer: what clients are told, what they may claim, what it costs."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.requests.lifecycle import Lifecycle, StateCounts
from gateway.requests.record import RequestRecord, check_partial
from omnirelay import ChatMessage, GenerateRequest, SamplingOverrides
from omnirelay.errors import InvalidResumeError
from omnirelay.events import AcceptedEvent, AudioEvent, CodecEvent, DoneEvent, ErrorEvent, Event, TextEvent
from omnirelay.protocol import PartialAnswer, Reply
from omnirelay.status import CodecLimits
from shared.messages import Sampling, SpeechSettings, TextSampling, ThinkRequest
from tests.gateway.bench import KEY, OTHER, Bench, Configure, RawClient, bench, serves, submit
from tests.gateway.fake_stages import placeholder_ids, until
from tests.gateway.scripted import CHUNKS, CODES, TEXT, Script

ASKED = GenerateRequest(messages=[ChatMessage("user", "Hi")], seed=7, resumable=True)
SAMPLES = [len(chunk) // 4 for chunk in CHUNKS]


def claim(request_id: str = "earlier", **fields: Any) -> GenerateRequest:
    return replace(ASKED, resume=PartialAnswer(request_id=request_id, **fields))


async def heard(raw: RawClient, client_id: int = 1) -> Event:
    """The next event of a request."""
    while True:
        message = await raw.hear()
        if isinstance(message, Reply) and message.id == client_id:
            return message.event


async def accepted(raw: RawClient, client_id: int = 1) -> AcceptedEvent:
    event = await heard(raw, client_id)
    assert isinstance(event, AcceptedEvent)
    return event


async def rest(raw: RawClient) -> tuple[list[Event], DoneEvent]:
    """The events up to the last one, which tells the whole answer."""
    events = [await heard(raw)]
    while not isinstance(done := events[-1], DoneEvent):
        assert not isinstance(done, ErrorEvent), done
        events.append(await heard(raw))
    return events, done


async def refusal(raw: RawClient, request: GenerateRequest) -> ErrorEvent:
    raw.say(submit(1, request))
    event = await heard(raw)
    assert isinstance(event, ErrorEvent)
    return event


async def test_a_resumable_request_is_told_what_it_takes(tcp: Bench, raw: RawClient, script: Script) -> None:
    raw.say(submit(1, ASKED))
    await script.play(await tcp.stages.request(0))
    assert (await accepted(raw)).seed == 7
    events, done = await rest(raw)
    assert done.seed == 7
    texts = [event for event in events if isinstance(event, TextEvent)]
    codes = [event for event in events if isinstance(event, CodecEvent)]
    assert [each.finish_reason for each in texts] == [None] * (len(texts) - 1) + ["stop"]
    assert [token for each in codes for token in each.token_ids] == CODES
    assert [each.finish_reason for each in codes] == [None] * (len(codes) - 1) + ["stop"]


async def test_others_are_sent_nothing_more(tcp: Bench, raw: RawClient, script: Script) -> None:
    raw.say(submit(1, replace(ASKED, resumable=False)))
    await script.play(await tcp.stages.request(0))
    events, _ = await rest(raw)
    assert not any(isinstance(event, CodecEvent) for event in events)
    told = [msgspec.to_builtins(event) for event in events]
    assert not any("finish_reason" in each or "seed" in each for each in told[:-1])


@pytest.mark.parametrize("text", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("speech", [0.0, 0.4, 1.0])
async def test_an_answer_goes_on_where_the_client_is(
    tcp: Bench, raw: RawClient, script: Script, text: float, speech: float
) -> None:
    """What it has is passed to the stages, and not sent again; the end tells all."""
    ids = script.text[: round(text * len(script.text))]
    codes = CODES[: round(speech * len(CODES))]
    had = round(speech * len(CHUNKS))
    raw.say(
        submit(
            1,
            claim(
                text_token_ids=ids,
                text_finish_reason="stop" if text == 1 else None,
                codec_token_ids=codes,
                codec_finish_reason="stop" if speech == 1 else None,
                chunk_samples=SAMPLES[:had],
            ),
        )
    )
    if text < 1 or speech < 1:
        request = await tcp.stages.request(0)
        # Finished speech is not requested.
        assert (request.resume is not None) == bool(text or 0 < speech < 1)
        if request.resume is not None:
            assert request.resume.text_token_ids == ids
            assert (request.resume.speech is None) == (speech == 1)
        await script.play(request)
    events, done = await rest(raw)
    assert (done.text, done.text_token_ids, done.codec_token_ids) == (TEXT, script.text, CODES)
    assert done.audio_seconds == sum(SAMPLES) / 24_000
    told = [token for event in events if isinstance(event, TextEvent) for token in event.token_ids]
    assert ids + told == script.text
    audio = [event for event in events if isinstance(event, AudioEvent)]
    assert [each.seq for each in audio] == list(range(had, len(CHUNKS)))
    assert [each.pcm for each in audio] == CHUNKS[had:]
    # Nothing is computed of what is there.
    assert len(tcp.stages.requests) == (text < 1 or speech < 1)
    continued = tcp.process.gateway.metrics.registry.get_sample_value("omnirelay_requests_continued_total")
    assert continued == 1


async def test_all_audio_may_be_there_before_the_last_codec_tokens(
    tcp: Bench, raw: RawClient, script: Script
) -> None:
    raw.say(submit(1, claim(text_token_ids=script.text, text_finish_reason="stop", chunk_samples=SAMPLES)))
    request = await tcp.stages.request(0)
    await tcp.stages.codec(request.request_id, 0, CODES, "stop")
    _, done = await rest(raw)
    assert done.codec_token_ids == CODES


async def test_a_stop_that_the_client_has_passed_ends_the_answer(tcp: Bench, raw: RawClient) -> None:
    asked = replace(claim(text_token_ids=tcp.encode("Hello world, hello")), speech=False, stop=["world"])
    raw.say(submit(1, asked))
    _, done = await rest(raw)
    assert (done.text, done.finish_reason) == ("Hello ", "stop")
    assert tcp.stages.requests == []


async def test_what_cannot_be_an_answer_is_refused_before_any_stage_works(tcp: Bench, raw: RawClient) -> None:
    few = SamplingOverrides(max_tokens=4)
    picture = next(iter(placeholder_ids(tcp.config.model or "")))
    vocabulary = tcp.process._prompts.vocab_size
    wrong: list[tuple[GenerateRequest, str]] = [
        (claim(text_token_ids=[vocabulary]), "text_token_ids[0]: token"),
        (claim(text_token_ids=[1, picture]), "text_token_ids[1]: token"),
        (claim(text_finish_reason="stop"), "text_finish_reason"),
        (claim(chunk_samples=[479]), "chunk_samples[0]"),
        (claim(chunk_samples=[480, 0]), "chunk_samples[1]"),
        (claim(chunk_samples=[480 * 9999]), "chunk_samples"),
        (claim(codec_token_ids=[1], codec_finish_reason="stop", chunk_samples=[960]), "chunk_samples"),
        (replace(claim(text_token_ids=[1] * 5), text_sampling=few), "text_token_ids: 5"),
        (replace(claim(codec_token_ids=[1] * 5), codec_sampling=few), "codec_token_ids: 5"),
        (
            replace(claim(chunk_samples=[480, 480]), streaming=False),
            "chunk_samples: speech that is not streamed",
        ),
        (replace(claim(codec_token_ids=[1]), speech=False), "codec_token_ids"),
        (replace(claim(chunk_samples=[480]), speech=False), "chunk_samples"),
    ]
    for request, place in wrong:
        error = await refusal(raw, request)
        assert error.code == InvalidResumeError.code, request
        assert "resume." in error.message
        assert place in error.message
    # Bounds of the fields themselves.
    for each in (
        claim(text_token_ids=[-1]),
        claim(chunk_samples=[480] * 65_537),
        claim(chunk_samples=[-480]),
        claim(""),
        claim("x" * 65),
    ):
        assert (await refusal(raw, each)).code == "invalid_request"
    assert tcp.stages.requests == []
    await until(lambda: not tcp.process.gateway._active)
    await serves(tcp)


def test_the_first_piece_of_a_trimmed_stream_is_shorter() -> None:
    codec = CodecLimits(frame_samples=1920, trimmed_samples=555, groups=2)
    speech = SpeechSettings(speaker="Chelsie", sampling=Sampling(max_tokens=10), seed=1)
    text = TextSampling(max_tokens=8)
    think = ThinkRequest(request_id="r", prompt_token_ids=[1], sampling=text, seed=1, speech=speech)

    def claim(chunks: list[int], ids: int = 6) -> None:
        partial = PartialAnswer(
            request_id="earlier", codec_token_ids=[1] * ids, codec_finish_reason="stop", chunk_samples=chunks
        )
        check_partial(partial, think, codec, vocabulary=16, placeholders=())
        record = RequestRecord(think, Lifecycle(StateCounts()), partial, codec)
        assert record.audio.ended == (sum(chunks) == ids // 2 * 1920 - 555)

    for chunks in ([1365], [1365, 1920], [1365, 1920, 1920], [3 * 1920 - 555]):
        claim(chunks)
    claim([1365], ids=20)
    for chunks, ids, problem in (
        ([1920], 6, r"chunk_samples\[0\]: 1920 samples are no whole frames .* 555 that the first lacks"),
        ([1365, 1365], 6, r"chunk_samples\[1\]: 1365 samples are no whole frames of 1920 samples$"),
        ([1365, 1920, 1920, 1920], 6, "chunks of 4 frames together, from at most 3"),
        ([1365], 7, "codec_token_ids: 7 ids are no whole frames of 2 ids"),
        ([1365], 22, "codec_token_ids: 22 items, this request has at most 20"),
    ):
        with pytest.raises(InvalidResumeError, match=problem):
            claim(chunks, ids)


async def test_the_request_before_is_ended(tcp: Bench) -> None:
    """A client whose connection is half open goes on by another: the answer is not computed twice."""

    one, two, three = [await RawClient.connect(tcp) for _ in range(3)]
    one.say(submit(1, ASKED))
    request_id = (await accepted(one)).request_id
    before = await tcp.stages.request(0)
    two.say(submit(1, claim(request_id)))
    await tcp.stages.aborted(before.request_id)
    assert (await one.told())[:2] == (1, "cancelled")
    await accepted(two)
    # The same claim again, and then the claim of what that began: each ends the one before it.
    names = [request_id, ""]
    for number in range(2):
        running = (await tcp.stages.request(number + 1)).request_id
        three.say(submit(number, claim(names[number] or running)))
        await tcp.stages.aborted(running)
        while not isinstance(await heard(three, number), AcceptedEvent):
            continue
    assert len(tcp.process.gateway._active) == 1


async def test_one_claim_sent_twice_at_once_runs_once(tcp: Bench, raw: RawClient) -> None:
    for number in range(6):
        raw.say(submit(number, claim(text_token_ids=[5])))
    ended = 0
    while ended < 5:
        message = await raw.hear()
        ended += isinstance(message, Reply) and isinstance(message.event, ErrorEvent)
    await until(lambda: len(tcp.process.gateway._active) == 1)


async def test_another_client_cannot_end_it(configure: Configure, keys: str) -> None:
    async with bench(configure({"api_keys": keys})) as b:
        alice, bob = [await RawClient.connect(b, key=key) for key in (KEY, OTHER)]
        alice.say(submit(1, ASKED))
        bob.say(submit(1, claim((await accepted(alice)).request_id)))
        await accepted(bob)
        await b.stages.request(1)
        assert b.stages.aborts["thinker"] == []
        assert len(b.process.gateway._active) == 2


async def test_it_counts_as_any_request(configure: Configure) -> None:
    async with bench(configure(max_queued_per_client=2)) as b:
        raw = await RawClient.connect(b)
        for number in range(2):
            raw.say(submit(number, claim(f"earlier-{number}")))
            await accepted(raw, number)
        raw.say(submit(2, claim("earlier-2")))
        assert (await raw.told())[:2] == (2, "busy")
