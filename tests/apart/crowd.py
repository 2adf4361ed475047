"""Eight streams at once, and how their answers compare with those of a stack on one host."""

import time
from types import TracebackType
from typing import Final, Self

import numpy as np

from tests.apart.stack import ApartStack
from tests.chaos.streams import Heard, Stream, check_heard, request_for
from tests.support.processes import wait_until
from tests.support.restarting import STREAMS

ANSWERS_S: Final = 120.0
"""Most that the answers of a scenario may take."""


class Crowd:
    """Clients that ask at once, and listen from then on.

    Args:
        stack: Whom they ask.
        undisturbed: What they should hear.
    """

    def __init__(self, stack: ApartStack, undisturbed: list[Heard]) -> None:
        self._stack = stack
        self._undisturbed = undisturbed
        self._client = stack.client()

    def __enter__(self) -> Self:
        client = self._client.__enter__()
        self._before = self._stack.resumes()
        self._began = time.monotonic()
        self._streams = [Stream(client, number) for number in range(STREAMS)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def await_streams(self) -> None:
        """Wait until every client that hears its answer as it comes has heard of it, text and speech."""
        streams = [each for each in self._streams if request_for(each.number).streaming]
        wait_until(lambda: all(each.heard.first_audio for each in streams), "all stream", ANSWERS_S)
        assert not any(each.heard.ended for each in streams), "an answer was too short for this test"

    def check(self, resumed: bool | None = None) -> None:
        """Wait for all answers, compare them, and say how long they took; and whether some were resumed."""
        check_heard(self._streams, self._undisturbed)
        if resumed is not None:
            assert bool(self.resumed()) == resumed, self.resumed()
        answers = [stream.heard for stream in self._streams]
        ttfa = [
            heard.first_audio - self._began
            for number, heard in enumerate(answers)
            if heard.first_audio and request_for(number).streaming
        ]
        ended = max(heard.at[-1] for heard in answers) - self._began
        apart = max(
            float(np.abs(mine - other).max())
            for heard, all_others in zip(answers, self._undisturbed, strict=True)
            for mine, other in zip(heard.chunks, all_others.chunks, strict=True)
        )
        print(
            f"\n[apart] first audio after {np.median(ttfa):.2f} s, at most {max(ttfa):.2f} s; all after "
            f"{ended:.1f} s; resumed {self.resumed()}; samples differ by at most {apart:.1e}"
        )

    def resumed(self) -> dict[tuple[str, str], int]:
        """How often requests were begun anew since they were asked for, by stage and reason."""
        return {
            key: round(count - self._before[key])
            for key, count in self._stack.resumes().items()
            if count > self._before[key]
        }
