"""What the page's tests share: the page before imitated stages, and what the browser is given."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.gateway.bench import make_config
from tests.gateway.checkpoint_dir import make_checkpoint_dir
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway
from tests.gateway.test_turns import SENTENCES, said
from tests.page.browser import READY, TEXT_ONLY, Before, Page, browser
from tests.support.children import ROOT
from tests.support.media import spoken

SILENCE_S = 6

Answers = Callable[[HttpBench], AbstractAsyncContextManager[object]]


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint_dir(tmp_path_factory.mktemp("page") / "checkpoint")


@pytest.fixture(scope="session")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the microphone hears."""
    path = tmp_path_factory.mktemp("microphone") / "speech.wav"
    path.write_bytes(spoken("wav", rate=48_000))
    return path


@pytest.fixture(scope="session")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What it hears in a conversation: a sentence, and the same again after a silence."""
    path = tmp_path_factory.mktemp("microphone") / "sentence.wav"
    words = np.repeat(np.frombuffer(said(SENTENCES[0]), "<i2"), 2)
    soundfile.write(path, np.pad(words, (24_000, 48_000 * SILENCE_S)), 48_000)
    return path


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture to drop."""
    path = tmp_path_factory.mktemp("picture") / "house.png"
    Image.open(ROOT / "ops" / "assets" / "picture.png").resize((224, 168)).save(path)
    return path


@pytest.fixture
def before(tmp_path: Path, checkpoint_dir: Path, microphone: Path) -> Before:
    """Opens the page before imitated stages; at its end nothing must have gone wrong."""

    @asynccontextmanager
    async def opened(
        heard: Path = microphone,
        gateway: dict[str, Any] | None = None,
        answers: Answers = nullcontext,
        ready: bool = True,
        wide: bool = True,
        written: bool = False,
        **config: Any,
    ) -> AsyncIterator[tuple[HttpBench, Page]]:
        made = make_config(checkpoint_dir, http_gateway(**(gateway or {})), **config)
        async with http_bench(made) as b, answers(b), browser(tmp_path, heard) as page:
            if wide:
                await page.resize(1200, 800)
            await page.open(b.url, READY if ready else "true")
            if written:
                await page.js(TEXT_ONLY)
            yield b, page
            assert page.problems == []
            assert [each for each in page.requests if not each.startswith((b.url, "blob:", "data:"))] == []

    return opened
