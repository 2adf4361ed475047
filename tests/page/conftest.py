"""What the page's tests share: the stack, and what the browser is given."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.page.browser import program
from tests.support.media import spoken
from tests.support.stack import PATIENT, RunningStack, make_config

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def url(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running stack's page."""
    assert program(), "Chromium is not installed: apt-get install chromium"
    config = make_config(tiny_checkpoint, gateway=PATIENT)
    with RunningStack(config, tmp_path_factory.mktemp("stack")):
        yield config["gateway"]["http"].replace("tcp:", "http:")


@pytest.fixture(scope="session")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the microphone hears."""
    path = tmp_path_factory.mktemp("microphone") / "speech.wav"
    path.write_bytes(spoken("wav", rate=48_000))
    return path


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture to drop."""
    path = tmp_path_factory.mktemp("picture") / "house.png"
    # Of this size the tiny checkpoint has more to say about it.
    Image.open(HERE.parents[1] / "ops" / "assets" / "picture.png").resize((224, 168)).save(path)
    return path
