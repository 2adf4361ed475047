"""The real Prometheus, as Debian packages it, for as long as a test needs it."""

import json
import shutil
import subprocess
import time
import urllib.parse
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.http import get
from tests.support.monitoring import RULES

START_S = 30.0
STOP_S = 20.0
EVERY = "1s"


class Prometheus:
    """A server that reads its targets every second and evaluates the rules as often.

    Args:
        address: ``tcp://HOST:PORT``, where it listens.
        targets: ``HOST:PORT`` of each process.
        directory: For its configuration and its data.
        key: The API key that it shows to them.
    """

    def __init__(self, address: str, targets: list[str], directory: Path, key: str) -> None:
        program = shutil.which("prometheus")
        assert program is not None, (
            "prometheus is missing: run `make test-monitoring`, or install the package"
        )
        self._address = address
        self.config = directory / "prometheus.yml"
        self.config.write_text(
            yaml.safe_dump(
                {
                    "global": {
                        "scrape_interval": EVERY,
                        "scrape_timeout": EVERY,
                        "evaluation_interval": EVERY,
                    },
                    "rule_files": [str(RULES)],
                    "scrape_configs": [
                        {
                            "job_name": "omnirelay",
                            # As the Prometheus Operator adds it.
                            "static_configs": [{"targets": targets, "labels": {"namespace": "omnirelay"}}],
                            "authorization": {"credentials": key},
                        }
                    ],
                }
            ),
            encoding="utf-8",
        )
        self._log = directory / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self.config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={address.removeprefix('tcp://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
            self._process.wait(STOP_S)

    def query(self, text: str) -> list[dict[str, Any]]:
        """The answer to a query: a list of ``{"metric": labels, "value": [time, text]}``."""
        answer = self._ask(f"/api/v1/query?{urllib.parse.urlencode({'query': text})}")
        series: list[dict[str, Any]] = answer["result"]
        return series

    def values(self, text: str) -> list[float]:
        """The values of a query that are numbers."""
        values = [float(series["value"][1]) for series in self.query(text)]
        # Not a number is what comes of a division by nothing.
        return [value for value in values if value == value]  # noqa: PLR0124

    def query_range(self, text: str, start: float, end: float) -> list[dict[str, Any]]:
        """The answer for each second: a list of ``{"metric": labels, "values": [[time, text], …]}``."""
        asked = {"query": text, "start": start, "end": end, "step": 1}
        answer = self._ask(f"/api/v1/query_range?{urllib.parse.urlencode(asked)}")
        series: list[dict[str, Any]] = answer["result"]
        return series

    def targets(self) -> list[dict[str, Any]]:
        """The processes it reads, with what went wrong at its last visit."""
        active: list[dict[str, Any]] = self._ask("/api/v1/targets")["activeTargets"]
        return active

    def rules(self) -> list[dict[str, Any]]:
        """The rules it evaluates, with what went wrong."""
        return [rule for group in self._ask("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _is_ready(self) -> bool:
        try:
            return get(self._address, "/-/ready").status == 200
        except OSError:
            return False

    def _ask(self, path: str) -> Any:
        answer = get(self._address, path)
        assert answer.status == 200, (path, answer.body)
        return json.loads(answer.body)["data"]
