"""The README's examples of the client and of ``omnirelay chat`` run as they stand there."""

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cli.main import main
from shared.config import Config
from tests.gateway.bench import bench, run

README = Path(__file__).resolve().parents[2] / "README.md"
FILES = ["question.ogg", "bark.mp3", "cat.jpg", "dog.png", "house.jpg", "other.jpg", "film.mp4"]


def test_the_examples_run(
    configure: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).write_bytes(name.encode())

    async def scenario() -> None:
        async with bench(configure()) as b:
            b.stages.serve(b.encode("Hello"))
            for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
                example = compile(block.replace("tcp://127.0.0.1:5555", b.listen), "README.md", "exec")
                await asyncio.to_thread(exec, example, {"__name__": "README"})
            lines = re.findall(
                r"^    omnirelay (chat .*--(?:audio|image|video) [^\]\n]*)$", text, re.MULTILINE
            )
            for line in lines:
                assert await asyncio.to_thread(main, [*shlex.split(line), "--gateway", b.listen]) == 0
            sent = [tuple(item.kind for item in request.media) for request in b.stages.requests]
            assert len(lines) == 4
            assert sent[-4:] == [("audio",), ("image",), ("video",), ("audio", "image", "image")]
            assert {"audio", "image", "video"} <= {kind for kinds in sent[:-4] for kind in kinds}

    run(scenario())
