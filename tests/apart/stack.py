"""The real processes of the tiny checkpoint, each on a host of its own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, get_args

from gateway.requests.lifecycle import Reason
from omnirelay import Client, StatusReport
from shared.messages import ROLES, STAGES
from shared.transport.keys import make_keys
from tests.apart.network import Network
from tests.support.http import Readings, get
from tests.support.processes import Processes, wait_until

NAMES: Final = ("gateway", *STAGES, "talker 2")
"""The processes, and their hosts."""
READY_S: Final = 150.0


class ApartStack(Processes):
    """A gateway, a thinker, two talkers and a token2wav on five hosts, with keys.

    Clients are on the gateway's host: what becomes of the network does not concern them.

    Args:
        model: The checkpoint.
        directory: For configuration, keys and logs.
        network: Has a host for each of :data:`NAMES`.
    """

    def __init__(self, model: Path, directory: Path, network: Network) -> None:
        self.hosts: Final = network.hosts
        address = self.hosts["gateway"].address
        gateway = {
            "listen": "tcp://127.0.0.1:5555",
            "http": "tcp://127.0.0.1:8000",
            "events": f"tcp://{address}:5560",
            "control": f"tcp://{address}:5561",
            "limits": {"max_active": 9},
        }
        stages: dict[str, dict[str, Any]] = {stage: {"threads": 1} for stage in STAGES}
        super().__init__({"model": str(model), "gateway": gateway, "stages": stages}, directory)
        self._keys: Final = directory / "keys"
        make_keys(self._keys, replace=False)

    def __enter__(self) -> Self:
        try:
            for name in NAMES:
                self.start(name)
            wait_until(self.all_ready, "all replicas are ready", READY_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, name: str) -> None:
        with self.hosts[name].inside():
            super().start(name)

    def addresses(self, name: str) -> dict[str, str]:
        """A stage listens on all addresses of its host, and says by which it is reached."""
        stage = name.partition(" ")[0]
        if stage not in STAGES:
            return {}
        port = 5562 + STAGES.index(stage)
        return {
            "inbox": f"tcp://0.0.0.0:{port}",
            "advertise": f"tcp://{self.hosts[name].address}:{port}",
            "http": f"tcp://127.0.0.1:{port + 10}",
        }

    def environment(self, name: str) -> dict[str, str]:
        """On its host are its own secret and all public keys."""
        role = name.partition(" ")[0]
        folder = self._keys.with_name(f"keys of {name}")
        folder.mkdir(exist_ok=True)
        for file in (*(f"{each}.key" for each in ROLES), f"{role}.key_secret"):
            shutil.copy(self._keys / file, folder)
        return {"OMNIRELAY_SECURITY__KEYS": str(folder)}

    def status(self, gateway: str = "gateway") -> StatusReport | None:
        with self.hosts[gateway].inside():
            return super().status(gateway)

    @contextmanager
    def client(self) -> Iterator[Client]:
        """A client on the gateway's host."""
        with self.hosts["gateway"].inside():
            client = Client(self.address)
        with client:
            yield client

    def state(self, name: str) -> str:
        """What the gateway says of a process of a stage."""
        report, pid = self.status(), self.running[name].pid
        return next((each.state for each in report.stages if each.pid == pid), "unknown") if report else "?"

    def all_ready(self) -> bool:
        """Every process of a stage takes requests."""
        return all(self.state(name) == "ready" for name in NAMES[1:])

    def held(self, name: str) -> float:
        """Requests at a stage, as it says itself."""
        read = self._readings(name, self.addresses(name)["http"])
        stage = name.partition(" ")[0]
        return sum(
            read("omnirelay_stage_requests", stage=stage, state=state) for state in ("running", "waiting")
        )

    def resumes(self) -> dict[tuple[str, str], float]:
        """How often requests were begun anew, by stage and reason."""
        read = self._readings("gateway", self.config["gateway"]["http"])
        return {
            (stage, reason): read("omnirelay_request_resumes_total", stage=stage, reason=reason)
            for stage in STAGES
            for reason in get_args(Reason)
        }

    def _readings(self, name: str, address: str) -> Readings:
        with self.hosts[name].inside():
            return Readings(get(address, "/metrics").metrics.values())
