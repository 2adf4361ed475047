"""What our own code must never do."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import ROOT

SOURCES = [path for name in ("shared", "gateway", "services") for path in sorted((ROOT / name).rglob("*.py"))]
UNSAFE_MODULES = {"cloudpickle", "copyreg", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "recv_serialized", "unsafe_load", "full_load"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def called(node: ast.Call) -> str:
    """What is called, as it is written: ``torch.load``."""
    return ast.unparse(node.func)


def constant(node: ast.Call, keyword: str) -> object:
    values = [each.value for each in node.keywords if each.arg == keyword]
    return values[0].value if values and isinstance(values[0], ast.Constant) else None


def safe_loaders(module: ast.Module) -> set[str]:
    """YAML's safe loader with checks of the module's own."""
    classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    return {
        each.name for each in classes if [ast.unparse(base) for base in each.bases] == ["yaml.SafeLoader"]
    }


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
            # model.eval() is PyTorch's, and evaluates nothing.
            if last in UNSAFE_CALLS and (last not in ("eval", "exec") or name == last):
                yield f"calls {name}"
            elif name == "yaml.load" and not safe_loaders(module) & {
                ast.unparse(each) for each in node.args[1:]
            }:
                yield "calls yaml.load; yaml.safe_load makes no objects"
            elif name == "torch.load" and constant(node, "weights_only") is not True:
                yield "calls torch.load without weights_only=True"
            elif constant(node, "shell") is True or constant(node, "trust_remote_code") is True:
                yield f"lets {name} run what it is given"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_comes_from_outside_can_become_code(path: Path) -> None:
    assert list(offences(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sockets_are_bound_and_connected_in_one_place(path: Path) -> None:
    """Where keys are asked for: one that is bound elsewhere would let everybody in."""
    module = tree(path)
    uses_zmq = any(
        alias.name.partition(".")[0] == "zmq"
        for node in ast.walk(module)
        if isinstance(node, ast.Import)
        for alias in node.names
    )
    calls = {
        called(node).rpartition(".")[2]
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if uses_zmq and path.relative_to(ROOT).as_posix() not in (
        "shared/transport/sockets.py",
        "shared/transport/curve.py",
    ):
        assert not calls & {"bind", "connect", "bind_to_random_port"}


@pytest.mark.parametrize("module", ["gateway/dispatch/stage_transport.py", "shared/stage/process.py"])
def test_processes_have_no_context_without_rules(module: str) -> None:
    calls = {called(node) for node in ast.walk(tree(ROOT / module)) if isinstance(node, ast.Call)}
    assert "open_context" in calls
    assert not calls & {"zmq.Context", "zmq.asyncio.Context", "zmq.Context.instance", "Context"}
