"""The documentation says what the code says."""

import re
import shlex
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from omnirelay import content, events, protocol
from omnirelay.cli.main import build_parser
from scripts.reference import family, fill, keys, parsers
from shared.config import Config
from shared.docstrings import described_fields
from tests.support.children import ROOT

PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_reference_has_every_key_with_its_default_and_meaning() -> None:
    page = fill(read("docs/configuration.md"))
    for key, default, _, meaning in keys():
        assert meaning, key
        assert f"| `{key}` | `{default}` |" in page


def test_the_reference_has_every_error() -> None:
    page = fill(read("docs/errors.md"))
    for kind in family():
        assert kind.__doc__, kind
        assert f"| `{kind.code}` | `{kind.__name__}` |" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_the_page_of_commands_shows_every_command_and_each_option_says_what_it_does() -> None:
    told = re.findall(r"^\| `([a-z-]+)` \|", read("docs/cli.md"), re.MULTILINE)
    commands = list(parsers(build_parser()))
    assert {parser.prog.split()[1] for parser in commands} == set(told)
    assert [
        action.dest
        for parser in commands
        for action in parser._actions
        if action.option_strings and not action.help
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_are_understood(page: Path) -> None:
    parser = build_parser()
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    pieces = re.findall(r"`[^`]+`|^ {4}.+$", text, re.MULTILINE)
    code = "\n".join(" ".join(piece.split()) for piece in pieces)
    for call in re.findall(r"(?<!from )\bomnirelay ([a-z]+(?:-[a-z]+)* [^`|<>()\n]+)", code):
        if "[" not in call:
            parser.parse_args(shlex.split(call, comments=True))


def test_the_reference_has_every_message_and_says_what_each_field_means() -> None:
    page = fill(read("docs/protocol-messages.md"))
    sides = get_args(protocol.ClientMessage | protocol.ServerMessage)
    for name in [kind.__name__ for kind in (*sides, *get_args(events.Event), *get_args(content.ContentPart))]:
        assert f"\n### {name}\n" in page
    said = (
        described_fields(protocol.GenerateRequest).keys()
        | described_fields(protocol.SamplingOverrides).keys()
    )
    asked = (protocol.GenerateRequest, protocol.SamplingOverrides)
    assert said == {field.name for kind in asked for field in msgspec.structs.fields(kind)}


def test_the_protocol_pages_example_is_what_the_gateway_and_a_client_say() -> None:
    blocks = re.findall(r"```hex (client|gateway)\n(.*?)```", read("docs/protocol.md"), re.DOTALL)
    decoders = {
        "client": msgspec.msgpack.Decoder(protocol.ClientMessage),
        "gateway": msgspec.msgpack.Decoder(protocol.ServerMessage),
    }
    messages = []
    for side, digits in blocks:
        frame = bytes.fromhex(digits)
        size, body = int.from_bytes(frame[: protocol.LENGTH_BYTES], "big"), frame[protocol.LENGTH_BYTES :]
        assert size == len(body)
        messages.append(decoders[side].decode(body))
    submit = messages.pop(2)
    assert messages == [
        protocol.Hello(protocol.PROTOCOL_VERSION, "doc"),
        protocol.Welcome(
            protocol.PROTOCOL_VERSION,
            Config().gateway.limits.request_bytes,
            Config().media.max_item_bytes,
            Config().media.max_request_bytes,
            protocol.MAX_PIECE_BYTES,
            resumes=True,
        ),
        protocol.Reply(7, events.AcceptedEvent(request_id="a1")),
        protocol.Reply(7, events.TextEvent(token_ids=[5], text=" hi")),
    ]
    assert submit.id == 7
    assert msgspec.msgpack.decode(submit.request, type=protocol.GenerateRequest) == protocol.GenerateRequest(
        messages=[content.ChatMessage("user", "Hello")], speech=False
    )
