"""Shells complete what is typed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from omnirelay.cli.completion import SHELLS
from omnirelay.cli.main import main
from tests.gateway.bench import Output
from tests.support.terminal import terminal

pytestmark = pytest.mark.tools


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    assert shutil.which(name), f"{name} is not installed: run `make {name}`"
    return name


@pytest.fixture
def script(shell: str, tmp_path: Path, capsys: Output) -> Path:
    assert main(["completion", shell]) == 0
    path = tmp_path / f"script.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def test_every_shell_can_read_its_script(shell: str, script: Path) -> None:
    flags = ["--no-execute"] if shell == "fish" else ["-n"]
    done = subprocess.run([shell, *flags, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
async def test_bash_completes_commands_options_values_and_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    (tmp_path / "models").mkdir()
    become = "import os; os.execvp('bash', ['bash', '--norc', '-i'])"
    typed = {
        "omnirelay stat\t": "omnirelay status ",
        "omnirelay chat --tex\t": "omnirelay chat --text-only ",
        "omnirelay checkpoint --size b\t": "omnirelay checkpoint --size bench ",
        "omnirelay completion f\t": "omnirelay completion fish ",
        "omnirelay up --config my\t": "omnirelay up --config my.yaml ",
        "omnirelay checkpoint mod\t": "omnirelay checkpoint models",
    }

    async with terminal("-c", become, cwd=tmp_path, PS1="$ ", INPUTRC="/dev/null") as shown:
        await shown.see("$ ")
        shown.type(f"source {script.name}\r")
        await shown.see("$ ")
        for keys, line in typed.items():
            shown.type(keys)
            await shown.see(line)
            shown.type("\x15")


@pytest.mark.parametrize("shell", ["fish"], indirect=True)
def test_fish_completes_commands_and_options(script: Path) -> None:
    asked = f"source {script}; complete -C 'omnirelay comp'; complete -C 'omnirelay up --'"
    done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, check=True)
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words[0] == "completion"
    assert "--config" in words
