"""Preparing media beside the step loop: order, limits, letting go, and failures of one request alone."""

import itertools
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import psutil
import pytest
from vllm.inputs import MultiModalInput

from omnirelay.errors import InvalidRequestError, MediaError, RepeatedMessageError, StageFailedError
from services.families.qwen_media.media import FeatureExtractor
from services.thinker.background import Background
from services.thinker.media.decoder import MediaDecoder
from services.thinker.media.preparer import MediaPreparer
from shared.config import MediaConfig
from shared.messages import MediaItem, ThinkRequest
from shared.messages.payloads import Blob
from tests.support.conversations import Conversation, Item, Processor, asks
from tests.support.media import picture, spoken
from tests.support.thinking import PREPARED_S, ThinkerRig, request_about, thinker_request

_seeds = itertools.count(1000)


def new_picture() -> Conversation:
    """A question about a picture that no cache knows."""
    return asks(Item("image", picture("png", next(_seeds))), "What is this?")


def request_of(name: str, conversation: Conversation, processor: Processor, **options: Any) -> ThinkRequest:
    return request_about(name, conversation, processor, speech=None, max_tokens=2, **options)


@contextmanager
def preparer_of(rig: ThinkerRig, **limits: Any) -> Iterator[MediaPreparer]:
    """A preparer of its own, with the rig's engine to make features."""
    config = MediaConfig(**limits)
    rules = FeatureExtractor(rig.engine)
    preparer = MediaPreparer(rules, config, rig.service.limits.max_positions)
    try:
        yield preparer
    finally:
        preparer.close()


def wait_for(preparer: MediaPreparer, seconds: float = PREPARED_S) -> dict[str, MultiModalInput]:
    """The next prompts, by request; none after so many seconds."""
    readable, _, _ = select.select([preparer.wake_fd], [], [], seconds)
    if readable:
        os.eventfd_read(preparer.wake_fd)
    return {request.request_id: prepared.result() for request, prepared in preparer.take()}


@contextmanager
def held_decoder() -> Iterator[threading.Event]:
    """Decoding waits until the event is set; that it has begun is told by ``event.begun``."""
    go, begun = threading.Event(), threading.Event()
    decode = MediaDecoder.decode

    def wait(self: MediaDecoder, *args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go.wait(PREPARED_S)
        return decode(self, *args, **kwargs)

    go.begun = begun  # type: ignore[attr-defined]
    with mock.patch.object(MediaDecoder, "decode", wait):
        try:
            yield go
        finally:
            go.set()


def test_text_goes_on_while_media_are_prepared(thinker: ThinkerRig, processor: Processor) -> None:
    with held_decoder() as go:
        thinker.service.accept(request_of("picture", new_picture(), processor))
        assert thinker.service.active_requests() == ["picture"]
        assert thinker.service.load().waiting == 1
        assert not thinker.service.ready
        thinker.service.accept(thinker_request("text", [5, 6, 7], max_tokens=9))
        while "text" not in thinker.finished:
            assert thinker.step() == {}
        assert thinker.service.active_requests() == ["picture"]
        go.set()
        thinker.run()
    assert thinker.finished == ["text", "picture"]


def test_a_request_that_is_prepared_counts_as_in_work(thinker: ThinkerRig, processor: Processor) -> None:
    with held_decoder():
        thinker.service.accept(request_of("a", new_picture(), processor))
        assert thinker.service.holds("a")
        with pytest.raises(RepeatedMessageError):
            thinker.service.accept(request_of("a", new_picture(), processor))
        with pytest.raises(RepeatedMessageError):
            thinker.service.accept(thinker_request("a", [5, 6, 7]))
        thinker.service.abort("a")
    assert not thinker.service.holds("a")


@pytest.mark.parametrize("when", ["before it is decoded", "while it is decoded", "when it is ready"])
def test_an_aborted_request_leaves_nothing(thinker: ThinkerRig, processor: Processor, when: str) -> None:
    service = thinker.service
    with held_decoder() as go:
        for name in ("x", "y", "a") if when == "before it is decoded" else ("a",):
            service.accept(request_of(name, new_picture(), processor))
        assert go.begun.wait(PREPARED_S)  # type: ignore[attr-defined]
        if when == "when it is ready":
            go.set()
            thinker.wait()
        service.abort("a")
    thinker.run()
    service.accept(request_of("after", new_picture(), processor))
    thinker.run()
    assert "a" not in thinker.finished
    assert service.load().held_bytes == 0


def test_errors_name_the_item_among_its_kind(thinker: ThinkerRig, processor: Processor) -> None:
    good, bad = Item("image", picture("png", 31)), Item("image", b"no picture at all")
    error = thinker.failure(
        request_of("a", asks(Item("audio", spoken("wav")), good, "and", bad, good), processor)
    )
    assert isinstance(error, MediaError)
    assert str(error).startswith("image 2: ")
    assert thinker.service.active_requests() == []
    error = thinker.failure(request_of("b", asks(good, Item("audio", b"ID3 nothing")), processor))
    assert str(error).startswith("audio 1: ")
    thinker.run(request_of("c", asks(good, "Well?"), processor))
    assert thinker.finished == ["c"]


def test_refused_requests_leave_nothing_however_many(thinker: ThinkerRig, processor: Processor) -> None:
    """Neither prepared media, nor blocks, nor an entry of the engine's encoder cache."""
    good, bad = Item("image", picture("png", 31)), Item("image", b"no picture at all")
    cache = thinker.scheduler.encoder_cache_manager
    thinker.run(request_of("before", asks(good, "Well?"), processor))
    before = (cache.num_freeable_slots, len(cache.cached), len(thinker.scheduler.requests))
    for number in range(12):
        thinker.service.accept(request_of(f"bad{number}", asks(good, bad, "Well?"), processor))
        failed: set[str] = set()
        while f"bad{number}" not in failed:
            thinker.wait()
            failed |= thinker.step().keys()
        thinker.service.abort(f"bad{number}")
        places = processor.prompt(asks(good, Item("audio", b"")))
        with pytest.raises(InvalidRequestError):
            thinker.service.accept(thinker_request(f"odd{number}", places, media=asks(good).media))
    assert thinker.service.load().held_bytes == 0
    assert thinker.service.active_requests() == []
    assert thinker.steps.free_blocks == thinker.steps.blocks
    assert (cache.num_freeable_slots, len(cache.cached), len(thinker.scheduler.requests)) == before
    thinker.run(request_of("after", asks(good, "Well?"), processor))


def test_what_nobody_expected_fails_that_request_alone(thinker: ThinkerRig, processor: Processor) -> None:
    with mock.patch.object(MediaDecoder, "decode", side_effect=ZeroDivisionError("odd")):
        error = thinker.failure(request_of("a", new_picture(), processor))
    assert isinstance(error, StageFailedError)
    assert "odd" in str(error)
    thinker.run(request_of("b", new_picture(), processor))


def test_a_prompt_that_gets_too_long_stops_the_work(thinker: ThinkerRig, processor: Processor) -> None:
    # Each picture is 99 tokens, and the thinker takes 2,303.
    many = asks(*(Item("image", picture("png", seed)) for seed in range(2000, 2030)), "Which is best?")
    decode = MediaDecoder.decode
    with mock.patch.object(MediaDecoder, "decode", autospec=True, side_effect=decode) as calls:
        error = thinker.failure(request_of("a", many, processor))
    assert error.code == "prompt_too_long"
    assert "image 23" in str(error)
    assert calls.call_count == 23


@pytest.mark.parametrize(("cache", "times"), [({}, 1), ({"cache_bytes": 0}, 3)], ids=["cache", "none"])
def test_a_file_is_decoded_once_where_there_is_a_cache(
    thinker: ThinkerRig, processor: Processor, cache: dict[str, int], times: int
) -> None:
    decode = MediaDecoder.decode
    with (
        preparer_of(thinker, **cache) as preparer,
        mock.patch.object(MediaDecoder, "decode", autospec=True, side_effect=decode) as calls,
    ):
        same = new_picture()
        digests = set()
        for name in "abc":
            preparer.submit(request_of(name, same, processor))
            digests |= set(wait_for(preparer)[name]["mm_hashes"]["image"])
        assert (calls.call_count, len(digests)) == (times, 1)


def test_the_cache_keeps_no_more_than_it_may(thinker: ThinkerRig, processor: Processor) -> None:
    with preparer_of(thinker, cache_bytes=3 * 2**20) as preparer:
        for seed in range(80, 86):
            preparer.submit(request_of(f"r{seed}", asks(Item("image", picture("png", seed))), processor))
            wait_for(preparer)
            assert preparer._cache.currsize <= 3 * 2**20
        assert preparer._cache.currsize > 0


def test_requests_wait_while_too_much_is_held_and_may_be_released(
    thinker: ThinkerRig, processor: Processor
) -> None:
    with preparer_of(thinker, max_held_bytes=1, decoders=1) as preparer:
        for name in "abc":
            preparer.submit(request_of(name, new_picture(), processor))
        assert list(wait_for(preparer)) == ["a"]
        assert preparer.held_bytes > 0
        assert wait_for(preparer, seconds=0.2) == {}
        preparer.release("b")
        preparer.release("a")
        assert list(wait_for(preparer)) == ["c"]
        preparer.release("c")
        assert preparer.held_bytes == 0


@pytest.mark.parametrize("busy", [True, False])
def test_closing_ends_threads_and_processes(thinker: ThinkerRig, processor: Processor, busy: bool) -> None:
    before = set(psutil.Process().children(recursive=True))
    with preparer_of(thinker) as preparer:
        preparer.submit(request_of("a", new_picture(), processor))
        if not busy:
            wait_for(preparer)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not [thread for thread in preparer._threads._threads if thread.is_alive()]


def test_a_checkpoints_window_bounds_the_sound(thinker: ThinkerRig, tiny_checkpoint: Path) -> None:
    assert tiny_checkpoint.is_dir()
    with preparer_of(thinker, max_audio_seconds=1000.0) as preparer:
        assert preparer._limits.max_audio_seconds == 60
    with preparer_of(thinker, max_audio_seconds=2.0) as preparer:
        assert preparer._limits.max_audio_seconds == 2


class Held(Background[None]):
    """Does nothing, but one after the other, once it may go on."""

    problem = "unexpected"

    def __init__(self, wake_fd: int) -> None:
        super().__init__("held", 1, wake_fd)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.order: list[str] = []

    def interrupt(self) -> None:
        self.go_on.set()

    def work(self, request: ThinkRequest) -> None:
        self.begun.set()
        assert self.go_on.wait(PREPARED_S)
        self.order.append(request.request_id)


def test_clients_take_turns() -> None:
    wake_fd = os.eventfd(0)
    work = Held(wake_fd)
    try:
        for client, count in (("a", 4), ("b", 2), ("c", 1)):
            for number in range(count):
                request = thinker_request(f"{client}{number}", [1])
                work.submit(msgspec.structs.replace(request, cache_salt=client))
                assert work.begun.wait(PREPARED_S)
        work.go_on.set()
        while len(work.order) < 7:
            assert os.eventfd_read(wake_fd)
        assert work.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]
        assert len(work.take()) == 7
    finally:
        work.close()
        os.close(wake_fd)


def test_the_files_of_a_released_request_are_freed_before_its_turn() -> None:
    wake_fd, file = os.eventfd(0), bytearray(8)
    work = Held(wake_fd)
    try:
        work.submit(thinker_request("first", [1]))
        assert work.begun.wait(PREPARED_S)
        item = MediaItem(kind="image", data=Blob(file))
        work.submit(msgspec.structs.replace(thinker_request("second", [1]), media=[item]))
        work.release("second")
        del item
        # Refused while anybody has a view of it.
        file.clear()
        work.go_on.set()
        assert os.eventfd_read(wake_fd)
        assert [request.request_id for request, _ in work.take()] == ["first"]
    finally:
        work.close()
        os.close(wake_fd)
