"""What the talker refuses, drops or fails is one request's matter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from omnirelay.errors import (
    BusyError,
    InvalidRequestError,
    PayloadError,
    PromptTooLongError,
    RepeatedMessageError,
    RequestError,
    SequenceError,
    StageFailedError,
)
from services.talker.track import ConditioningTrack
from shared.messages import ConditioningRows
from shared.messages.payloads import AdditionalInformationPayload
from shared.vllm.tensors import pack_positions, pack_rows
from tests.support.answers import Reference
from tests.support.children import Patch
from tests.support.talking import TalkerRig, ask, rows_message, rows_of, start_of
from tests.support.thinking import speech_of

POSITION_BYTES = 3 * 4


@pytest.fixture
def kept(talker: TalkerRig, reference: Reference) -> Callable[[], None]:
    """A request in work while another goes wrong; the function says that it was not harmed."""
    answer = ask(reference, 33)
    talker.take("kept", answer)
    talker.advance(5)

    def check() -> None:
        talker.run()
        assert talker.codes("kept") == answer.codes

    return check


WRONG_ROWS: dict[str, tuple[Callable[[ConditioningRows], ConditioningRows], str]] = {
    "width": (
        lambda message: msgspec.structs.replace(message, rows=pack_rows(torch.zeros(9, 127))),
        "rows.shape: rows are 127 wide, this stage takes 128",
    ),
    "dtype": (
        lambda message: msgspec.structs.replace(
            message, rows=pack_rows(torch.zeros(9, 128, dtype=torch.bfloat16))
        ),
        "rows.dtype: rows are bfloat16, this stage takes float32",
    ),
    "missing positions": (
        lambda message: msgspec.structs.replace(message, additional=AdditionalInformationPayload({})),
        "additional.mrope_positions: is missing",
    ),
    "too few positions": (
        lambda message: msgspec.structs.replace(message, additional=pack_positions(torch.zeros(3, 8))),
        r"additional.mrope_positions: is int32 \(3, 8\), expected int32 \(3, 9\)",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_rows_that_do_not_fit_are_refused(
    talker: TalkerRig,
    reference: Reference,
    kept: Callable[[], None],
    change: Callable[[ConditioningRows], ConditioningRows],
    words: str,
) -> None:
    answer = ask(reference, 7)
    talker.service.accept(start_of("bad", answer))
    right, *rest = rows_of("bad", answer, answer.prompt_positions)
    with pytest.raises(PayloadError, match=words):
        talker.service.accept(change(right))
    # Nothing of it was taken: the right one can still come.
    talker.accept(right, *rest)
    kept()
    assert talker.codes("bad") == answer.codes


def test_rows_out_of_order_are_refused(
    talker: TalkerRig, reference: Reference, kept: Callable[[], None]
) -> None:
    answer = ask(reference, 7)
    messages = list(rows_of("a", answer, 4, answer.prompt_positions))
    with pytest.raises(SequenceError, match="request a, which is not known here"):
        talker.service.accept(messages[0])
    talker.service.accept(start_of("a", answer))
    with pytest.raises(RepeatedMessageError, match="a is in work already"):
        talker.service.accept(start_of("a", answer))
    with pytest.raises(SequenceError, match="expected number 0 from position 0"):
        talker.service.accept(messages[1])
    talker.service.accept(messages[0])
    with pytest.raises(RepeatedMessageError, match="number 0 came twice"):
        talker.service.accept(messages[0])
    with pytest.raises(SequenceError, match="from position 5, expected number 1 from position 4"):
        talker.service.accept(msgspec.structs.replace(messages[1], start=5))
    talker.service.accept(messages[1])
    talker.service.accept(messages[2])
    with pytest.raises(SequenceError, match="rows after the last ones"):
        talker.service.accept(rows_message("a", answer.rows[:1], answer.positions[:, :1], seq=3, last=False))
    kept()
    assert talker.codes("a") == answer.codes


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        (2302, {}, PromptTooLongError),
        (5000, {}, PromptTooLongError),
        (7, {"temperature": 3.0}, InvalidRequestError),
    ],
)
def test_what_cannot_be_spoken_is_refused(
    talker: TalkerRig,
    reference: Reference,
    kept: Callable[[], None],
    prompt: int,
    sampling: dict[str, Any],
    error: type[RequestError],
) -> None:
    answer = replace(ask(reference, 7), prompt=[1] * prompt)
    held = talker.scheduler.held_bytes
    with pytest.raises(error):
        talker.service.accept(start_of("bad", answer, speech_of(**sampling)))
    assert talker.scheduler.held_bytes == held
    assert talker.service.active_requests() == ["kept"]
    kept()
    assert "bad" not in talker.starts


def test_rows_are_held_within_a_budget(talker: TalkerRig, reference: Reference, monkeypatch: Patch) -> None:
    answer = ask(reference, 33)
    bytes_a_position = 128 * 4 + POSITION_BYTES
    talker.service.accept(start_of("kept", answer))
    held = talker.scheduler.held_bytes
    assert held >= answer.prompt_positions * bytes_a_position
    monkeypatch.setattr(talker.service, "_max_held_bytes", held + answer.prompt_positions * 128 * 4 - 1)
    with pytest.raises(BusyError, match=f"holds {held} bytes"):
        talker.service.accept(start_of("too much", answer))
    # One that would not fit alone is not waited for.
    monkeypatch.setattr(talker.service, "_max_held_bytes", answer.prompt_positions * 128 * 4 - 1)
    with pytest.raises(PromptTooLongError, match="max_held_bytes"):
        talker.service.accept(start_of("never", answer))
    assert talker.scheduler.held_bytes == held
    # What was taken is never refused, however much it becomes.
    talker.accept(*rows_of("kept", answer, 1, 20))
    monkeypatch.undo()
    talker.service.accept(start_of("later", answer))
    talker.accept(*rows_of("later", answer))
    talker.run()
    assert talker.codes("kept") == talker.codes("later") == answer.codes


def test_the_most_that_a_message_may_ask_for_is_served(
    talker: TalkerRig, reference: Reference, kept: Callable[[], None]
) -> None:
    extremes: dict[str, Any] = {
        "max_tokens": 2**31 - 1,
        "min_tokens": 2**31 - 1,
        "temperature": 2.0,
        "top_k": 2**20,
        "top_p": 1e-9,
        "repetition_penalty": 10.0,
        "seed": 2**63 - 1,
    }
    answer = replace(ask(reference, 2000), prompt=[1] * 2270)
    rows = torch.cat([answer.rows[:270], answer.rows])
    talker.take(
        "a", replace(answer, rows=rows, positions=torch.arange(rows.shape[0]).expand(3, -1)), **extremes
    )
    kept()
    assert talker.reason("a") == "length"
    assert len(talker.codes("a")) == talker.service.limits.max_positions - 2272


@pytest.mark.parametrize("apart", [True, False])
def test_an_empty_reply_has_no_codes(
    talker: TalkerRig, reference: Reference, kept: Callable[[], None], apart: bool
) -> None:
    """The thinker's reply was one token, which has no row: the prompt's rows and the voice's are all."""
    answer = ask(reference, 7)
    empty = replace(answer, rows=answer.rows[:8], positions=answer.positions[:, :8])
    talker.service.accept(start_of("empty", empty))
    for message in rows_of("empty", empty, *([8] if apart else [])):
        talker.accept(message)
        talker.step()
    assert [(delta.token_ids, delta.finish_reason) for delta in talker.deltas["empty"]] == [([], "stop")]
    assert [(message.token_ids, message.last) for message in talker.sent["empty"]] == [([], True)]
    assert talker.service.active_requests() == ["kept"]
    kept()


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_abort_frees_rows_and_blocks(
    talker: TalkerRig, reference: Reference, kept: Callable[[], None], steps: int
) -> None:
    before, free = talker.scheduler.held_bytes, talker.steps.free_blocks
    # Shorter than a piece: it is computed beside another reply.
    answer = ask(reference, 100)
    talker.take("dropped", answer)
    talker.advance(steps)
    assert talker.scheduler.held_bytes > before
    assert (talker.steps.free_blocks < free) == (steps > 0)
    assert len(talker.codes("dropped")) == steps
    sent = len(talker.deltas["dropped"])
    talker.service.abort("dropped")
    talker.service.abort("unknown")
    assert talker.scheduler.held_bytes == before
    assert talker.steps.free_blocks == free
    kept()
    assert len(talker.deltas["dropped"]) == sent
    talker.check_empty()


def test_abort_while_rows_are_missing(talker: TalkerRig, reference: Reference) -> None:
    answer = ask(reference, 33)
    talker.service.accept(start_of("early", answer))
    talker.service.accept(start_of("late", answer))
    first, *_ = rows_of("late", answer, answer.prompt_positions + 2)
    talker.service.accept(first)
    talker.settle()
    assert len(talker.codes("late")) == 3
    for name in ("early", "late"):
        talker.service.abort(name)
    talker.run()
    with pytest.raises(SequenceError, match="not known here"):
        talker.service.accept(first)


class BrokenTrack(ConditioningTrack):
    """A track that cannot be read beyond a position."""

    fault: Exception = RuntimeError("torn")
    readable = 0

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if stop > self.readable:
            raise self.fault
        return super().read(start, stop)


@pytest.mark.parametrize("fault", [RuntimeError("torn"), SequenceError("torn"), KeyError("torn")], ids=repr)
@pytest.mark.parametrize("codes", [0, 5])
def test_an_exception_while_preparing_one_request_fails_that_one(
    talker: TalkerRig,
    reference: Reference,
    monkeypatch: Patch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    codes: int,
) -> None:
    """In the step of its prompt, or while it speaks."""
    answers = {f"r{length}": ask(reference, length) for length in (33, 64)}
    broken = ask(reference, 7)
    with monkeypatch.context() as patch:
        patch.setattr("services.talker.service.ConditioningTrack", BrokenTrack)
        patch.setattr(BrokenTrack, "fault", fault)
        patch.setattr(BrokenTrack, "readable", 8 + codes)
        talker.take("broken", broken)
        for name, answer in answers.items():
            patch.setattr("services.talker.service.ConditioningTrack", ConditioningTrack)
            talker.take(name, answer)
        failures: dict[str, Exception] = {}
        while "broken" not in failures:
            assert talker.service.ready
            failures |= talker.step()
    assert failures.keys() == {"broken"}
    assert isinstance(failures["broken"], SequenceError | StageFailedError)
    assert "torn" in str(failures["broken"])
    assert "torn" in caplog.text
    assert talker.codes("broken") == broken.codes[:codes]
    talker.service.abort("broken")
    talker.run()
    assert "broken" not in talker.finished
    for name, answer in answers.items():
        assert talker.codes(name) == answer.codes


def test_bfloat16_rows_are_taken_as_they_are(half_talker: TalkerRig, reference: Reference) -> None:
    answer = ask(reference, 33)
    rows = answer.rows.to(torch.bfloat16)
    half = replace(answer, rows=rows)
    half_talker.service.accept(start_of("a", half, speech_of(min_tokens=60)))
    capacity = half_talker.scheduler.held_bytes / (2 * 128 + POSITION_BYTES)
    assert capacity == int(capacity) >= answer.prompt_positions
    with pytest.raises(PayloadError, match="rows are float32, this stage takes bfloat16"):
        half_talker.service.accept(next(rows_of("a", answer)))
    half_talker.accept(*rows_of("a", half))
    half_talker.step()
    # What lies in KV memory is what came, bit for bit.
    engine_id = half_talker.service._speeches["a"].engine_id
    slots = half_talker.scheduler.slot_map.slots(engine_id, 0, answer.prompt_positions)
    model = half_talker.runner.model
    kept, positions = model.conditioning.gather(slots)
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, rows[: answer.prompt_positions])
    assert torch.equal(positions, answer.positions[:, : answer.prompt_positions])
    half_talker.run()
    assert len(half_talker.codes("a")) == 60
    # Rounding changes some codes sooner or later, not the first one.
    assert half_talker.codes("a")[0] == answer.codes[0]
