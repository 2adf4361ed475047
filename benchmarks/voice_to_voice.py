"""How soon a spoken question is answered aloud, by the frameworks of voice agents.

``make clients``, then ``python -m benchmarks.voice_to_voice [DIR]``.  Each framework has an environment of
its own in ``.venv-clients`` and holds realtime sessions with users who ask the held-out questions of
``benchmarks.quality`` at the speed of speech, every second one while the answer before it is heard.  Turns
are found by the server (``server_vad`` at its defaults), whose wait for the end of a question is counted.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import soundfile
import yaml

from benchmarks.adapters.omnirelay import configuration
from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell
from benchmarks.measure.results import percentile
from checkpoint.training.data.augmentation import RATE
from checkpoint.training.data.questions import spoken_questions
from checkpoint.training.data.synthesis import synthesize
from omnirelay.errors import OmniRelayError
from ops.launcher import Stack, running
from shared.config import DEFAULT_CHECKPOINT, Config

RESULT: Final = Path("benchmarks/results/voice-to-voice.md")
ROOT: Final = Path(__file__).resolve().parents[1]
CLIENTS: Final = {
    "livekit-agents": ("livekit", "livekit_realtime.py"),
    "pipecat": ("pipecat", "pipecat_realtime.py"),
    "openai-agents": ("openai-agents", "agents_realtime.py"),
}
"""Each with its environment and its program."""
MEASURED: Final = """\
Seconds from the last sample of a question to the first of its answer, the server's wait for the end of the
turn included; and from the first sample of an interruption to the last that is heard of the answer."""
CLIENT_S: Final = 300.0


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What the users of one program heard, as it prints it; see ``voice_clients/conversation.py``."""

    first_audio_s: list[float]
    stopped_s: list[float]
    stopped: int
    said: list[list[str]]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One client with so many sessions."""

    client: str
    sessions: int
    heard: Heard


def recordings(directory: Path, count: int) -> list[Path]:
    """Write held-out spoken questions as WAV files."""
    asked = [each for kind in spoken_questions(count).values() for each in kind][:count]
    paths = []
    for number, question in enumerate(asked):
        if question.voice is not None:
            path = directory / f"{number}.wav"
            samples = synthesize(question.voice, question.dialogue.turns[-1].question, RATE)
            soundfile.write(path, samples, RATE, subtype="PCM_16")
            paths.append(path)
    return paths


async def converse(client: str, url: str, sessions: int, questions: Sequence[Path]) -> Heard:
    """Let the users of one client ask.

    Raises:
        OmniRelayError: The client is not installed, or failed.
    """
    environment, program = CLIENTS[client]
    python = ROOT / ".venv-clients" / environment / "bin" / "python"
    if not python.exists():
        raise OmniRelayError(f"{client} is not installed in {python.parents[1]}: run `make clients`")
    process = await asyncio.create_subprocess_exec(
        python,
        ROOT / "benchmarks" / "voice_clients" / program,
        f"--sessions={sessions}",
        *questions,
        env=os.environ | {"OPENAI_BASE_URL": f"{url}/v1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CLIENT_S):
            output, errors = await process.communicate()
    except TimeoutError as error:
        raise OmniRelayError(f"{client} did not end within {CLIENT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OmniRelayError(f"{client} failed: {errors.decode(errors='replace')}")
    return msgspec.json.decode(output.strip().rpartition(b"\n")[2], type=Heard)


async def measure(options: argparse.Namespace) -> list[Load]:
    """Measure each client with each number of sessions.

    Raises:
        OmniRelayError: The stack could not start, or a client failed.
    """
    loads = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        values = configuration(options.model, {})
        path = directory / "omnirelay.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        questions = recordings(directory, max(options.questions, 2 * max(options.sessions)))
        async with running(Stack(Config.model_validate(values), path, show=lambda *_: None)):
            url = values["gateway"]["http"].replace("tcp:", "http:")
            await converse("openai-agents", url, 1, questions[:4])
            for sessions in options.sessions:
                for client in CLIENTS:
                    tell(f"{client}, {sessions} sessions")
                    heard = await converse(client, url, sessions, questions)
                    loads.append(Load(client=client, sessions=sessions, heard=heard))
    return loads


def table(loads: Sequence[Load]) -> str:
    """All figures, in Markdown."""
    machine = this_machine()
    lines = [
        "# Voice to voice: the default checkpoint, by voice frameworks",
        "",
        f"{machine.cpu}, {machine.cores} cores, clients included; "
        f"load average {os.getloadavg()[2]:.1f} over 15 min.",
        MEASURED,
        "",
        "| client | sessions | questions | first sample P50 | P95 | answers stopped "
        "| last sample P50 | P95 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for load in loads:
        first, stopped = load.heard.first_audio_s, load.heard.stopped_s
        times = [f"{percentile(first, share):.2f}" for share in (0.5, 0.95)]
        stops = [f"{percentile(stopped, share):.2f}" if stopped else "-" for share in (0.5, 0.95)]
        cells = (load.client, load.sessions, len(first), *times, load.heard.stopped, *stops)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.voice_to_voice", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=DEFAULT_CHECKPOINT, metavar="DIR")
    parser.add_argument("--sessions", type=int, nargs="+", default=(1, 8), metavar="N")
    parser.add_argument("--questions", type=int, default=24, help="of each client (default: 24)")
    options = parser.parse_args(arguments)
    try:
        text = table(asyncio.run(measure(options)))
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    RESULT.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
