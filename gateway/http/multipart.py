"""Bodies of type ``multipart/form-data`` (RFC 7578) that were read within their bounds."""

from dataclasses import dataclass
from email.message import Message
from typing import Final

from omnirelay.errors import InvalidRequestError

TYPE: Final = "multipart/form-data"
MAX_PARTS: Final = 64
MAX_BOUNDARY: Final = 70
MAX_HEAD_BYTES: Final = 4096
"""Of the headers of a part."""
MAX_TEXT_BYTES: Final = 2**16
"""Of a field that is not a file."""
PIECE: Final = 2**20


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
        disposition = _header(head, "content-disposition")
        name = disposition.get_param("name", header="content-disposition")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError("a part of the form has no name")
        if name in form.files or (name in form.values and not name.endswith("[]")):
            raise InvalidRequestError(f"the form has {name[:64]!r} twice", name[:64])
        if disposition.get_param("filename", header="content-disposition") is not None:
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
    message = Message()
    message["content-type"] = content_type.replace("\r", " ").replace("\n", " ")
    boundary = message.get_param("boundary")
    if message.get_content_type() != TYPE or not isinstance(boundary, str):
        raise InvalidRequestError(f"send the file as {TYPE}, with its boundary in the header Content-Type")
    if not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
        raise InvalidRequestError(f"the boundary of the form needs 1 to {MAX_BOUNDARY} ASCII characters")
    return b"--" + boundary.encode()


def _parts(body: bytearray, mark: bytes) -> list[tuple[bytes, int, int]]:
    """Find the parts: the headers of each, and where its content is."""
    parts: list[tuple[bytes, int, int]] = []
    at = _find(body, mark, 0)
    while at >= 0:
        at += len(mark)
        if body[at : at + 2] == b"--":
            return parts
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        if head_end < 0:
            raise InvalidRequestError(f"a part of the form has no headers within {MAX_HEAD_BYTES} bytes")
        end = _find(body, b"\r\n" + mark, head_end + 2)
        if end < 0:
            break
        if len(parts) == MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts")
        parts.append((bytes(body[at:head_end]), min(head_end + 4, end), end))
        at = end + 2
    raise InvalidRequestError("the form ends before its last boundary")


def _header(head: bytes, name: str) -> Message:
    message = Message()
    for line in head.decode("latin-1").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            # Names of files are UTF-8 in practice.
            message[name] = value.strip().encode("latin-1").decode("utf-8", "replace")
    return message


def _find(body: bytearray, mark: bytes, start: int) -> int:
    """Do ``body.find`` in pieces, so that other threads can run in between."""
    while start < len(body):
        found = body.find(mark, start, start + PIECE + len(mark) - 1)
        if found >= 0:
            return found
        start += PIECE
    return -1
