"""What the camera of a realtime session sees goes with what is said meanwhile, as one video."""

import base64
import gc
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.fairness.quota import MemoryBudget
from gateway.http.encoding.encoders import wav_header
from gateway.http.encoding.matroska import Film, write_matroska
from gateway.http.realtime.conversation import RealtimeConversation
from gateway.http.realtime.input_buffers import MAX_BYTES, MAX_FRAME_BYTES, InputVideo
from gateway.http.realtime.items import Recorded, sound_item
from gateway.http.realtime.session import Session
from omnirelay.content import AudioPart, VideoPart
from omnirelay.errors import BusyError, MediaError, MediaTooLargeError
from shared.config import MediaConfig
from shared.messages import MediaItem
from tests.gateway.bench import Configure
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speak, speaking
from tests.gateway.realtime import (
    ANSWER,
    CHUNKS,
    HELLO,
    add,
    append,
    ask,
    commit,
    error_of,
    idle,
    recording,
    say,
    settle,
    take,
    talking,
    update,
)
from tests.gateway.test_http_realtime_early import SECOND, VOICE, bench_of, recite
from tests.gateway.test_http_realtime_turns import listening, spoken
from tests.support.camera import FRAME_MS, frames, read_file
from tests.support.children import Patch

SEEN = frames(8)
TOKENS = 6 * 4
"""A second of these frames, of 160 by 112 pixels."""


async def look(c: Connection, image: bytes, ms: int | None = None) -> None:
    timed = {} if ms is None else {"time_ms": ms}
    await say(c, type="input_video_buffer.append", image=base64.b64encode(image).decode(), **timed)


def held_by(item: MediaItem) -> tuple[list[bytes], bytes]:
    """The pictures and the samples of an item."""
    assert item.kind == "video"
    pictures, pcm, times = read_file(bytes(item.data.view))
    assert times == [at * FRAME_MS / 1000 for at in range(len(pictures))]
    return pictures, pcm


async def forget(c: Connection) -> None:
    """Clear what was seen, which OpenAI's client has no event for."""
    await say(c, type="input_video_buffer.clear")
    cleared: Any = await c.recv()
    while cleared.type != "input_video_buffer.cleared":
        cleared = await c.recv()


async def test_what_is_seen_and_heard_is_one_video(web: HttpBench, answers: None, c: Connection) -> None:
    await recite(c, 0, 1)
    await look(c, SEEN[0], 0)
    await look(c, SEEN[1], 600)
    # Without a time: now.
    await look(c, SEEN[2])
    await recite(c, 1, 2.5)
    # Behind the end of the recording.
    await look(c, SEEN[3], 2600)
    await commit(c)
    await ask(c)
    await recite(c, 2.5, 3.5)
    await commit(c)
    await add(c)
    await ask(c)
    first, second = web.stages.requests
    assert first.use_audio_in_video
    assert [item.kind for item in first.media] == ["video"]
    # Frames are at 0, 0.5, … s; each is shown until another one comes.
    assert held_by(first.media[0]) == ([*SEEN[:1] * 2, *SEEN[2:3] * 4], VOICE[: int(2.5 * SECOND)])
    assert bytes(second.media[0].data.view) == bytes(first.media[0].data.view)
    assert held_by(second.media[1]) == ([*SEEN[2:4]], VOICE[int(2.5 * SECOND) : int(3.5 * SECOND)])


async def test_who_shows_nothing_is_only_heard(web: HttpBench, answers: None, c: Connection) -> None:
    await look(c, SEEN[0])
    await forget(c)
    await recite(c, 0, 1)
    await commit(c)
    await ask(c)
    [item] = web.stages.requests[0].media
    assert recording(item) == VOICE[:SECOND]


async def test_an_answer_that_is_begun_in_a_pause_has_seen_what_the_turn_shows(web: HttpBench) -> None:
    async with listening(web, early=True) as c:
        await look(c, SEEN[0])
        await append(c, spoken(350))
        request = await web.stages.request(0)
        await look(c, SEEN[1])
        await settle(c)
        await append(c, bytes(SECOND // 2))
        await take(c, "response.created")
        await speak(web, request, ANSWER, CHUNKS)
        assert (await take(c, "response.done"))[-1].response.status == "completed"
        assert set(held_by(request.media[0])[0]) == {SEEN[0]}
        assert await web.metric('omnirelay_realtime_turns_total{event="answered_early"}') == 1
        assert len(web.stages.requests) == 1
    await idle(web)


@pytest.mark.parametrize("what", ["late frame", "clear"])
async def test_what_changes_the_video_of_a_turn_after_its_pause_changes_the_answer(
    web: HttpBench, what: str
) -> None:
    async with listening(web, early=True) as c:
        await look(c, SEEN[0])
        await append(c, spoken(350))
        await web.stages.request(0)
        if what == "clear":
            await forget(c)
        else:
            await look(c, SEEN[1], 600)
            await settle(c)
        await append(c, bytes(SECOND // 2))
        request = await web.stages.request(1)
        await speak(web, request, ANSWER, CHUNKS)
        assert (await take(c, "response.done"))[-1].response.status == "completed"
        [item] = request.media
        if what == "clear":
            assert item.kind == "audio"
        else:
            assert SEEN[1] in held_by(item)[0]
        assert await web.metric('omnirelay_realtime_turns_total{event="answered_early"}') == 0
    await idle(web)


async def test_a_recording_that_is_cleared_in_a_pause_is_let_go(web: HttpBench) -> None:
    async with listening(web, early=True) as c:
        await look(c, SEEN[0])
        await append(c, spoken(350))
        await web.stages.request(0)
        # By type(): what is collected may be a dead weak proxy, whose class cannot be asked for.
        sessions = [each for each in gc.get_objects() if type(each) is Session]
        [session] = [each for each in sessions if each._context.gateway is web.process.gateway]
        assert session._paused is not None
        await say(c, type="input_audio_buffer.clear")
        await settle(c)
        assert session._paused is None
    await idle(web)


async def test_a_video_is_computed_while_it_goes_on_and_before_the_next_request(configure: Configure) -> None:
    async with bench_of(configure) as b, talking(b) as c:
        await look(c, SEEN[0])
        await recite(c, 0, 3)
        begun = await b.stages.prefill(0)
        assert (begun.early, begun.use_audio_in_video) == ("recording", True)
        assert [item.kind for item in begun.media] == ["video"]
        assert b.process.gateway.prompts.placeholders[begun.prompt_token_ids[-1]] == "video"
        await b.stages.prefilled(begun.request_id, 90)
        await commit(c)
        begun = await b.stages.prefill(1)
        assert (begun.early, begun.use_audio_in_video) == ("prompt", True)
        assert [item.kind for item in begun.media] == ["video"]


async def test_transcripts_are_of_what_was_heard(web: HttpBench, c: Connection) -> None:
    async with speaking(web, "what I see", CHUNKS):
        await update(c, audio={"input": {"transcription": {}}})
        await look(c, SEEN[0])
        await recite(c, 0, 1)
        await commit(c)
        done = await take(c, "conversation.item.input_audio_transcription.completed")
    assert done[-1].transcript == "what I see"
    [item] = web.stages.requests[0].media
    assert recording(item) == VOICE[:SECOND]


@pytest.mark.parametrize(
    ("code", "response", "left"),
    [
        ("media_invalid", {}, "audio"),
        # They were not in the prompt.
        ("media_invalid", {"conversation": "none", "input": [HELLO]}, "video"),
        ("prompt_too_long", {"conversation": "none", "input": [HELLO]}, "video"),
    ],
)
async def test_videos_that_cannot_be_answered_leave(
    web: HttpBench, c: Connection, code: str, response: Any, left: str
) -> None:
    await look(c, SEEN[0])
    await recite(c, 0, 1)
    await commit(c)
    await c.response.create(response=response)
    request = await web.stages.request(0)
    await web.stages.fail(request.request_id, "thinker", code, "video 1: the file is damaged")
    assert (await take(c, "response.done"))[-1].response.status_details.error.code == code
    async with speaking(web, ANSWER, CHUNKS):
        await ask(c)
    [item] = web.stages.requests[1].media
    assert item.kind == left
    assert left == "video" or recording(item) == VOICE[:SECOND]


@pytest.mark.parametrize("limit", ["max_videos", "realtime_video_tokens"])
async def test_older_videos_leave_and_their_sound_stays(configure: Configure, limit: str) -> None:
    media = {"max_videos": 2} if limit == "max_videos" else {"realtime_video_tokens": 5 * TOKENS}
    config = configure(http_gateway(), media)
    async with http_bench(config) as b:
        async with speaking(b, ANSWER, CHUNKS), talking(b) as c:
            for turn in range(3):
                await recite(c, 2 * turn, 2 * turn + 2)
                await look(c, SEEN[turn], 2000 * turn)
                held = b.process.gateway.held.total
                await commit(c)
                # The file and, in case that it is left out, the recording.
                assert b.process.gateway.held.total > held - (2 * 2 * SECOND if turn == 2 else 0)
            await ask(c)
            (request,) = b.stages.requests
            assert [item.kind for item in request.media] == ["audio", "video", "video"]
            assert recording(request.media[0]) == VOICE[: 2 * SECOND]
            assert held_by(request.media[2])[0] == [SEEN[2]] * 4
        await idle(b)


JPEG, (PNG,) = SEEN[0], frames(1, form="png")
EMPTY = b"\xff\xe1\x00\x02"
"""A segment of a JPEG file."""


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"hi", MediaError),
        (JPEG[:-9], MediaError),
        (PNG[:-9], MediaError),
        # Many empty segments before the size.
        (JPEG[:2] + 1000 * EMPTY + JPEG[2:], MediaError),
        (JPEG.ljust(MAX_FRAME_BYTES + 1), MediaTooLargeError),
        # Too many pixels.
        (frames(1, 1600, 1600)[0], MediaTooLargeError),
    ],
    ids=["no picture", "half a JPEG", "half a PNG", "segments", "bytes", "pixels"],
)
def test_a_frame_that_is_refused(budget: MemoryBudget, data: bytes, kind: type[MediaError]) -> None:
    video = video_of(budget, realtime_video_tokens=4096)
    with pytest.raises(MediaError) as refused:
        video.append(data, 0)
    assert (type(refused.value), refused.value.param) == (kind, "image")
    assert budget.total == 0
    video.append(JPEG, 0)
    assert budget.total == len(JPEG)


async def test_frames_that_are_refused_end_no_session(web: HttpBench, c: Connection) -> None:
    image = base64.b64encode(JPEG).decode()
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"image": base64.b64encode(JPEG[:-9]).decode()}, "media_invalid", "image"),
        ({"image": "?"}, "invalid_request", "image"),
        ({}, "invalid_request", "image"),
        ({"image": image, "time_ms": -1}, "invalid_request", "time_ms"),
        # A time that would hide all that comes.
        ({"image": image, "time_ms": 30_001}, "invalid_request", "time_ms"),
    ]
    for fields, code, param in wrong:
        await say(c, type="input_video_buffer.append", event_id="bad", **fields)
        error = await error_of(c)
        assert (error.code, error.param, error.event_id) == (code, param, "bad")
    held = web.process.gateway.held.total
    await look(c, JPEG)
    await settle(c)
    assert web.process.gateway.held.total == held + len(JPEG)


async def test_who_takes_no_videos(configure: Configure) -> None:
    async with http_bench(configure(http_gateway(), {"max_videos": 0})) as b, talking(b) as c:
        await look(c, JPEG)
        assert (await error_of(c)).code == "media_too_large"
        await update(c, type="transcription")
        await look(c, JPEG)
        assert (await error_of(c)).code == "unsupported"


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(2**30, lambda: 1)


def video_of(budget: MemoryBudget | None = None, **media: Any) -> InputVideo:
    held = budget or MemoryBudget(2**30, lambda: 1)
    return InputVideo(MediaConfig(**media), held.of("a"))


def wav(seconds: float) -> memoryview:
    pcm = (VOICE * 4)[: int(seconds * SECOND)]
    return memoryview(bytes(wav_header(len(pcm))) + pcm)


def shown(video: InputVideo, seconds: float, begin_ms: int = 0) -> list[bytes]:
    part = video.recorded(wav(seconds), begin_ms).parts[-1]
    assert isinstance(part, VideoPart)
    assert part.data is not None
    return read_file(bytes(part.data))[0]


@pytest.mark.parametrize(("fps", "kept"), [(2.0, [0, 1, 2, 3]), (1.0, [0, 0, 2, 2])])
def test_a_camera_that_is_faster_is_sampled(fps: float, kept: list[int]) -> None:
    video = video_of(realtime_fps=fps)
    # 30 pictures a second, of which 15 in a row are equal; then one that comes too late.
    for at in range(60):
        video.append(SEEN[at // 15], at * 1000 // 30)
    video.append(SEEN[7], 1700)
    assert shown(video, 2) == [SEEN[at] for at in kept]


def test_a_long_turn_is_heard_whole_and_its_end_is_seen(budget: MemoryBudget) -> None:
    video = video_of(budget, realtime_video_seconds=3)
    for at in range(20):
        video.append(SEEN[at % 8], at * FRAME_MS)
    assert budget.total <= 7 * max(map(len, SEEN))
    before, after = (recorded := video.recorded(wav(9.5), 0)).parts
    assert isinstance(before, AudioPart)
    assert isinstance(after, VideoPart)
    assert recorded.video_tokens == 3 * TOKENS
    pictures, pcm, _ = read_file(bytes(after.data or b""))
    assert pictures == [SEEN[at % 8] for at in (14, 15, 16, 17, 18, 19)]
    assert recording(before) + pcm == bytes(wav(9.5))[44:]
    assert len(pcm) == int(2.5 * SECOND)
    # What was seen too long ago is not shown with what is said now.
    assert video.recorded(wav(1), 60_000).parts[0].kind == "audio"  # type: ignore[union-attr]
    video.clear()
    assert budget.total == 0


LARGE = JPEG[:-2] + bytes(60_000) + JPEG[-2:]


@pytest.mark.parametrize(
    ("frame", "limits", "kept"),
    [
        (JPEG, {"max_video_seconds": 1.5}, 2),
        (JPEG, {"max_video_seconds": 4.5}, 8),
        (LARGE, {"realtime_video_tokens": 4 * TOKENS}, 8),
        (LARGE, {"max_item_bytes": 18 * len(LARGE)}, 8),
    ],
    ids=["1.5 s", "4.5 s", "tokens", "bytes"],
)
def test_no_video_is_larger_than_the_thinker_takes(frame: bytes, limits: dict[str, Any], kept: int) -> None:
    video = video_of(**limits)
    for at in range(20):
        video.append(frame, at * FRAME_MS)
    assert len(shown(video, 10)) == kept


def test_a_frame_may_have_some_segments_before_its_size() -> None:
    frame = JPEG[:2] + 100 * EMPTY + JPEG[2:]
    video = video_of()
    video.append(frame, 0)
    assert shown(video, 1) == [frame, frame]


def test_half_of_the_largest_file_is_for_the_sound() -> None:
    size = 5 * SECOND
    video = video_of(max_item_bytes=size)
    video.append(JPEG, 0)
    before, after = video.recorded(wav(10), 0).parts
    assert isinstance(before, AudioPart)
    assert isinstance(after, VideoPart)
    assert after.nbytes <= size
    assert recording(before) + read_file(bytes(after.data or b""))[1] == bytes(wav(10))[44:]


def test_the_sound_of_a_video_is_in_memory_twice_and_in_a_request_once(budget: MemoryBudget) -> None:
    sound = bytearray(wav(4))
    video = video_of(budget)
    video.append(JPEG, 0)
    recorded = video.recorded(memoryview(sound), 0)
    (film,) = recorded.parts
    assert isinstance(film, VideoPart)
    video.clear()
    conversation = RealtimeConversation(MediaConfig(max_request_bytes=film.nbytes + 100), budget.of("a"))
    item = sound_item(sound, "seen", recorded)
    conversation.add(item)
    assert conversation.make_room() == []
    assert budget.total == item.weight + len(sound)
    item.forget_media()
    assert budget.total == item.weight < len(sound) + 100


@pytest.mark.parametrize("early", [False, True])
async def test_videos_are_made_off_the_event_loop(web: HttpBench, monkeypatch: Patch, early: bool) -> None:
    """That of 30 s, with large frames, stopped the gateway for 0.1 s."""
    make, makers = InputVideo.recorded, list[threading.Thread]()

    def watched(video: InputVideo, sound: memoryview, begin_ms: int) -> Recorded:
        makers.append(threading.current_thread())
        return make(video, sound, begin_ms)

    monkeypatch.setattr(InputVideo, "recorded", watched)
    async with listening(web, early=True) if early else talking(web) as c:
        await look(c, SEEN[0])
        if early:
            await append(c, spoken(350))
            await web.stages.request(0)
        else:
            await append(c, spoken(0))
            await commit(c)
    await idle(web)
    assert makers
    assert threading.main_thread() not in makers


def test_whatever_is_sent_the_buffer_is_bounded(budget: MemoryBudget) -> None:
    video = video_of(budget, realtime_video_seconds=300)
    large = JPEG[:-2] + bytes(MAX_FRAME_BYTES - len(JPEG)) + JPEG[-2:]
    for at in range(40):
        video.append(large, at * FRAME_MS)
        assert budget.total <= MAX_BYTES
    assert len(shown(video, 20)) == MAX_BYTES // MAX_FRAME_BYTES


def test_a_video_is_of_one_format_and_takes_frames_of_any_size() -> None:
    video, (other,) = video_of(), frames(1, 112, 160)
    video.append(PNG, 0)
    assert shown(video, 1) == [PNG, PNG]
    video.append(JPEG, 500)
    video.append(other, 1000)
    assert shown(video, 1.5) == [JPEG, JPEG, other, other]


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60), at=st.integers(0, 400), form=st.sampled_from(["jpeg", "png"]))
def test_files_that_are_damaged_are_refused_or_held(data: bytes, at: int, form: str) -> None:
    whole = frames(1, form=form)[0]
    damaged = whole[:at] + data + whole[at + len(data) :]
    video = video_of()
    try:
        video.append(damaged, 0)
    except (MediaError, MediaTooLargeError):
        assert not video.sees(0)
    else:
        part = video.recorded(wav(1), 0).parts[0]
        assert isinstance(part, VideoPart)
        assert bytes(part.data or b"").count(damaged) == 2


def test_no_more_is_held_than_there_is_room_for() -> None:
    video = video_of(MemoryBudget(len(JPEG) + 10, lambda: 1))
    video.append(JPEG, 0)
    with pytest.raises(BusyError):
        video.append(JPEG, 500)
    video.clear()
    video.append(JPEG, 500)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=7),
    samples=st.integers(0, 100_000),
    rate=st.sampled_from([1, 2]),
)
def test_files_are_what_ffmpeg_reads(sizes: list[int], samples: int, rate: int) -> None:
    pictures = [bytes([at]) * size for at, size in enumerate(sizes)]
    pcm = VOICE[: 2 * samples]
    data = write_matroska(Film("jpeg", pictures, 320, 240, rate, memoryview(pcm), 24_000))
    seen, heard, times = read_file(data)
    assert (seen, heard) == (pictures, pcm)
    assert times == [at / rate for at in range(len(pictures))]
