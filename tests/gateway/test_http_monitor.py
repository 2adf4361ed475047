"""What operators and browsers see of the gateway over HTTP; and a stack of gateway and thinker alone."""

import asyncio
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric
from pydantic import ValidationError

from gateway.dispatch.registry import StageRegistry
from gateway.requests import history
from gateway.requests.history import RequestHistory, RequestReport
from gateway.requests.lifecycle import Lifecycle, RequestState, StateCounts
from gateway.requests.metrics import GatewayMetrics, RequestMeter
from omnirelay import Client
from omnirelay.cli.status import describe
from omnirelay.errors import ConfigError, InvalidRequestError, PoisonRequestError, StageUnavailableError
from omnirelay.version import version
from ops.doctor import machine, network
from shared.checkpoints import served_name
from shared.config import DEFAULT_CHECKPOINT, Config, load_config
from shared.families import QWEN2_5_OMNI
from shared.messages import SAMPLE_RATE, AudioChunk
from shared.messages.payloads import Blob
from tests.gateway.bench import CHAT, Configure, Patch, fails
from tests.gateway.fake_stages import SPEAKERS, until
from tests.gateway.http_bench import HI, MODEL, HttpBench, cut, http_bench, http_gateway, melody, speaking
from tests.gateway.test_processes import end, read_until, start
from tests.support.http import PROMETHEUS, Answer
from tests.support.ports import free_ports

CHUNKS = cut(melody(0.5), [5760])
SPOKEN = {"modalities": ["text", "audio"]}
BODY = {"model": MODEL, "messages": HI}


async def test_health_before_and_after_the_stages(configure: Configure) -> None:
    async with http_bench(configure(http_gateway()), ready=False, alive=["thinker"]) as b:
        await until(lambda: b.process.gateway.registry.state("thinker") == "ready")
        assert (await b.http.get("/livez")).json() == {"status": "ok"}
        ready = await b.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reasons"] == ["the talker is starting", "the token2wav is starting"]
        b.stages.alive |= {"talker", "token2wav"}
        await until(lambda: b.process.status().ready)
        assert (await b.http.get("/readyz")).json() == {"status": "ok", "reasons": []}
        health = (await b.http.get("/health")).json()
        assert (health["status"], health["model"]) == ("ok", MODEL)
        assert [stage["name"] for stage in health["stages"]] == ["thinker", "talker", "token2wav"]
        assert health["stages"][0]["load"]["running"] == 1
        assert (await b.http.get("/version")).json() == {"version": version()}
        assert health["version"] == b.process.status().gateway.version == version()
        assert f"version {version()}, up for" in describe(b.process.status())
        told = f'omnirelay_build_info{{stage="gateway",version="{version()}"}} 1.0'
        assert told in (await b.http.get("/metrics")).text
        assert (await b.http.head("/livez")).status_code == 200


async def test_the_served_model(web: HttpBench) -> None:
    [card] = (await web.http.get("/v1/models")).json()["data"]
    assert abs(card.pop("created") - time.time()) < 60
    media = web.config.media
    assert card.pop("limits") == {
        "images": media.max_images,
        "audios": media.max_audios,
        "videos": media.max_videos,
        "item_bytes": media.max_item_bytes,
        "request_bytes": media.max_request_bytes,
    }
    assert card == {
        "id": MODEL,
        "object": "model",
        "owned_by": "omnirelay",
        "max_model_len": 512,
        "voices": SPEAKERS,
        "voice_aliases": QWEN2_5_OMNI.voice_aliases,
        "starters": [],
        "random_weights": False,
        "calls": False,
    }
    assert (await web.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await web.http.get("/v1/models/omnirelay")).json()["id"] == MODEL


async def test_a_checkpoint_brings_questions_for_the_page(configure: Configure, tmp_path: Path) -> None:
    config = configure(http_gateway())
    model = tmp_path / MODEL
    shutil.copytree(str(config.model), model)
    (model / "starters.json").write_text('[{"text": "Hello"}, {"audio": "question.wav"}]')
    (model / "question.wav").write_bytes(b"RIFF")
    (model / "checkpoint_recipe.json").write_text('{"seed": 0}')

    async with http_bench(config.model_copy(update={"model": str(model)})) as b:
        [card] = (await b.http.get("/v1/models")).json()["data"]
        assert card["starters"] == ["Hello"]
        assert card["random_weights"] is True


def test_names_of_models(configure: Configure) -> None:
    assert served_name(configure()) == MODEL
    assert served_name(load_config(environment={})) == DEFAULT_CHECKPOINT.name
    released = "Qwen/Qwen2.5-Omni-7B"
    assert served_name(load_config(environment={"OMNI_MODEL": released})) == released


async def test_what_became_of_requests(configure: Configure) -> None:
    async def report(b: HttpBench, name: str) -> dict[str, Any]:
        answer = await b.http.get(f"/v1/requests/{name}")
        assert "secret" not in answer.text
        return dict(answer.json())

    secret = {"messages": [{"role": "user", "content": "a secret"}], **SPOKEN}
    async with http_bench(configure(http_gateway(), max_active=1)) as b:
        answers = [asyncio.create_task(b.post(**secret)) for _ in range(2)]
        name = (await b.stages.request(0)).request_id
        await b.stages.text(name, 0, b.encode("a secret"), "stop")
        await until(lambda: b.counts["talking"])
        talking = await report(b, name)
        assert (talking["state"], talking["stage"], talking["error"]) == ("talking", "talker", None)
        assert talking["text_tokens"] == len(b.encode("a secret"))
        assert abs(talking["received"] - time.time()) < 60
        await b.stages.fail(name, "talker", "stage_failed", "it broke")
        assert (await answers[0]).status_code == 500
        failed = await report(b, name)
        assert (failed["state"], failed["stage"], failed["error"]) == ("failed", "talker", "stage_failed")
        assert list(failed["state_seconds"])[-1] == "failed"
        name = (await b.stages.request(1)).request_id
        await b.stages.answer(b.stages.requests[1], b.encode("a secret"))
        done = (await answers[1]).json()
        assert done["id"] == f"chatcmpl-{name}"
        for prefix in ("cmpl-", "resp_"):
            assert (await report(b, prefix + name))["id"] == name
        completed = await report(b, done["id"])
        assert (completed["id"], completed["state"], completed["stage"]) == (name, "completed", None)
        assert completed["audio_seconds"] == pytest.approx(360 / SAMPLE_RATE)
        assert completed["codec_tokens"] == 4


def test_old_requests_are_forgotten(monkeypatch: Patch) -> None:
    monkeypatch.setattr(history, "MAX_ENDED", 2)
    kept = RequestHistory()
    told: Any = {"state": "failed", "stage": None, "speech": False, "received": 0, "state_seconds": {}}
    counts: Any = {"prompt_tokens": 1, "text_tokens": 1, "codec_tokens": 0, "audio_seconds": 0.0}
    for name in "abc":
        kept.add(RequestReport(id=name, **told, **counts))
    assert [kept.get(name) is None for name in "abc"] == [True, False, False]


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics(StateCounts(), StageRegistry(1, 1))


def names_of(families: Iterable[Metric]) -> set[tuple[str, frozenset[str]]]:
    """Names and labels of all samples."""
    return {(each.name, frozenset(each.labels)) for family in families for each in family.samples}


async def test_metrics_count_what_happens(configure: Configure) -> None:
    async with http_bench(configure(http_gateway(heartbeat_timeout_s=0.5))) as b:
        async with speaking(b, "Hello world", CHUNKS):
            assert (await b.post(**SPOKEN)).status_code == 200
            assert (await b.post()).status_code == 200
        assert (await b.post(best_of=2)).status_code == 400
        assert (await b.post(deadline_s=-1)).status_code == 400
        async with b.client() as client:
            with pytest.raises(Exception, match="no text"):
                await client.chat(" ").result()
        b.stages.restart("talker")
        await until(lambda: b.process.gateway.registry.get("talker", "second"))
        await until(lambda: b.process.status().ready)
        requests = b.stages.requests[:2]
        for line, value in {
            'omnirelay_requests_total{outcome="completed"}': 2,
            'omnirelay_requests_total{outcome="failed"}': 0,
            # The gateway's own refusals; one request was wrong before it became one.
            'omnirelay_requests_total{outcome="refused"}': 2,
            'omnirelay_requests{state="thinking"}': 0,
            'omnirelay_client_errors_total{code="unsupported",interface="http"}': 1,
            'omnirelay_client_errors_total{code="invalid_request",interface="http"}': 1,
            'omnirelay_client_errors_total{code="prompt_empty",interface="tcp"}': 1,
            'omnirelay_stage_up{stage="talker"}': 1,
            'omnirelay_stage_restarts_total{stage="talker"}': 1,
            'omnirelay_stage_restarts_total{stage="thinker"}': 0,
            "omnirelay_queue_seconds_count": 2,
            "omnirelay_time_to_first_text_seconds_count": 2,
            "omnirelay_time_to_first_audio_seconds_count": 1,
            "omnirelay_request_seconds_count": 2,
            'omnirelay_real_time_factor_count{speech="short"}': 1,
            'omnirelay_real_time_factor_count{speech="long"}': 0,
            'omnirelay_client_errors_total{code="busy",interface="tcp"}': 0,
            "omnirelay_audio_seconds_total": 0.5,
            "omnirelay_prompt_tokens_total": sum(len(each.prompt_token_ids) for each in requests),
            "omnirelay_text_tokens_total": 2 * len(b.encode("Hello world")),
            "omnirelay_codec_tokens_total": 10,
        }.items():
            assert await b.metric(line) == value, line
        text = (await b.http.get("/metrics")).text
        plain = Answer(200, {}, text.encode()).metrics
        assert {"omnirelay_requests", "process_resident_memory_bytes"} <= plain.keys()
        other = await b.http.get("/metrics", headers={"Accept": PROMETHEUS})
        families = Answer(200, {"Content-Type": other.headers["content-type"]}, other.content).openmetrics
        assert names_of(families.values()) == names_of(plain.values())
        assert families["omnirelay_requests"].type == "gauge"
        assert families["omnirelay_requests_total"].samples == plain["omnirelay_requests_total"].samples


def test_gaps_in_speech_are_counted(metrics: GatewayMetrics) -> None:
    now = 0.0
    meter = RequestMeter(metrics, Lifecycle(StateCounts(), lambda: now), lambda: now)
    # The third comes late, and is heard late too, so that the fourth is in time.
    for seq, now in enumerate([1.0, 1.2, 2.1, 2.5]):  # noqa: B007 - the clock reads it
        meter.take(half_a_second(seq))
    read = metrics.registry.get_sample_value
    assert read("omnirelay_playback_underruns_total") == 1
    assert read("omnirelay_playback_silence_seconds_total") == pytest.approx(0.1)
    assert read("omnirelay_audio_seconds_total") == 2
    assert read("omnirelay_time_to_first_audio_seconds_sum") == 1


def half_a_second(seq: int) -> AudioChunk:
    samples = SAMPLE_RATE // 2
    return AudioChunk(request_id="a", seq=seq, samples=samples, data=Blob(bytes(4 * samples)))


@pytest.mark.parametrize(("pieces", "length"), [(5, "short"), (6, "long")])
def test_long_speech_is_told_from_short(metrics: GatewayMetrics, pieces: int, length: str) -> None:
    """What is short takes longer than it sounds wherever the first sound does."""
    now = 0.0
    lifecycle = Lifecycle(StateCounts(), lambda: now)
    meter = RequestMeter(metrics, lifecycle, lambda: now)
    for state in (RequestState.QUEUED, RequestState.THINKING):
        lifecycle.move(state)
    for seq in range(pieces):
        meter.take(half_a_second(seq))
    now = 6.0
    for state in (RequestState.TALKING, RequestState.SYNTHESIZING, RequestState.COMPLETED):
        lifecycle.move(state)
    meter.ended(None)
    read = metrics.registry.get_sample_value
    factors = {each: read("omnirelay_real_time_factor_sum", {"speech": each}) for each in ("short", "long")}
    assert factors == {"short": 0, "long": 0, length: 6.0 / (pieces / 2)}


@pytest.mark.parametrize(
    ("error", "taken", "outcome"),
    [
        (None, True, "failed"),
        (ConfigError("x"), False, "failed"),
        (ValueError("x"), False, "failed"),
        (StageUnavailableError("x"), False, "refused"),
        (StageUnavailableError("x"), True, "failed"),
        (PoisonRequestError("x"), True, "failed"),
    ],
)
def test_failures_are_told_from_refusals(
    metrics: GatewayMetrics, error: Exception | None, taken: bool, outcome: str
) -> None:
    lifecycle = Lifecycle(StateCounts())
    for state in (*([RequestState.QUEUED] if taken else []), RequestState.FAILED):
        lifecycle.move(state)
    metrics.ended(lifecycle, error)
    assert metrics.registry.get_sample_value("omnirelay_requests_total", {"outcome": outcome}) == 1


def test_heartbeats_that_come_late(metrics: GatewayMetrics) -> None:
    for since_last_s in (None, 0.5, 0.9, 1.1):
        metrics.heartbeat("talker", since_last_s, 0.5)
    assert metrics.registry.get_sample_value("omnirelay_heartbeats_late_total", {"stage": "talker"}) == 1


async def test_browsers_of_other_origins_are_refused(configure: Configure) -> None:
    friend = "https://chat.example.com"
    async with http_bench(configure(http_gateway(http_origins=[friend]))) as b:
        port = b.address[1]
        own = f"http://127.0.0.1:{port}"
        b.stages.serve(b.encode("Hi"))
        for origin, host, status in [
            (own, None, 200),
            (f"http://localhost:{port}", f"localhost:{port}", 200),
            (friend, None, 200),
            ("https://evil.example.com", None, 403),
            ("null", None, 403),
            (f"http://127.0.0.1:{port + 1}", None, 403),
            # A name that its owner has made to stand for this machine.
            (f"http://evil.example.com:{port}", f"evil.example.com:{port}", 403),
        ]:
            headers = {"Origin": origin, **({"Host": host} if host else {})}
            answer = await b.http.post(CHAT, json=BODY, headers=headers)
            assert answer.status_code == status, origin
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (friend if origin == friend else None)
            if status == 403:
                assert answer.json()["error"]["code"] == "origin_refused"
        assert len(b.stages.requests) == 3


async def test_the_page_may_use_the_other_gateways(configure: Configure) -> None:
    both = ["https://a.example.com", "https://b.example.com:8443"]

    async with http_bench(configure(http_gateway(http_gateways=both))) as b:
        page = await b.http.get("/")
        allowed = re.findall("connect-src (.*?);", page.headers["content-security-policy"])
        sockets = [each.replace("https", "wss") for each in both]
        assert [each.split() for each in allowed] == [["'self'", *both, *sockets]]
        assert (await b.http.get("/page/gateways.json")).json() == both
        b.stages.serve(b.encode("Hi"))
        for origin, host in zip(both, ["b.example.com:8443", "a.example.com"], strict=True):
            headers = {"Origin": origin, "Host": host}
            answer = await b.http.post(CHAT, json=BODY, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        stranger = {"Origin": "https://c.example.com", "Host": "b.example.com:8443"}
        assert (await b.http.post(CHAT, json=BODY, headers=stranger)).status_code == 403


def test_where_pages_find_the_gateways() -> None:
    def origins(**gateway: Any) -> list[str]:
        return Config.model_validate({"gateway": gateway}).gateway.page_origins

    assert origins() == []
    assert origins(replicas=2, http=None) == []
    found = [f"http://{host}:{port}" for host in ("127.0.0.1", "localhost") for port in (8000, 8100)]
    assert origins(replicas=2) == found
    files = {"certificate": "a.pem", "key": "a.key"}
    assert origins(replicas=2, tls=files) == [each.replace("http", "https") for each in found]
    given = ["https://a.example.com", "https://b.example.com"]
    assert origins(replicas=2, http_gateways=given) == given
    with pytest.raises(ValidationError, match=r"b\.example\.com/"):
        origins(http_gateways=["https://b.example.com/"])


async def test_a_stack_is_ready_with_one_replica_of_each_stage_ready(configure: Configure) -> None:
    async with http_bench(configure(http_gateway(heartbeat_timeout_s=0.4))) as b:
        registry = b.process.gateway.registry
        other = b.stages.add("talker", "other", f"tcp://127.0.0.1:{free_ports(1)[0]}")
        await until(lambda: registry.count("talker", "ready") == 2)
        other.silent = True
        await until(lambda: registry.count("talker", "down") == 1)
        assert (await b.http.get("/readyz")).json() == {"status": "ok", "reasons": []}
        assert (await b.http.get("/health")).status_code == 200
        b.stages.replica("talker").silent = True
        await until(lambda: registry.count("talker", "down") == 2)
        ready = await b.http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json() == {"status": "unavailable", "reasons": ["the talker is down"]}
        assert (await b.http.get("/health")).status_code == 503
        assert (await b.http.get("/livez")).status_code == 200
        assert await b.metric('omnirelay_stage_up{stage="talker"}') == 0
        assert await b.metric('omnirelay_stage_replicas{stage="talker",state="down"}') == 2


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("hosts", ["*", "a.b:80", "[::1]", "http://a.b", "A.b", "", "a/b"]),
        ("origins", ["*", "chat.example.com", "https://x.y/", "https://X.y", "ftp://x"]),
    ],
)
def test_hosts_and_origins_are_written_as_browsers_do(key: str, wrong: list[str]) -> None:
    for each in wrong:
        with pytest.raises(ConfigError, match=rf"gateway\.http_{key}"):
            load_config(environment={f"OMNIRELAY_GATEWAY__HTTP_{key.upper()}": f"['{each}']"})


async def test_a_gateway_of_text_needs_the_thinker_alone(configure: Configure) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=["thinker"]) as b, b.client() as client:
        await until(lambda: b.process.status().ready)
        ready = await b.http.get("/readyz")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ok", "reasons": [], "text_only": True}
        report = b.process.status()
        assert [stage.name for stage in report.stages] == ["thinker"]
        assert f"model: {report.gateway.model}, text only\n" in describe(report)
        told = (await b.http.get("/metrics")).text
        assert 'omnirelay_stage_up{stage="thinker"} 1.0' in told
        assert 'omnirelay_stage_up{stage="talker"}' not in told
        await fails(client.chat("Hi"), InvalidRequestError, "omnirelay chat --text-only")
        read = {"model": MODEL, "input": "Hi", "voice": "Chelsie"}
        for path, body, told in (
            ("/v1/audio/speech", read, "it cannot speak"),
            (CHAT, BODY | SPOKEN, 'modalities ["text"]'),
        ):
            refused = await b.http.post(path, json=body)
            assert refused.status_code == 400
            assert told in refused.json()["error"]["message"]
        asked = asyncio.create_task(b.post())
        await b.stages.answer(await b.stages.request(0), b.encode("Hello"))
        assert (await asked).json()["choices"][0]["message"]["content"] == "Hello"


async def test_a_thinker_that_is_missing_is_still_told(configure: Configure) -> None:
    config = configure(http_gateway()).model_copy(update={"text_only": True})
    async with http_bench(config, ready=False, alive=[]) as b:
        ready = await b.http.get("/readyz")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["the thinker is starting"])
        assert not b.process.status().ready


def test_up_starts_the_thinker_alone(place: Path) -> None:
    with start("omnirelay.cli", "up", "--text-only") as process:
        told = "".join(read_until(process, "ready: tcp://"))
        assert ", text only)" in told
        assert "[talker]" not in told
        with Client(os.environ["OMNIRELAY_GATEWAY__LISTEN"]) as client:
            assert [stage.name for stage in client.status().stages] == ["thinker"]
            assert client.chat("Hi", speech=False).result().done.finish_reason == "stop"
            with pytest.raises(InvalidRequestError, match="text-only"):
                client.chat("Hi").result()
        end(process)


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
