"""Bodies of type ``multipart/form-data`` (RFC 7578) that were read within their bounds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.http.body import find
from omnirelay.errors import InvalidRequestError

TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 64
MAX_BOUNDARY: Final = 70
MAX_HEAD_BYTES: Final = 4096
"""Of the headers of a part."""
MAX_TEXT_BYTES: Final = 2**16
"""Of a field that is not a file."""
PARAMETER: Final = re.compile(r';\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))\s*')
"""A parameter of a header (RFC 9110, 5.6.6), whose value may be quoted."""


@dataclass(frozen=True)
class Form:
    """A form: fields whose names end in ``[]`` are lists.

    Attributes:
        values: The fields that are texts.
        files: The content of the others.
    """

    values: dict[str, str | list[str]]
    files: dict[str, bytes]


def read_form(content_type: str, body: bytearray) -> Form:
    """Split a body into its fields.

    Raises:
        InvalidRequestError: It is not such a form, or exceeds a limit.
    """
    form = Form({}, {})
    for head, start, end in _parts(body, _boundary(content_type)):
        disposition = _disposition(head)
        name = disposition.get("name")
        if not name:
            raise InvalidRequestError("a part of the form has no name")
        if name in form.files or (name in form.values and not name.endswith("[]")):
            raise InvalidRequestError(f"the form has {name[:64]!r} twice", name[:64])
        if "filename" in disposition or "filename*" in disposition:
            form.files[name] = bytes(memoryview(body)[start:end])
            continue
        if end - start > MAX_TEXT_BYTES:
            raise InvalidRequestError(f"{name[:64]} has more than {MAX_TEXT_BYTES} bytes", name[:64])
        try:
            text = body[start:end].decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{name[:64]} is not UTF-8: {error}", name[:64]) from error
        if not name.endswith("[]"):
            form.values[name] = text
        elif isinstance(texts := form.values.setdefault(name, []), list):
            texts.append(text)
    return form


def _boundary(content_type: str) -> bytes:
    kind, separator, parameters = content_type.partition(";")
    boundary = _parameters(separator + parameters).get("boundary")
    if kind.strip().lower() != TYPE or boundary is None:
        raise InvalidRequestError(f"send the file as {TYPE}, with its boundary in the header Content-Type")
    if not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
        raise InvalidRequestError(f"the boundary of the form needs 1 to {MAX_BOUNDARY} ASCII characters")
    return b"--" + boundary.encode()


def _parts(body: bytearray, mark: bytes) -> list[tuple[bytes, int, int]]:
    """Find the parts: the headers of each, and where its content is."""
    parts: list[tuple[bytes, int, int]] = []
    at = find(body, mark)
    while at >= 0:
        at += len(mark)
        if body[at : at + 2] == b"--":
            return parts
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        if head_end < 0:
            raise InvalidRequestError(f"a part of the form has no headers within {MAX_HEAD_BYTES} bytes")
        end = find(body, b"\r\n" + mark, head_end + 2)
        if end < 0:
            break
        if len(parts) == MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts")
        parts.append((bytes(body[at:head_end]), min(head_end + 4, end), end))
        at = end + 2
    raise InvalidRequestError("the form ends before its last boundary")


def _disposition(head: bytes) -> Mapping[str, str]:
    """Return the parameters of a part's Content-Disposition."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            _, separator, parameters = value.partition(";")
            return _parameters(separator + parameters)
    return {}


def _parameters(text: str) -> Mapping[str, str]:
    """Parse the parameters of a header, from the first semicolon on; of a repeated one the first counts."""
    found: dict[str, str] = {}
    text, at = text.rstrip("; \t"), 0
    while at < len(text):
        parameter = PARAMETER.match(text, at)
        if parameter is None:
            raise InvalidRequestError("the parameters of a header of the form cannot be read")
        quoted, plain = parameter[2], parameter[3]
        value = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        found.setdefault(parameter[1].lower(), value)
        at = parameter.end()
    return found
