"""The doctor on keys: none that are needed, good ones, and each way to spoil them."""

from pathlib import Path
from typing import Any

import pytest
import zmq

from ops.doctor import security
from ops.doctor.finding import Finding
from shared.config import Config
from shared.transport.keys import ROLES, make_keys, public_file, secret_file


def examined(keys: Path | None = None, inbox: str = "tcp://127.0.0.1:5562", **section: Any) -> list[Finding]:
    values = {"security": {"keys": str(keys) if keys else None, **section}}
    return list(
        security.check_keys(Config.model_validate({**values, "stages": {"thinker": {"inbox": inbox}}}))
    )


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", replace=False)
    return tmp_path / "keys"


def test_on_one_machine_none_are_needed() -> None:
    (finding,) = examined()
    assert finding.level == "ok"
    assert "none are needed" in finding.what


def test_a_network_that_is_said_to_be_internal_is_not_taken_for_safe() -> None:
    (finding,) = examined(inbox="tcp://thinker:5562", internal_network=True)
    assert (finding.level, finding.check) == ("warning", "keys")
    assert "security.internal_network says" in finding.what


def test_keys_in_order_are_told_for_each_role_that_is_here(keys: Path) -> None:
    assert [finding.level for finding in examined(keys)] == ["ok"] * len(ROLES)
    for role in ROLES[1:]:
        secret_file(keys, role).unlink()
    (finding,) = examined(keys)
    assert finding.what.startswith("the gateway has its keys")


def test_a_secret_that_others_may_read_is_a_problem_of_that_role_alone(keys: Path) -> None:
    secret_file(keys, "talker").chmod(0o644)
    levels = {finding.level: finding for finding in examined(keys)}
    assert set(levels) == {"ok", "problem"}
    assert "talker.key_secret may be read by others (mode 0644)" in levels["problem"].what


def test_a_missing_public_key_is_a_problem_of_all(keys: Path) -> None:
    public_file(keys, "talker").unlink()
    findings = examined(keys)
    assert [finding.level for finding in findings] == ["problem"] * len(ROLES)
    assert all("talker.key: No such file" in finding.what for finding in findings)


def test_a_directory_without_secrets_is_a_problem(tmp_path: Path) -> None:
    (finding,) = examined(tmp_path)
    assert finding.level == "problem"
    assert "has no .key_secret file" in finding.what


def test_a_zeromq_without_curve_is_a_problem(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    (finding,) = examined(keys)
    assert finding.level == "problem"
    assert "built without CURVE" in finding.what
