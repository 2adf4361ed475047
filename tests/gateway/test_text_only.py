"""A stack of gateway and thinker alone."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnirelay import Client
from omnirelay.cli.main import main
from omnirelay.cli.status import describe
from omnirelay.errors import InvalidRequestError
from ops.doctor import machine, network
from shared.config import Config
from tests.gateway.bench import Configure
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import MODEL, http_bench, http_gateway
from tests.support.processes import wait_until

SPEECH = {"model": MODEL, "input": "Hi", "voice": "Chelsie"}
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie"}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


async def test_a_gateway_of_text_needs_the_thinker_alone(configure: Configure) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=["thinker"]) as b, b.client() as client:
        await until(lambda: b.process.status().ready)
        ready = await b.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            200,
            {"status": "ok", "reasons": [], "text_only": True},
        )
        report = b.process.status()
        assert [stage.name for stage in report.stages] == ["thinker"]
        assert f"model: {report.gateway.model}, text only\n" in describe(report)
        told = (await b.http.get("/metrics")).text
        assert 'omnirelay_stage_up{stage="thinker"} 1.0' in told
        assert 'omnirelay_stage_up{stage="talker"}' not in told

        with pytest.raises(InvalidRequestError, match="text-only"):
            await client.chat("Hi").result()
        for path, body in (
            ("/v1/audio/speech", SPEECH),
            (
                "/v1/chat/completions",
                CHAT | SPOKEN,
            ),
        ):
            refused = await b.http.post(path, json=body)
            assert refused.status_code == 400
            assert "is text-only" in refused.json()["error"]["message"]
        asked = asyncio.create_task(b.http.post("/v1/chat/completions", json=CHAT))
        await b.stages.answer(await b.stages.request(0), b.encode("Hello"))
        assert (await asked).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_thinker_that_is_missing_is_still_told(configure: Configure) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=[]) as b:
        ready = await b.http.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["the thinker is starting"])
        assert not b.process.status().ready


def test_up_starts_the_thinker_alone(place: Path) -> None:
    log = place / "up.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "omnirelay.cli", "up", "--text-only"], stdout=file, stderr=file
        )
    try:
        wait_until(lambda: "ready: tcp://" in log.read_text() or process.poll() is not None, "ready", 60)
        assert ", text only)" in log.read_text()
        assert "[talker]" not in log.read_text()
        with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
            assert [stage.name for stage in client.status().stages] == ["thinker"]
            assert client.chat("Hi", speech=False).result().done.finish_reason == "stop"
            with pytest.raises(InvalidRequestError, match="text-only"):
                client.chat("Hi").result()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


async def test_chat_says_why_there_is_no_speech(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=["thinker"]) as b:
        await until(lambda: b.process.status().ready)
        assert await asyncio.to_thread(main, ["chat", "Hi", "--gateway", b.listen]) == 1
    assert "this gateway is text-only" in capsys.readouterr().err


def test_the_doctor_looks_at_what_there_is_to_be() -> None:
    taken = {"talker": {"inbox": "tcp://127.0.0.1:5555"}}
    both = Config.model_validate({"stages": taken})
    alone = Config.model_validate({"stages": taken, "text_only": True})
    assert [each.level for each in network.check_addresses(both)] == ["problem"]
    assert [each.level for each in network.check_addresses(alone)] == ["ok"]
    readings = machine.read_machine()
    told = "; ".join(each.what for each in machine.check_cpus(alone, readings, on_cpu=True))
    assert "thinker" in told
    assert "talker" not in told
