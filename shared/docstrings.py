"""What docstrings say of the fields of a class, for references made from the code."""

import inspect
import re


def described_fields(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of its fields under ``Attributes:``."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("\nAttributes:\n")[2]
        for name, said in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
            found[name] = re.sub(r"\s+", " ", said).replace("``", "`")
    return found
