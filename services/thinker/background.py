"""Work for requests beside the step loop, on threads of its own."""

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Final, Generic, TypeVar

from omnirelay.errors import CancelledRequestError, RequestError, StageFailedError
from shared.log import of_request
from shared.messages import ThinkRequest

T = TypeVar("T")
log = logging.getLogger(__name__)


class Background(ABC, Generic[T]):
    """Does something for each request, so that the step loop never waits for it; clients take turns.

    Args:
        name: Of the threads.
        threads: How many.
        wake_fd: An eventfd that is written to when there is something to :meth:`take`.
        begin: What each thread begins with.
    """

    problem: str
    """What is told of a request for which something unexpected happened, as a ``failure``."""
    failure: type[RequestError] = StageFailedError

    def __init__(
        self, name: str, threads: int, wake_fd: int, begin: Callable[[], None] = lambda: None
    ) -> None:
        self.wake_fd: Final = wake_fd
        self._threads = ThreadPoolExecutor(threads, name, begin)
        self._lock = threading.Lock()
        self._closed = False
        # By name, with since when.  Nothing else has a request before its turn, so one that is released frees
        # its files at once.
        self._waiting: dict[str, tuple[ThinkRequest, float]] = {}
        # Names by client, as far as it is known: whoever has a cache of its own.
        self._queues: OrderedDict[str | None, deque[str]] = OrderedDict()
        self._outcomes: deque[tuple[ThinkRequest, Future[T]]] = deque()

    @property
    def has_outcomes(self) -> bool:
        """There is something to take."""
        return bool(self._outcomes)

    @property
    def waiting(self) -> list[str]:
        """The requests whose outcomes were not taken."""
        return list(self._waiting)

    def submit(self, request: ThinkRequest) -> None:
        """Begin with a request; its outcome will be there to take, unless it is released before."""
        self._waiting[request.request_id] = request, perf_counter()
        with self._lock:
            self._queues.setdefault(request.cache_salt, deque()).append(request.request_id)
        self._threads.submit(self._work_on_next)

    def take(self) -> list[tuple[ThinkRequest, Future[T]]]:
        """Whatever has been finished since the last call, of requests that were not released."""
        with self._lock:
            taken, self._outcomes = self._outcomes, deque()
            return [each for each in taken if self._waiting.pop(each[0].request_id, None) is not None]

    def release(self, request_id: str) -> None:
        """Let go of a request, whether its outcome was taken or not."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def require_wanted(self, request: ThinkRequest) -> None:
        """Stop the work for a request that was released."""
        if request.request_id not in self._waiting:
            raise CancelledRequestError("the request was released")

    def close(self) -> None:
        """End the threads; nothing is taken any more."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.interrupt()
        self._threads.shutdown(wait=True)

    @abstractmethod
    def interrupt(self) -> None:
        """End at once whatever the threads wait for; no other work begins."""

    @abstractmethod
    def work(self, request: ThinkRequest) -> T:
        """Do it, on a thread; raises RequestError if it cannot be done."""

    def _work_on_next(self) -> None:
        with self._lock:
            client, queue = self._queues.popitem(last=False)
            request, _ = self._waiting.get(queue.popleft(), (None, 0.0))
            if queue:
                self._queues[client] = queue
        if request is None:
            return
        outcome: Future[T] = Future()
        try:
            outcome.set_result(self._guarded(request))
        except RequestError as error:
            outcome.set_exception(error)
        self._end(request, outcome)

    def _guarded(self, request: ThinkRequest) -> T:
        try:
            return self.work(request)
        except RequestError:
            raise
        except Exception as error:
            # As from a C library; without an outcome the request would wait for its deadline.
            about = of_request(request.request_id)
            log.exception("request %s: %s", request.request_id, self.problem, extra=about)
            raise self.failure(f"{self.problem}: {error!r}") from error

    def _end(self, request: ThinkRequest, outcome: Future[T]) -> None:
        """Keep the outcome; whatever happens, there is one."""
        with self._lock:
            wanted = request.request_id in self._waiting
            if wanted and not self._closed:
                self._outcomes.append((request, outcome))
                os.eventfd_write(self.wake_fd, 1)
        if not wanted:
            # What the work has kept for it since it was released.
            self.release(request.request_id)
