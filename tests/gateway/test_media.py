"""Sounds, pictures and videos through a gateway with real sockets: what arrives, waits, is refused."""

import asyncio
import base64
import gc
import itertools
import weakref

import msgspec
import pytest

from gateway.fairness.uploads import IncomingUpload
from gateway.input.fetch import Fetcher
from omnirelay import (
    AsyncAnswer,
    AsyncClient,
    AudioPart,
    ChatMessage,
    GenerateRequest,
    ImagePart,
    TextPart,
    VideoPart,
    audio,
    errors,
    image,
    protocol,
    video,
)
from omnirelay.content import MediaPart
from omnirelay.values import TRANSCRIPTION_PROMPT
from shared.config import Config
from tests.gateway.bench import Bench, Configure, Patch, bench, fails
from tests.gateway.fake_stages import CACHED, TOKENS_OF_ITEM, until
from tests.gateway.https_server import HOST, Authority, https_server

LARGE = 1_000_000
SOUND, PICTURE, FILM = b"sound" * 50_000, b"picture" * 30_000, b"film" * 100_000


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def asking(*parts: TextPart | AudioPart | ImagePart | VideoPart) -> GenerateRequest:
    return GenerateRequest(messages=[ChatMessage("user", list(parts))])


async def test_media_reach_the_thinker_in_the_order_of_the_prompt(tcp: Bench, client: AsyncClient) -> None:
    conversation = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", [image(PICTURE), audio(SOUND), TextPart("Who is this?")]),
        ChatMessage("assistant", "A friend."),
        ChatMessage("user", [TextPart("And"), video(data_url(FILM)), audio(data_url(b"short"))]),
    ]
    answer = client.chat(conversation, use_audio_in_video=True)
    request = await tcp.stages.request(0)
    assert [(item.kind, bytes(item.data.view)) for item in request.media] == [
        ("image", PICTURE),
        ("audio", SOUND),
        ("video", FILM),
        ("audio", b"short"),
    ]
    assert request.use_audio_in_video
    await tcp.stages.answer(request, tcp.encode("Hello"))
    done = (await answer.result()).done
    assert done.prompt_token_ids == request.prompt_token_ids
    assert done.prompt_tokens == len(request.prompt_token_ids) + 4 * (TOKENS_OF_ITEM - 1)
    assert done.cached_prompt_tokens == CACHED


async def test_a_recording_is_transcribed(tcp: Bench, client: AsyncClient) -> None:
    tcp.stages.serve(tcp.encode("Hello"))
    assert await client.transcribe(SOUND, "Ada", max_tokens=9) == "Hello"
    (request,) = tcp.stages.requests
    assert [item.kind for item in request.media] == ["audio"]
    assert (request.speech, request.sampling.max_tokens) == (None, 9)
    asked = tcp.process._prompts._tokenizer.decode(request.prompt_token_ids)
    assert TRANSCRIPTION_PROMPT in asked
    assert "Ada" in asked


async def test_media_that_are_refused_are_named(configure: Configure) -> None:
    media = {"max_item_bytes": 1000, "max_request_bytes": 2500}
    media |= {"max_audios": 2, "max_images": 3, "max_videos": 0}
    full, large = data_url(bytes(1000)), data_url(bytes(1001))
    wrong, too_large = errors.MediaError, errors.MediaTooLargeError
    unreachable = errors.MediaUnreachableError
    cases: list[tuple[list[MediaPart], type[Exception], str]] = [
        ([ImagePart(), AudioPart(data=memoryview(b"x"))], wrong, "image 1: give either"),
        ([AudioPart(data=memoryview(b"x"), url="data:,x")], wrong, "audio 1: give either"),
        ([ImagePart(url=full), ImagePart(data=memoryview(b""))], wrong, "image 2: it is empty"),
        ([ImagePart(url=full), AudioPart(url="data:,")], wrong, "audio 1: it is empty"),
        (
            [AudioPart(url=full), AudioPart(url=large)],
            too_large,
            r"audio 2: 1001 bytes, at most 1000 are allowed \(media\.max_item_bytes\)",
        ),
        ([AudioPart(url=full)] * 3, too_large, "3 items of kind audio, at most 2"),
        ([VideoPart(url=full)], too_large, "1 items of kind video, at most 0"),
        (
            [ImagePart(url=full)] * 3,
            too_large,
            r"3000 bytes of media together, at most 2500 are allowed \(media\.max_request_bytes\)",
        ),
        ([AudioPart(url="https://example.com/x")], unreachable, "audio 1: .* no host"),
        ([AudioPart(url="/etc/passwd")], unreachable, "audio 1: .*neither a data: URL"),
        ([AudioPart(url="data:;base64,x")], wrong, "audio 1: its data URL cannot be decoded"),
    ]

    async with bench(configure(media=media)) as b, b.client() as client:
        for parts, kind, match in cases:
            with pytest.raises(kind, match=match) as raised:
                await client.chat(asking(TextPart("Hi"), *parts)).result()  # type: ignore[arg-type]
            assert type(raised.value) is kind
            assert b.process.gateway.held.total == 0
        ids = b.encode("<|audio_bos|><|AUDIO|><|audio_eos|>")
        alone = GenerateRequest(prompt_token_ids=ids)
        mixed = msgspec.structs.replace(asking(AudioPart(url=full)), prompt_token_ids=[1])
        for request, match in ((alone, "placeholder of audio"), (mixed, "not both")):
            await fails(client.chat(request), errors.InvalidRequestError, match)
        await fails(client.chat("x" * (4 * 2**20 + 1)), errors.PromptTooLongError, "characters of text")
        assert b.stages.requests == []


async def test_by_value_the_gateway_checks_what_a_client_might_not(configure: Configure) -> None:
    """Our client refuses first; another need not."""
    media = {"max_item_bytes": 1000, "max_request_bytes": 1500}

    async with bench(configure(media=media)) as b, b.client() as ours, b.client() as other:
        assert other._connection is not None
        other._connection.limits = protocol.Welcome(1)
        for sizes, told in (([10, 1001], "audio 2: 1001 bytes, at"), ([800, 701], "1501 bytes of")):
            asked = asking(*(AudioPart(data=memoryview(bytes(size))) for size in sizes))
            with pytest.raises(errors.MediaTooLargeError, match="the gateway takes at most"):
                ours.chat(asked)
            await fails(other.chat(asked), errors.MediaTooLargeError, told)


async def test_more_than_is_held_is_busy_at_once(configure: Configure) -> None:
    media = {"max_item_bytes": 400, "max_request_bytes": 1000}

    async with bench(configure(media=media, held_bytes=1000)) as b, b.client() as client, b.client() as other:
        first = client.chat(images=[bytes(400), bytes(400)])
        request = await b.stages.request(0)
        assert b.process.gateway.held.total == 800
        raised = await fails(
            client.chat(images=bytes(201)), errors.BusyError, "800 bytes of media are held, no room for 201"
        )
        assert raised.retry_after_ms > 0
        # What a URL holds is only known when it is there, and counted like the rest.
        await fails(client.chat(images=data_url(bytes(150))), errors.BusyError, "no room")
        client.chat("no media")
        await b.stages.request(1)
        # The rest is kept for others.
        await fails(client.chat(images=bytes(200)), errors.BusyError, "this client holds 800")
        second = other.chat(images=bytes(200))
        await b.stages.request(2)
        await b.stages.answer(request, b.encode("Hello"))
        await first.result()
        assert b.process.gateway.held.total == 200
        second.cancel()
        await fails(second, errors.CancelledRequestError)
        assert b.process.gateway.held.total == 0


ENDINGS = ["finish", "fail", "cancel", "cancel early", "expire", "refuse", "leave"]


async def test_held_bytes_return_to_zero_however_requests_end(configure: Configure) -> None:
    async with bench(configure(max_active=100)) as b:
        held, seeds = b.process.gateway.held, itertools.count()
        for sizes in ([1], [5000, 3], [100, 2000, 1]):
            await asyncio.gather(*(end(b, next(seeds), ending, sizes) for ending in ENDINGS))
            await until(lambda: held.total == 0, "nothing held")
        async with b.client() as client:
            answers = [client.chat(images=bytes(1000)) for _ in range(3)]
            await until(lambda: held.total == 3000)
            await b.process.stop()
            assert held.total == 0
            await asyncio.gather(*map(ended, answers))


async def end(b: Bench, seed: int, ending: str, sizes: list[int]) -> None:
    """Send a request with files of these sizes, every second one in a URL, and let it end."""
    parts: list[AudioPart | ImagePart] = []
    for index, size in enumerate(sizes):
        parts.append(audio(data_url(bytes(size))) if index % 2 else image(bytes(size)))
    if ending == "refuse":
        parts.append(ImagePart(url="data:;base64,?"))
    deadline_s = 0.02 if ending == "expire" else None
    async with b.client() as client:
        answer = client.chat(msgspec.structs.replace(asking(*parts), seed=seed, deadline_s=deadline_s))
        if ending == "cancel early":
            answer.cancel()
        elif ending not in ("expire", "refuse"):
            await until(lambda: any(each.seed == seed for each in b.stages.requests), "the request")
            asked = next(each for each in b.stages.requests if each.seed == seed)
            if ending == "finish":
                await b.stages.answer(asked, b.encode("Hello"))
            elif ending == "fail":
                await b.stages.fail(asked.request_id, "talker", "stage_failed", "broke")
            elif ending == "cancel":
                answer.cancel()
        if ending != "leave":
            await ended(answer)


async def ended(answer: AsyncAnswer) -> None:
    code = "none"
    try:
        await answer.result()
    except errors.OmniRelayError as error:
        code = error.code
    assert code != "internal"


@pytest.mark.parametrize("how", ["cancel", "finish", "refuse"])
async def test_files_go_with_their_request(tcp: Bench, monkeypatch: Patch, how: str) -> None:
    bodies: list[weakref.ref[bytearray]] = []

    class Body(bytearray):
        """Unlike its base class, it can be watched."""

    finish = IncomingUpload.finish

    def watched(upload: IncomingUpload) -> bytearray:
        body = Body(finish(upload))
        bodies.append(weakref.ref(body))
        return body

    monkeypatch.setattr(IncomingUpload, "finish", watched)

    async with tcp.client() as client:
        parts: list[AudioPart | ImagePart] = [image(SOUND)]
        parts += [audio("data:;base64,?")] if how == "refuse" else []
        answer = client.chat(asking(*parts))
        if how != "refuse":
            request = await tcp.stages.request(0)
            assert bodies[0]() is not None
        if how == "cancel":
            answer.cancel()
        elif how == "finish":
            await tcp.stages.answer(request, tcp.encode("Hello"))
        await ended(answer)

        def gone() -> bool:
            gc.collect()
            return bodies[0]() is None

        await until(gone, "the end of the file")
        assert tcp.process.gateway.held.total == 0


def full_queue(configure: Configure, monkeypatch: Patch, backlog: int) -> Config:
    """One picture is on its way to a thinker that reads nothing, and ``backlog`` bytes may wait for it."""
    monkeypatch.setattr("gateway.dispatch.stage_transport.DEFAULT_MAX_BACKLOG_BYTES", backlog)
    monkeypatch.setattr("gateway.dispatch.stage_transport.MAX_HEADER_BYTES", 1000)
    media = {"max_item_bytes": LARGE, "max_request_bytes": LARGE}
    return configure(media=media).model_copy(update={"window_bytes": 2**20})


async def test_requests_wait_while_the_thinkers_queue_is_full(
    configure: Configure, monkeypatch: Patch
) -> None:
    config = full_queue(configure, monkeypatch, 5 * LARGE // 2)

    async with bench(config, listening=False) as b, b.client() as client:
        answers = [client.chat(images=bytes(LARGE), seed=seed, priority=1) for seed in range(7)]
        await until(lambda: (b.counts["queued"], b.counts["thinking"]) == (4, 3))
        answers[1].cancel()
        # Its place in the queue goes to the next in line.
        await until(lambda: (b.counts["queued"], b.counts["thinking"]) == (3, 3))
        urgent = client.chat(images=bytes(LARGE), seed=7)
        await until(lambda: b.counts["queued"] == 4)
        b.stages.listen_again()
        for index in range(7):
            await b.stages.answer(await b.stages.request(index), b.encode("Hello"))
        for answer in (answers[0], *answers[2:], urgent):
            assert (await answer.result()).text == "Hello"
        assert [request.seed for request in b.stages.requests] == [0, 2, 3, 7, 4, 5, 6]
        assert b.counts["failed"] == 0


async def test_files_are_fetched_for_the_thinker(configure: Configure, tmp_path: object) -> None:
    authority = Authority(tmp_path)  # type: ignore[arg-type]

    async with https_server(authority) as server:
        server.give("/a.png", PICTURE)
        server.give("/b.ogg", SOUND)
        never = asyncio.Event()
        server.answers["/never"] = lambda _: never.wait()  # type: ignore[assignment,return-value]
        config = configure(media={"url_hosts": [f"{HOST}:{server.port}"]})

        async def here(host: str, port: int) -> list[str]:
            return ["127.0.0.1"]

        fetcher = Fetcher(config.media, here, lambda _: True, authority.trusting)
        place = f"https://{HOST}:{server.port}"
        async with bench(config, fetch=fetcher) as b, b.client() as client:
            client.chat(images=[f"{place}/a.png", FILM], audio=f"{place}/b.ogg")
            request = await b.stages.request(0)
            assert [bytes(item.data.view) for item in request.media] == [SOUND, PICTURE, FILM]
            missing = client.chat(images=[FILM, f"{place}/c.png"], audio=f"{place}/never")
            await fails(missing, errors.MediaUnreachableError, r"image 2: media\.test answered 404")
            foreign = client.chat(audio="https://example.com/")
            await fails(foreign, errors.MediaUnreachableError, r"audio 1: .* fetch from example")
            late = client.chat(audio=f"{place}/never", deadline_s=0.1)
            await fails(late, errors.DeadlineError, "was being checked")
            assert b.counts["expired"] == 1
            asked = len(server.asked)
            answer = client.chat(audio=f"{place}/never")
            await until(lambda: len(server.asked) > asked)
            answer.cancel()
            await fails(answer, errors.CancelledRequestError)
            never.set()


async def test_the_process_fetches_only_where_hosts_are_allowed(configure: Configure) -> None:
    async with bench(configure(media={"url_hosts": ["media.invalid"]})) as b, b.client() as client:
        await fails(
            client.chat(images="https://media.invalid/x"),
            errors.MediaUnreachableError,
            r"media\.invalid has no address",
        )
