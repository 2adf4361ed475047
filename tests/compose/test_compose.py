"""``docker compose up`` as a user runs it: from nothing to healthy, a crash in between, and nothing left.

The tests run in their order: the last one stops the stack.
"""

import itertools
import json
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from importlib import resources
from pathlib import Path

import pytest

from benchmarks.quality.__main__ import Listening
from labs.training.data.corpus import VOICES
from labs.training.measure.recognizer import word_error_rate
from omnirelay import Client, SamplingOverrides
from omnirelay.errors import UnauthenticatedError
from omnirelay.events import AudioEvent, DoneEvent
from shared.config import DEFAULT_CHECKPOINT
from tests.compose.project import SERVING, STAGES, Project, docker, say
from tests.support.children import ROOT
from tests.support.processes import wait_until
from tests.support.stack import free_addresses

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

GATEWAY_MB = 200
METRICS_PORTS = {"gateway": 5571, "thinker": 5572, "talker": 5573, "token2wav": 5574}
ANSWERS = {
    "what is six plus nine": "six plus nine is fifteen",
    "what is eight minus three": "eight minus three is five",
    "how are you": "i am good thank you",
}
WORD_ERRORS = 0.3
"""The checkpoint's own errors are half of that; noise has three times as many."""
UNHEALTHY_S = 60.0
HEALTHY_S = 180.0


def get(project: Project, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Ask the gateway by HTTP, from the host, under a name."""
    port = project.ports["HTTP_PORT"]
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": f"{host}:{port}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310 - http, as it says above
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask(project: Project) -> None:
    """Send text, sound and a picture from the host, and take text and speech."""
    question, picture = (
        resources.files("ops").joinpath("assets", name).read_bytes()
        for name in ("question.ogg", "picture.png")
    )
    with Client(f"tcp://127.0.0.1:{project.ports['TCP_PORT']}") as client:
        result = client.chat(
            "Answer the question that you hear.",
            audio=question,
            images=picture,
            seed=1,
            text_sampling=SamplingOverrides(max_tokens=12, min_tokens=4),
            codec_sampling=SamplingOverrides(max_tokens=64, min_tokens=48),
        ).result()
    assert result.text
    assert result.audio.size > 0
    say(f"{result.text!r} and {result.audio.size / 24_000:.2f} s of speech in {result.done.wall_s:.2f} s")


def ask_and_listen(project: Project) -> None:
    """Send questions whose answers are known, and listen to what is said."""
    hear = Listening().hear
    said = []
    with Client(f"tcp://127.0.0.1:{project.ports['TCP_PORT']}") as client:
        for speaker, (question, answer) in itertools.product(VOICES, ANSWERS.items()):
            result = client.chat(question, speaker=speaker, seed=1).result()
            assert result.text == answer
            said.append((answer, hear(result.audio)))
    say("; ".join(heard for _, heard in said))
    assert word_error_rate(said) <= WORD_ERRORS


def test_the_gateways_image_is_small_and_has_no_pytorch(built: Project) -> None:
    sizes = {}
    for service, image in (("gateway", "omnirelay-gateway"), ("thinker", "omnirelay-stages")):
        name = json.loads(built.output("config", "--format", "json").stdout)["services"][service]["image"]
        assert name.startswith(image)
        sizes[image] = int(docker("image", "inspect", "--format", "{{.Size}}", name)) / 1e6
    say(", ".join(f"{name}: {size:,.0f} MB" for name, size in sizes.items()))
    assert sizes["omnirelay-gateway"] < GATEWAY_MB
    found = built.output(
        "run",
        "--rm",
        "--no-deps",
        "--no-TTY",
        "gateway",
        "python",
        "-c",
        "import importlib.util as u; print(u.find_spec('torch'))",
    )
    assert found.stdout.splitlines()[-1] == "None"


def test_a_failed_checkpoint_stops_the_start_and_says_why(built: Project, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("services: {checkpoint: {environment: {OMNI_MODEL: /nowhere}}}", encoding="utf-8")
    project = Project(f"{built.name}-broken", built.ports, broken)
    try:
        ended = project.output("up", timeout_s=120.0)
    finally:
        project.run("down", "--volumes")
    assert ended.returncode != 0
    assert "no checkpoint in /nowhere" in ended.stdout
    assert 'service "checkpoint" didn\'t complete successfully' in ended.stdout


def test_the_services_become_healthy_in_order(running: Project) -> None:
    seen = docker(
        "events", "--since", running.inspect("checkpoint")["Created"], "--until", str(int(time.time()) + 1),
        "--filter", f"label=com.docker.compose.project={running.name}", "--format",
        '{{index .Actor.Attributes "com.docker.compose.service"}} {{.Status}}',
    ).splitlines()  # fmt: skip
    ends, begins = seen.index("checkpoint die"), {name: seen.index(f"{name} start") for name in SERVING}
    healthy = {name: seen.index(f"{name} health_status: healthy") for name in SERVING}
    assert all(ends < begins[stage] for stage in STAGES)
    assert all(healthy[stage] < begins["gateway"] < healthy["gateway"] for stage in STAGES)


@pytest.mark.parametrize("service", SERVING)
def test_a_container_may_do_little(running: Project, service: str) -> None:
    found = running.inspect(service)
    host = found["HostConfig"]
    assert found["Config"]["User"] == "omnirelay"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Memory"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"


def test_it_answers_text_sound_and_a_picture(running: Project) -> None:
    assert get(running, "/readyz")[0] == 200
    assert "<html" in get(running, "/", "localhost")[1]
    ask(running)
    ask_and_listen(running)


def test_a_page_of_elsewhere_cannot_pose_as_this_machine(running: Project) -> None:
    status, told = get(running, "/v1/models", "evil.example")
    assert (status, json.loads(told)["error"]["code"]) == (403, "origin_refused")


def test_every_process_is_scraped(running: Project) -> None:
    assert "\nomnirelay_requests_total{" in get(running, "/metrics")[1]
    # As Prometheus would, from the network that the stages are on.
    for service, port in METRICS_PORTS.items():
        program = (
            f"import urllib.request as r; print(r.urlopen('http://{service}:{port}/metrics').read().decode())"
        )
        metrics = running.output("exec", "--no-TTY", "gateway", "python", "-c", program).stdout
        assert "\nomnirelay_edge_received_messages_total{" in metrics, metrics[-500:]
        assert service == "gateway" or "\nvllm:" in metrics, service


def test_a_name_that_nobody_has_is_known_not_to_be_there_at_once(running: Project) -> None:
    # The thread that resolves names also sends heartbeats.
    program = """
import socket, time
started = time.monotonic()
try:
    socket.getaddrinfo("nobody", 1)
except socket.gaierror:
    print(time.monotonic() - started)
"""
    took = running.output("exec", "--no-TTY", "thinker", "python", "-c", program).stdout
    assert float(took) < 5


def test_starting_again_changes_nothing(running: Project) -> None:
    before = {service: running.inspect(service)["Id"] for service in SERVING}
    made = running.output("exec", "--no-TTY", "thinker", "stat", "-c", "%Y", str(DEFAULT_CHECKPOINT)).stdout
    running.run("up", "--detach", "--wait", timeout_s=120.0)
    assert {service: running.inspect(service)["Id"] for service in SERVING} == before
    assert (
        running.output("exec", "--no-TTY", "thinker", "stat", "-c", "%Y", str(DEFAULT_CHECKPOINT)).stdout
        == made
    )


def test_a_stage_that_hangs_is_seen_and_one_that_is_killed_comes_back(running: Project) -> None:
    pid = running.inspect("talker")["State"]["Pid"]
    # The first process is Docker's init; the stage is its child.
    stage = int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])
    say(f"stopping the talker's process {stage}: it hangs")
    os.kill(stage, signal.SIGSTOP)
    running.wait_for("talker", "unhealthy", UNHEALTHY_S)
    running.wait_for("gateway", "unhealthy", UNHEALTHY_S)
    status, reason = get(running, "/readyz")
    assert (status, "the talker is down" in reason) == (503, True), reason
    say("killing it")
    os.kill(pid, signal.SIGKILL)
    running.wait_for("talker", "healthy", HEALTHY_S)
    running.wait_for("gateway", "healthy", UNHEALTHY_S)
    assert running.inspect("talker")["RestartCount"] == 1
    ask_and_listen(running)


def test_a_second_gateway_goes_on_with_answers_of_the_first(running: Project) -> None:
    tcp, http = (int(address.rpartition(":")[2]) for address in free_addresses(2))
    ports = {**running.ports, "TCP_PORT_2": tcp, "HTTP_PORT_2": http}
    both = Project(running.name, ports, ROOT / "compose.gateways.yaml")
    both.run("up", "--detach", "--wait", timeout_s=900.0)
    addresses = [f"tcp://127.0.0.1:{ports[name]}" for name in ("TCP_PORT", "TCP_PORT_2")]
    origins = [
        f"http://{host}:{ports[name]}"
        for host in ("127.0.0.1", "localhost")
        for name in ("HTTP_PORT", "HTTP_PORT_2")
    ]
    assert json.loads(get(both, "/page/gateways.json")[1]) == origins
    with Client(addresses) as client:
        question, answer = next(iter(ANSWERS.items()))
        undisturbed = client.chat(question, seed=1).result()
        first = both.inspect("gateway")["State"]["Pid"]
        samples: list[int] = []
        for event in client.chat(question, seed=1):
            if isinstance(event, AudioEvent):
                if not samples:
                    say("killing the first gateway")
                    os.kill(first, signal.SIGKILL)
                samples.append(event.samples.size)
            elif isinstance(event, DoneEvent):
                done = event
    assert done.text == answer
    assert sum(samples) == undisturbed.audio.size
    second = Project(running.name, {"HTTP_PORT": http})
    assert get(second, f"/v1/requests/{done.request_id}")[0] == 200
    both.wait_for("gateway", "healthy", UNHEALTHY_S)
    both.run("rm", "--stop", "--force", "gateway-2")


def test_keys_tls_and_a_second_talker_as_the_documentation_has_them(running: Project, tmp_path: Path) -> None:
    section = (ROOT / "docs/deployment.md").read_text(encoding="utf-8").partition("### Keys and TLS\n")[2]
    # Its own folder instead of one beside compose.yaml; everything else as it is written.
    commands, _, rest = section.partition("In `compose.override.yaml`:")
    override = tmp_path / "override.yaml"
    text = rest.partition("```yaml\n")[2].partition("```")[0]
    override.write_text(text.replace("./secrets", f"{tmp_path}/secrets"), encoding="utf-8")
    printed = ""
    for line in re.findall(r"^    (.+)$", commands, re.MULTILINE):
        command = line.replace("docker compose", f"docker compose -f {ROOT}/compose.yaml -p {running.name}")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        printed += done.stdout
    keyed = Project(running.name, running.ports, override)
    keyed.run("up", "--detach", "--wait", "--scale", "talker=2", timeout_s=900.0)
    certificate = ssl.create_default_context(cafile=tmp_path / "secrets/gateway.pem")
    port = running.ports["HTTP_PORT"]
    with urllib.request.urlopen(f"https://localhost:{port}/readyz", context=certificate, timeout=10) as reply:
        assert reply.status == 200
    address = f"tls://localhost:{running.ports['TCP_PORT']}"
    with Client(address, ca=certificate) as stranger, pytest.raises(UnauthenticatedError):
        stranger.chat("Who?").result()
    key = next(word for word in printed.split() if word.startswith("omr_"))
    with Client(address, api_key=key, ca=certificate) as client:
        for wanted in (2, 1):
            wait_until(lambda wanted=wanted: talkers(client) == wanted, f"{wanted} talkers", UNHEALTHY_S)  # type: ignore[misc]
            assert client.chat("Who?", text_sampling=SamplingOverrides(max_tokens=8)).result().audio.size
            if wanted == 2:
                keyed.run("up", "--detach", "--wait", "--scale", "talker=1", timeout_s=900.0)


def talkers(client: Client) -> int:
    """How many take requests."""
    ready = [each for each in client.status().stages if each.state == "ready"]
    return len({each.inbox for each in ready if each.name == "talker"})


def test_it_stops_and_leaves_nothing(running: Project) -> None:
    started = time.monotonic()
    running.run("down", "--volumes", timeout_s=120.0)
    assert running.left() == []
    assert time.monotonic() - started < 40
