"""The gateway is killed, frozen, stopped or cut off while it has requests: no answer is lost or differs."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from omnirelay import Client, GenerateRequest, SamplingOverrides
from omnirelay.client.media import image
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import GatewayUnreachableError, InvalidRequestError
from omnirelay.protocol import PartialAnswer
from shared.messages import STAGES
from tests.chaos.streams import Heard, Stream, heard_of, request_for
from tests.support.children import ROOT
from tests.support.processes import Processes, wait_until
from tests.support.proxy import Relay
from tests.support.stack import make_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STREAMS = 8
PLACES = 6
"""At the stages: two of the eight wait."""
ANSWERED_S = 240.0
PICTURE = ROOT / "ops" / "assets" / "picture.png"


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    gateway = {"resume_wait_s": 120.0, "limits": {"max_active": PLACES}}
    with Processes(
        make_config(tiny_checkpoint, gateway=gateway), tmp_path_factory.mktemp("loss")
    ) as processes:
        for name in ("gateway", *STAGES):
            processes.start(name)
        wait_until(processes.ready, "the stack is ready")
        yield processes


@pytest.fixture(scope="module")
def undisturbed(stack: Processes) -> list[Heard]:
    with Client(stack.address) as client:
        return heard_of([Stream(client, number) for number in range(STREAMS)])


def check(heard: list[Heard], undisturbed: list[Heard]) -> None:
    """Ids, chunk numbers and every sample are those of the undisturbed run."""
    found = {
        number: each.differences(other)
        for number, (each, other) in enumerate(zip(heard, undisturbed, strict=True))
    }
    assert {number: what for number, what in found.items() if what} == {}


def all_taken(streams: list[Stream]) -> bool:
    """Every request has a place, and so many of them wait."""
    return all(stream.request_id for stream in streams)


def thinks(streams: list[Stream]) -> bool:
    return any(stream.heard.told for stream in streams)


def speaks(streams: list[Stream]) -> bool:
    return sum(len(stream.heard.chunks) for stream in streams) >= 4


def almost_done(streams: list[Stream]) -> bool:
    return any(sum(chunk.size for chunk in stream.heard.chunks) > 0.7 * 192 * 480 for stream in streams)


STATES: list[Callable[[list[Stream]], bool]] = [all_taken, thinks, speaks, almost_done]


def restart(stack: Processes) -> None:
    """Another gateway takes the place of one that has ended; the stages join it."""
    stack.running.pop("gateway").wait(60)
    stack.start("gateway")


@pytest.mark.parametrize("reached", STATES, ids=lambda each: each.__name__)
def test_killed_and_started_again(
    stack: Processes, undisturbed: list[Heard], reached: Callable[[list[Stream]], bool]
) -> None:
    with Client(stack.address) as client:
        streams = [Stream(client, number) for number in range(STREAMS)]
        wait_until(lambda: reached(streams), "it has come so far", 60)
        stack.running["gateway"].kill()
        restart(stack)
        check(heard_of(streams), undisturbed)
    wait_until(lambda: idle(stack), "nothing is left", 60)


def test_frozen_until_its_clients_have_given_it_up(stack: Processes, undisturbed: list[Heard]) -> None:
    """It goes on later: then it still has the requests of those who left, and ends them."""
    with Client(stack.address) as client:
        streams = [Stream(client, number) for number in range(STREAMS)]
        wait_until(lambda: speaks(streams), "speech comes", 60)
        before = client._client._connection
        stack.signal("gateway", signal.SIGSTOP)
        try:
            wait_until(lambda: before is None or before.ended is not None, "the client gives it up", 60)
        finally:
            stack.signal("gateway", signal.SIGCONT)
        check(heard_of(streams), undisturbed)
    wait_until(lambda: idle(stack), "nothing is left", 60)


def test_cut_off(stack: Processes, undisturbed: list[Heard]) -> None:
    """Nobody is told: the gateway lives, and has the requests twice until it ends those before."""
    with Relay(stack.address) as relay, Client(relay.address) as client:
        streams = [Stream(client, number) for number in range(STREAMS)]
        wait_until(lambda: speaks(streams), "speech comes", 60)
        relay.cut()
        check(heard_of(streams), undisturbed)
        wait_until(lambda: idle(stack), "nothing is left", 60)


def test_stopped_with_no_time_to_finish(stack: Processes, undisturbed: list[Heard]) -> None:
    with Client(stack.address) as client:
        streams = [Stream(client, number) for number in range(STREAMS)]
        wait_until(lambda: speaks(streams), "speech comes", 60)
        stack.signal("gateway", signal.SIGTERM)
        wait_until(lambda: "may finish within" in stack.log("gateway"), "it drains", 60)
        # The second one ends the drain.
        stack.signal("gateway", signal.SIGTERM)
        restart(stack)
        check(heard_of(streams), undisturbed)
    wait_until(lambda: idle(stack), "nothing is left", 60)


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(
            messages=[ChatMessage("user", [image(str(PICTURE)), TextPart("What is that?")])],
            text_sampling=SamplingOverrides(max_tokens=24, min_tokens=24),
            codec_sampling=SamplingOverrides(max_tokens=150, min_tokens=150),
            chunk_frames=[12, 24],
            seed=3,
        ),
        GenerateRequest(
            prompt_token_ids=[7] * 20,
            speech=False,
            text_sampling=SamplingOverrides(
                max_tokens=300, min_tokens=300, temperature=0.8, presence_penalty=1.0, logprobs=1
            ),
            seed=4,
        ),
    ],
    ids=["media", "text"],
)
def test_any_request_goes_on(stack: Processes, request_: GenerateRequest) -> None:
    with Client(stack.address) as client:
        before = Stream(client, 0, request_)
        (whole,) = heard_of([before])
        stream = Stream(client, 0, request_)
        wait_until(lambda: len(stream.heard.told) >= 8, "text comes", 60)
        stack.running["gateway"].kill()
        restart(stack)
        (heard,) = heard_of([stream])
        check([heard], [whole])
    wait_until(lambda: idle(stack), "nothing is left", 60)


def test_a_seed_that_the_gateway_drew_is_kept(stack: Processes) -> None:
    """And cuts that it chose: the whole equals a run with that seed and those cuts."""
    asked = msgspec.structs.replace(request_for(1), seed=None, chunk_frames=[])
    with Client(stack.address) as client:
        stream = Stream(client, 1, asked)
        wait_until(lambda: len(stream.heard.chunks) >= 2, "speech comes", 60)
        stack.running["gateway"].kill()
        restart(stack)
        (heard,) = heard_of([stream])
        assert heard.seed is not None
        frames = [chunk.size // 480 for chunk in heard.chunks]
        frames[-1] = max(frames[-1] // 12, 1) * 12
        again = msgspec.structs.replace(asked, seed=heard.seed, chunk_frames=frames)
        check([heard], heard_of([Stream(client, 1, again)]))


def test_what_no_answer_can_be_is_refused_and_harms_nobody(
    stack: Processes, undisturbed: list[Heard]
) -> None:
    """What only the stages can tell is refused by them, and no engine ends."""
    asked = request_for(0)
    pids = {name: process.pid for name, process in stack.running.items()}

    def claim(**fields: object) -> GenerateRequest:
        partial = msgspec.convert({"request_id": "earlier", **fields}, PartialAnswer)
        return msgspec.structs.replace(asked, resume=partial, resumable=True)

    with Client(stack.address) as client:
        streams = [Stream(client, number) for number in range(4)]
        for wrong in (
            claim(text_token_ids=[1, 2], text_finish_reason="stop"),
            claim(text_token_ids=[2**31 - 1]),
            claim(codec_token_ids=[2**31 - 1]),
            claim(codec_token_ids=[1] * 30, codec_finish_reason="stop", chunk_samples=[480 * 5, 480 * 19]),
            claim(chunk_samples=[480 * 5, 480 * 12]),
            claim(chunk_samples=[480 * 193]),
            claim(codec_token_ids=[8294]),
        ):
            with pytest.raises(InvalidRequestError):
                client.chat(wrong).result()
        # False, but possible: it is computed as claimed, or not at all.
        for odd in (
            claim(text_token_ids=[1] * 40),
            claim(codec_token_ids=[5] * 191, chunk_samples=[480 * 12]),
            claim(codec_token_ids=[1] * 24, codec_finish_reason="stop", chunk_samples=[480 * 5, 480 * 19]),
        ):
            with suppress(InvalidRequestError):
                client.chat(odd).result()
        check(heard_of(streams), undisturbed[:4])
    wait_until(lambda: idle(stack), "nothing is left", 60)
    assert {name: process.pid for name, process in stack.running.items()} == pids
    assert all(process.poll() is None for process in stack.running.values())


def test_without_reconnecting_the_clients_know_at_once(stack: Processes) -> None:
    with Client(stack.address, reconnect_s=0) as client:
        streams = [Stream(client, number) for number in range(STREAMS)]
        wait_until(lambda: thinks(streams), "text comes", 60)
        stack.running["gateway"].kill()
        restart(stack)
        until = time.monotonic() + ANSWERED_S
        assert all(isinstance(each.result(until).error, GatewayUnreachableError) for each in streams)
    wait_until(stack.ready, "the stages have joined the new gateway", 60)
    wait_until(lambda: idle(stack), "no orphan is left", 60)


def idle(stack: Processes) -> bool:
    """Neither the gateway nor a stage has work."""
    report = stack.status()
    if report is None:
        return False
    open_states = ("received", "queued", "thinking", "talking", "synthesizing")
    return not any(report.requests[state] for state in open_states) and all(
        each.state == "ready"
        and not (each.load.running or each.load.waiting or each.load.held_bytes or each.load.outbox_bytes)
        for each in report.stages
    )
