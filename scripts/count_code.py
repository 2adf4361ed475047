"""Count lines of code, and hold them to budgets: ``python scripts/count_code.py``.

Counted are Python files in git, without docstrings, comments, blank lines and imports.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("omnirelay", "shared", "gateway", "services", "checkpoint", "ops")
TRAINING = "labs/training"
BUDGETS = {"product": 29_369, "training": 2_477, "benchmarks": 3_356, "tests": 41_964, "files": 1_028}
"""Most lines of code; ``files`` is the number of files in git."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def code_lines(source: str) -> int:
    """Count the lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and _is_no_code(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _is_no_code(node: ast.stmt) -> bool:
    """Whether a statement is an import, or the docstring of a module, class, function or attribute."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


def group_of(path: str) -> str | None:
    """The group that a file counts for."""
    package = path.partition("/")[0]
    if path.startswith(TRAINING):
        return "training"
    return "product" if package in PRODUCT else package if package in BUDGETS else None


def main() -> int:
    """Print the table; return 1 if a budget is exceeded."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    paths = [path for path in listed.stdout.split("\0") if (ROOT / path).is_file()]
    groups, packages = Counter(files=len(paths)), Counter[str]()
    for path in paths:
        if path.endswith(".py") and (group := group_of(path)) is not None:
            count = code_lines((ROOT / path).read_text(encoding="utf-8"))
            groups[group] += count
            packages[path.partition("/")[0]] += count
    for name, budget in BUDGETS.items():
        print(f"{name:12}{groups[name]:8,} of {budget:,}{'  TOO MANY' if groups[name] > budget else ''}")
    print(", ".join(f"{name} {count:,}" for name, count in packages.most_common()))
    return int(any(groups[name] > budget for name, budget in BUDGETS.items()))


if __name__ == "__main__":
    sys.exit(main())
