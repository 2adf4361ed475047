"""What Kubernetes sets for a Service stops nothing; what is written wrongly is still refused."""

import os
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from omnirelay.errors import ConfigError
from omnirelay.values import API_KEY_VARIABLE
from shared.config import ENV_PREFIX, Config, load_config
from shared.config.kubernetes import _SHAPES


def service(prefix: str, host: str = "10.96.0.7", url_host: str = "10.96.0.7") -> dict[str, str]:
    """The variables of a Service with a port of the name ``http-api``, as the kubelet makes them."""
    return {
        f"{prefix}_SERVICE_HOST": host,
        f"{prefix}_SERVICE_PORT": "8000",
        f"{prefix}_SERVICE_PORT_HTTP_API": "8000",
        f"{prefix}_PORT": f"tcp://{url_host}:8000",
        f"{prefix}_PORT_8000_TCP": f"tcp://{url_host}:8000",
        f"{prefix}_PORT_8000_TCP_PROTO": "tcp",
        f"{prefix}_PORT_8000_TCP_PORT": "8000",
        f"{prefix}_PORT_8000_TCP_ADDR": host,
        f"{prefix}_PORT_5555_UDP": f"udp://{url_host}:5555",
    }


@pytest.mark.parametrize("name", ["OMNIRELAY", "OMNIRELAY_GATEWAY", "OMNIRELAY_TOKEN2WAV_0"])
@pytest.mark.parametrize("hosts", [("10.96.0.7", "10.96.0.7"), ("fd00::7", "[fd00::7]")])
def test_variables_of_services_are_ignored(name: str, hosts: tuple[str, str]) -> None:
    assert load_config(None, service(name, *hosts)) == Config()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMNIRELAY_PORT", "8000"),
        ("OMNIRELAY_GATEWAY_PORT", "tcp://0.0.0.0:5555"),
        ("OMNIRELAY_GATEWAY_PORT", "tcp://127.0.0.1:5555"),
        ("OMNIRELAY_GATEWAY_PORT", "tcp://gateway:5555"),
        ("OMNIRELAY_SERVICE_HOST", "gateway"),
        ("OMNIRELAY_SERVICE_PORT", "many"),
        ("OMNIRELAY_SERVICE_PORT", "9" * 10_000),
        ("OMNIRELAY_GATEWAY__SERVICE_HOST", "10.96.0.7"),
        ("OMNIRELAY_GATEWAY__PORT", "tcp://10.96.0.7:8000"),
        ("OMNIRELAY_GATEWAY_LISTEN", "tcp://10.96.0.7:8000"),
        ("OMNIRELAY_PORT_8000_TCP_HOST", "10.96.0.7"),
        ("OMNIRELAY_PORT_8000_TCP_PROTO", "http"),
    ],
)
def test_what_is_written_wrongly_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, {name: value})


def variables(section: type[BaseModel], prefix: str = ENV_PREFIX) -> Iterator[str]:
    """The variable of every key and section."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name.upper()}"
        for kind in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from variables(kind, f"{prefix}{name.upper()}__")


def test_no_key_of_ours_has_such_a_name() -> None:
    ours = [*variables(Config), API_KEY_VARIABLE]
    assert len(ours) > 100
    assert "OMNIRELAY_STAGES__THINKER__ENGINE__DTYPE" in ours
    assert [name for name in ours for shape, _ in _SHAPES if shape.fullmatch(name)] == []


def test_a_process_says_what_it_ignores() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env=os.environ | service("OMNIRELAY") | {"OMNI_MODEL": "./nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    ignored, error = done.stderr.splitlines()
    assert "ignored, as Kubernetes sets them for Services: OMNIRELAY_PORT, OMNIRELAY_PORT_5555_UDP" in ignored
    assert "no checkpoint in nowhere" in error
