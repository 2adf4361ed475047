"""Requests of all kinds to a running stack, one after the other, in a thread."""

import itertools
import threading
from typing import Self

from gateway.client import GatewayClient, SamplingOverrides
from tests.support.media import clip, picture, spoken

STOP_S = 60.0


class Traffic:
    """Asks for speech about a new picture, the same sound and the same video, until it is stopped.

    Args:
        address: The gateway's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        with GatewayClient(self._address) as client:
            for number in itertools.count():
                if self._stopping.is_set():
                    return
                client.chat(
                    "What is this?",
                    images=picture("png", number),
                    audio=spoken(),
                    videos=clip(),
                    seed=number,
                    text_sampling=SamplingOverrides(max_tokens=12),
                    codec_sampling=SamplingOverrides(max_tokens=40),
                ).result()
