"""Clients that ask one request after the other, while a stack is changed."""

import threading
import time
from collections.abc import Sequence
from typing import Final

from omnirelay import Client
from tests.chaos.streams import Heard, Stream
from tests.support.processes import wait_until
from tests.support.traffic import Clients

ANSWERS_S: Final = 240.0


class Load(Clients):
    """Each client asks its own request again and again.

    Args:
        addresses: Of each client, the gateways that it knows.
        undisturbed: What each should hear.

    Attributes:
        wrong: The clients that heard something else, and what differs.
        answers: How many answers each client has had.
    """

    stop_s = ANSWERS_S

    def __init__(self, addresses: Sequence[Sequence[str]], undisturbed: Sequence[Heard]) -> None:
        self.wrong: list[tuple[int, list[str]]] = []
        self.answers = [0] * len(addresses)
        self._undisturbed = undisturbed
        super().__init__(
            threading.Thread(target=self._run, args=(number, list(known)))
            for number, known in enumerate(addresses)
        )

    def wait_for_more(self) -> None:
        """Wait until each client has had an answer that it asked for since."""
        before = list(self.answers)
        wait_until(
            lambda: all(now > then + 1 for now, then in zip(self.answers, before, strict=True)),
            "more answers",
            ANSWERS_S,
        )

    def _run(self, number: int, addresses: list[str]) -> None:
        with Client(addresses) as client:
            while not self._stopping.is_set():
                heard = Stream(client, number).result(time.monotonic() + ANSWERS_S)
                if wrong := heard.differences(self._undisturbed[number]):
                    self.wrong.append((number, wrong))
                self.answers[number] += 1
