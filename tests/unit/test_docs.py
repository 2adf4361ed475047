"""The documentation says what the code says."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from pydantic import BaseModel

from omnirelay import content, events, protocol, status
from omnirelay.cli.main import build_parser
from omnirelay.errors import OmniRelayError
from shared.config import Config, StageConfig
from shared.messages import StageLimits, StageLoad
from tests.support.children import ROOT

PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
ROW = re.compile(r"^\| `([a-zA-Z0-9_.]+)` \| `([^`]+)` \| .+ \|$", re.MULTILINE)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def schema(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the configuration with its default; keys that all stages have are named once."""
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from schema(type(default), f"{prefix}{name}.")
        elif issubclass(section, StageConfig) and name in StageConfig.model_fields.keys() - {"inbox", "http"}:
            yield f"stages.STAGE.{name}", default
        else:
            key = re.sub(r"^stages\.\w+\.engine\.", "stages.STAGE.engine.", prefix + name)
            yield re.sub(r"^cluster\.(thinker|talker|token2wav)\.", "cluster.STAGE.", key), default


def family(base: type[OmniRelayError]) -> Iterator[type[OmniRelayError]]:
    yield base
    for child in base.__subclasses__():
        yield from family(child)


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_configuration_page_has_every_key_with_its_default_and_no_other() -> None:
    told = ROW.findall(read("docs/configuration.md"))
    assert len(told) == len(dict(told))
    assert {key: yaml.safe_load(value) for key, value in told} == dict(schema(Config)), (
        "write each key into docs/configuration.md, with its default"
    )


def test_every_error_code_is_in_the_page_of_errors_and_no_other() -> None:
    told = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", read("docs/errors.md"), re.MULTILINE)
    kinds = sorted((kind.code, kind.__name__) for kind in family(OmniRelayError))
    assert sorted(told) == kinds, "write each error into docs/errors.md, with its class"


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


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The long options of a command, and of its own subcommands."""
    yield from (option for option in parser._option_string_actions if option.startswith("--"))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from options(each)


def test_the_page_of_commands_shows_every_command_and_only_options_that_exist() -> None:
    commands = next(
        action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    shown: dict[str, set[str]] = {name: set() for name in commands}
    one_line_each = re.sub(r"\n +\[", " [", read("docs/cli.md"))
    for name, rest in re.findall(r"(?<!from )\bomnirelay ([a-z]+(?:-[a-z]+)*)\b([^`#\n]*)", one_line_each):
        assert name in commands, name
        shown[name].update(re.findall(r"--[a-z-]+", rest))
    for name, parser in commands.items():
        assert shown[name] == set(options(parser)) - {"--help"}, (
            f"write each option of `omnirelay {name}` into docs/cli.md, 'All options'"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_are_understood(page: Path) -> None:
    parser = build_parser()
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    pieces = re.findall(r"`[^`]+`|^ {4}.+$", text, re.MULTILINE)
    code = "\n".join(" ".join(piece.split()) for piece in pieces)
    for call in re.findall(r"(?<!from )\bomnirelay ([a-z]+(?:-[a-z]+)* [^`|<>()\n]+)", code):
        if "[" not in call:
            parser.parse_args(shlex.split(call, comments=True))


def test_every_part_of_ci_is_documented_and_runs_in_the_workflow() -> None:
    (parts,) = re.findall(r"^every=\((.*)\)$", read(".ci/run"), re.MULTILINE)
    table = read("CONTRIBUTING.md").partition("\n| part | same as |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE) == parts.split()
    jobs = yaml.safe_load(read(".github/workflows/ci.yaml"))["jobs"]
    assert {*jobs["part"]["strategy"]["matrix"]["part"], "compose"} == set(parts.split())
    for name in ("part", "compose"):
        assert jobs[name]["steps"][-1]["run"].startswith(".ci/run ")


STRUCTS = [
    *get_args(protocol.ClientMessage),
    *get_args(protocol.ServerMessage),
    *get_args(events.Event),
    protocol.GenerateRequest,
    protocol.PartialAnswer,
    *get_args(content.ContentPart),
    content.ChatMessage,
    protocol.SamplingOverrides,
    status.StatusReport,
    status.StageStatus,
    status.GatewayStatus,
    StageLoad,
    StageLimits,
]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_the_protocol_page_names_every_message_and_field(struct: type[msgspec.Struct]) -> None:
    page = read("docs/protocol-messages.md")
    config = struct.__struct_config__
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    missing = [name for name in [*names, *([config.tag] if config.tag else [])] if f"`{name}`" not in page]
    assert missing == [], f"write these of {struct.__name__} into docs/protocol-messages.md"


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
