"""The stack of compose.yaml, built and started once for all tests of this folder."""

import os
import subprocess
from collections.abc import Generator, Iterator

import pytest

from tests.compose.project import Project, say
from tests.support.stack import free_addresses

BUILD_S = 1800.0


@pytest.fixture(scope="session")
def built() -> Iterator[Project]:
    """A project whose images are built and of which nothing runs yet; in the end nothing of it is left."""
    ready = subprocess.run(["docker", "compose", "version"], capture_output=True, text=True, check=False)
    assert ready.returncode == 0, f"this needs `docker compose`: {ready.stderr or ready.stdout}"
    tcp, http = (int(address.rpartition(":")[2]) for address in free_addresses(2))
    project = Project(f"omnirelay-test-{os.getpid()}", {"TCP_PORT": tcp, "HTTP_PORT": http})
    project.run("build", timeout_s=BUILD_S)
    yield project
    if project.left():
        project.run("down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="session")
def running(built: Project) -> Project:
    """The project, healthy."""
    built.run("up", "--detach", "--wait", timeout_s=900.0)
    return built


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the services said, as soon as a test fails."""
    report = yield
    project = getattr(item, "funcargs", {}).get("running")
    if report.when == "call" and report.failed and project is not None:
        say(f"{item.name} failed; the logs of the services:")
        project.run("logs", "--tail", "60")
    return report
