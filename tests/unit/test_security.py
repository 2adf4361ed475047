"""What our own code must never do."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.children import ROOT

SOURCES = [path for name in ("shared", "gateway", "services") for path in sorted((ROOT / name).rglob("*.py"))]
UNSAFE_MODULES = {"cloudpickle", "copyreg", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.Call) -> str:
    """What is called, as it is written: ``torch.load``."""
    return ast.unparse(node.func)


def offences(path: Path) -> Iterator[str]:
    module = tree(path)
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            yield from (f"imports {name}" for name in modules if name.partition(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.Call):
            name = called(node)
            last = name.rpartition(".")[2]
            if last in UNSAFE_CALLS:
                yield f"calls {name}"
            elif any(
                each.arg == "trust_remote_code" and ast.unparse(each.value) != "False"
                for each in node.keywords
            ):
                yield f"lets {name} run what it is given"


def test_nothing_that_comes_from_outside_can_become_code() -> None:
    """What ruff's rules do not find, which know eval, pickle.load, yaml.load, torch.load and shells."""
    found = {path: list(offences(path)) for path in SOURCES}
    assert len(found) > 100
    assert {path: each for path, each in found.items() if each} == {}


def binds(path: Path) -> bool:
    """Whether a module binds or connects a socket of ZeroMQ."""
    nodes = list(ast.walk(tree(path)))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    calls = {
        called(node).rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    uses_zmq = any(name.partition(".")[0] == "zmq" for name in imported)
    return uses_zmq and bool(calls & {"bind", "connect", "bind_to_random_port"})


def test_sockets_are_bound_and_connected_in_one_place() -> None:
    """Where keys are asked for: one that is bound elsewhere would let everybody in."""
    transport = ROOT / "shared" / "transport"
    assert {path for path in SOURCES if binds(path)} == {transport / "sockets.py", transport / "curve.py"}


@pytest.mark.parametrize("module", ["gateway/dispatch/stage_transport.py", "shared/stage/process.py"])
def test_processes_have_no_context_without_rules(module: str) -> None:
    calls = {called(node) for node in ast.walk(tree(ROOT / module)) if isinstance(node, ast.Call)}
    assert "open_context" in calls
    assert not calls & {"zmq.Context", "zmq.asyncio.Context", "zmq.Context.instance", "Context"}
