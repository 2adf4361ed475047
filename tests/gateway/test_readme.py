"""The examples of clients and of ``omnirelay chat`` run as the README and the pages on clients have them."""

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from omnirelay.cli.main import main
from shared.config import Config
from tests.gateway.bench import run
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway
from tests.support.children import ROOT
from tests.support.media import spoken

PAGES = [ROOT / name for name in ("README.md", "docs/client.md", "docs/cli.md")]
API = [ROOT / f"docs/{name}.md" for name in ("api", "api-chat", "api-speech", "api-realtime")]
FILES = ["question.ogg", "bark.mp3", "cat.jpg", "dog.png", "house.jpg", "other.jpg", "film.mp4"]


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def here(block: str, b: HttpBench) -> str:
    """An example, with this gateway's addresses."""
    return block.replace("tcp://127.0.0.1:5555", b.listen).replace("http://127.0.0.1:8000", b.url.rstrip("/"))


def test_the_examples_run(
    configure: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).write_bytes(name.encode())

    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b:
            b.stages.serve(b.encode("Hello"))
            for page in PAGES:
                for block in examples(page):
                    example = compile(here(block, b), page.name, "exec")
                    await asyncio.to_thread(exec, example, {"__name__": page.stem})
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


async def test_the_examples_of_the_pages_on_http_run(
    configure: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("question.wav").write_bytes(spoken())

    async with http_bench(configure(http_gateway())) as b:
        b.stages.serve(b.encode("Hello"))
        names: dict[str, object] = {}
        # The pages do not close them; when they are collected, and whether in peace, would be chance.
        clients = set()
        for page in API:
            for block in examples(page):
                await asyncio.to_thread(exec, compile(here(block, b), page.name, "exec"), names)
                clients.add(names["client"])
        for client in clients:
            if isinstance(client, openai.OpenAI):
                client.close()
        assert Path("reply.mp3").stat().st_size > 100
        # Samples of the imitated stages.
        assert Path("reply.pcm").stat().st_size == 2 * 360
        assert Path("morning.wav").stat().st_size == 44 + 2 * 360
