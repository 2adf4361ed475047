"""Prepares prompts with media on threads of its own, so that the step loop never waits for a file."""

import hashlib
import logging
import os
import threading
from collections import Counter as CounterOf
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final

from cachetools import LRUCache
from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from vllm.inputs import MultiModalInput

from omnirelay.errors import BusyError, MediaError, PromptTooLongError
from services.thinker.background import Background
from services.thinker.media.decoded import DecodeLimits
from services.thinker.media.decoder import MediaDecoder
from services.thinker.media.rules import MediaRules, PreparedItem
from shared.config import MediaConfig
from shared.messages import MEDIA_KINDS, MediaItem, MediaKind, StageName, ThinkRequest

OUTCOMES: Final = ("decoded", "cached", "failed")
SECONDS_BUCKETS: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_STAGE: Final[StageName] = "thinker"


class MediaMetrics:
    """Counts items and times their preparation; for any number of threads."""

    def __init__(self) -> None:
        items = Counter(
            "omnirelay_media_items_total",
            "Media items by `kind` and `outcome`.",
            ["stage", "kind", "outcome"],
            registry=None,
        )
        decode_seconds = Histogram(
            "omnirelay_media_decode_seconds",
            "Time to decode a file of a `kind`, failures included.",
            ["stage", "kind"],
            registry=None,
            buckets=SECONDS_BUCKETS,
        )
        prepare_seconds = Histogram(
            "omnirelay_media_prepare_seconds",
            "Time from a request with media until its prompt was laid out, waits included.",
            ["stage"],
            registry=None,
            buckets=SECONDS_BUCKETS,
        )
        self._all = items, decode_seconds, prepare_seconds
        # Made at once, so that all are told from the start.
        self.items = {
            (kind, outcome): items.labels(_STAGE, kind, outcome)
            for kind in MEDIA_KINDS
            for outcome in OUTCOMES
        }
        self.decoding = {kind: decode_seconds.labels(_STAGE, kind) for kind in MEDIA_KINDS}
        self.preparing = prepare_seconds.labels(_STAGE)

    def collect(self) -> Iterator[Metric]:
        """All of it, ready to be scraped."""
        for metric in self._all:
            yield from metric.collect()


EARLY_RETRY_MS: Final = 1000
log = logging.getLogger(__name__)


class MediaPreparer(Background[MultiModalInput]):
    """Decodes the files of requests, makes features of them and lays out the prompts.

    One thread and one decoder process for each item that is decoded at a time.
    """

    problem = "the media could not be prepared"

    def __init__(self, rules: MediaRules, config: MediaConfig, max_positions: int) -> None:
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        super().__init__("media", config.decoders, wake_fd, self._start_thread)
        self._rules = rules
        self._max_positions = max_positions
        self.metrics: Final = MediaMetrics()
        self._budget: Final = _ByteBudget(config.max_held_bytes)
        self._cache: LRUCache[str, PreparedItem] = LRUCache(
            config.cache_bytes, getsizeof=lambda item: item.nbytes
        )
        self._limits = _decode_limits(config, rules)
        self._own = threading.local()
        self._decoders: list[MediaDecoder] = []
        if rules.placeholders:
            # The first file should not wait until a process has started; the others start when needed.
            self._threads.submit(self._start_decoder)

    @property
    def held_bytes(self) -> int:
        """Bytes of features held for requests."""
        return self._budget.held_bytes

    def release(self, request_id: str) -> None:
        """Let go of a request, and of what is held for it."""
        super().release(request_id)
        self._budget.release(request_id)

    def close(self) -> None:
        """End all threads and decoders; nothing is taken any more."""
        super().close()
        os.close(self.wake_fd)

    def interrupt(self) -> None:
        """Let nobody wait for room, and end the decoders."""
        self._budget.close()
        with self._lock:
            decoders = list(self._decoders)
        for decoder in decoders:
            decoder.close()

    def work(self, request: ThinkRequest) -> MultiModalInput:
        """The engine's input for a request."""
        try:
            return self._lay_out(request)
        finally:
            if (waiting := self._waiting.get(request.request_id)) is not None:
                self.metrics.preparing.observe(perf_counter() - waiting[1])

    def _start_thread(self) -> None:
        self._own.decoder = MediaDecoder(self._limits)
        with self._lock:
            self._decoders.append(self._own.decoder)

    def _start_decoder(self) -> None:
        try:
            self._own.decoder.start()
        except (BusyError, MediaError) as error:
            log.warning("%s; it is tried again with the first file", error)

    def _lay_out(self, request: ThinkRequest) -> MultiModalInput:
        if request.early is None:
            self._budget.wait_for_room(lambda: self.require_wanted(request))
        numbers: CounterOf[MediaKind] = CounterOf()
        items: list[PreparedItem] = []
        length = len(request.prompt_token_ids) - len(request.media)
        for index, item in enumerate(request.media, 1):
            self.require_wanted(request)
            numbers[item.kind] += 1
            with_audio = request.use_audio_in_video and item.kind == "video"
            partial = request.early == "recording" and index == len(request.media)
            name, salt = f"{item.kind} {numbers[item.kind]}", request.cache_salt or ""
            prepared = self._item(item, name, with_audio, salt, keep=not partial)
            if partial:
                prepared = self._rules.settled(prepared)
            if request.early is not None:
                # It takes neither a thread nor memory from the requests that wait for room.
                self._budget.require_half(prepared.nbytes)
            self._budget.charge(request.request_id, prepared.nbytes)
            items.append(prepared)
            length += prepared.tokens
            if length >= self._max_positions:
                raise PromptTooLongError(
                    f"the prompt has {length} tokens up to {item.kind} {numbers[item.kind]}, "
                    f"the thinker takes at most {self._max_positions - 1}"
                )
        return self._rules.lay_out(request.prompt_token_ids, items)

    def _item(self, item: MediaItem, name: str, with_audio: bool, salt: str, keep: bool) -> PreparedItem:
        hasher = hashlib.sha256(item.data.view)
        hasher.update(f"{item.kind} {with_audio} {salt}".encode())
        digest = hasher.hexdigest()
        with self._lock:
            prepared = self._cache.get(digest)
        if prepared is not None:
            self.metrics.items[item.kind, "cached"].inc()
            return prepared
        with self.metrics.items[item.kind, "failed"].count_exceptions():
            with self.metrics.decoding[item.kind].time():
                decoded = self._own.decoder.decode(
                    item.kind, item.data.view, name=name, with_audio=with_audio
                )
            prepared = self._rules.prepare(digest, decoded, name)
        self.metrics.items[item.kind, "decoded"].inc()
        if keep and prepared.nbytes <= self._cache.maxsize:
            with self._lock:
                self._cache[digest] = prepared
        return prepared


class _ByteBudget:
    """Counts the bytes that requests hold; new work waits while they are too many."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._held: dict[str, int] = {}
        self._closed = False

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def require_half(self, size: int) -> None:
        """Raise BusyError if half of what may be held would be exceeded."""
        with self._changed:
            if 2 * (self.held_bytes + size) > self._max_bytes:
                raise BusyError("too much memory is held to compute a prompt early", EARLY_RETRY_MS)

    def charge(self, request_id: str, size: int) -> None:
        with self._changed:
            self._held[request_id] = self._held.get(request_id, 0) + size

    def release(self, request_id: str) -> None:
        with self._changed:
            self._held.pop(request_id, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_room(self, still_wanted: Callable[[], None]) -> None:
        """Wait until less is held than may be; the callback raises when waiting is pointless."""
        with self._changed:
            while not self._closed and self.held_bytes >= self._max_bytes:
                still_wanted()
                self._changed.wait()
        still_wanted()


def _decode_limits(config: MediaConfig, rules: MediaRules) -> DecodeLimits:
    """What may be decoded: the operator's limits, and what the checkpoint can take."""
    sampling = rules.sampling
    return DecodeLimits(
        max_audio_seconds=min(config.max_audio_seconds, rules.longest_audio_s),
        min_image_side=config.min_image_side,
        max_image_pixels=config.max_image_pixels,
        max_video_seconds=config.max_video_seconds,
        max_video_frames=min(config.max_video_frames, sampling.max_frames),
        max_decoded_bytes=config.max_decoded_bytes,
        timeout_s=config.decode_timeout_s,
        sampling_rate=rules.sampling_rate,
        frames_per_second=sampling.frames_per_second,
        min_frames=sampling.min_frames,
        temporal_patch_size=sampling.temporal_patch_size,
    )
