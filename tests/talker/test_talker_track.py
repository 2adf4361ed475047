"""The conditioning track as it arrives: nothing gets lost, nothing is read that is not there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnirelay.errors import RepeatedMessageError, SequenceError
from services.talker.track import ConditioningTrack
from shared.vllm.tensors import pack_rows

WIDTH = 3


def rows_at(start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and positions that tell where they belong; a position's three ids differ."""
    index = torch.arange(start, start + count)
    rows = index.unsqueeze(1).float() + torch.arange(WIDTH) / 10
    return rows, torch.stack([index, 2 * index, 3 * index]).to(torch.int32)


def add(track: ConditioningTrack, seq: int, count: int, last: bool = False) -> None:
    track.expect(seq, track.length)
    rows, positions = rows_at(track.length, count)
    track.append(pack_rows(rows.to(track.read(0, 0)[0].dtype)), positions, last)


@given(
    prompt=st.integers(1, 40),
    counts=st.lists(st.one_of(st.integers(0, 5), st.integers(200, 700)), max_size=8),
    closed=st.booleans(),
    data=st.data(),
)
def test_what_was_appended_is_read(prompt: int, counts: list[int], closed: bool, data: st.DataObject) -> None:
    track = ConditioningTrack(prompt, WIDTH, torch.float32)
    for seq, count in enumerate(counts):
        add(track, seq, count, last=closed and seq == len(counts) - 1)
    total = sum(counts)
    assert track.length == total
    assert track.nbytes >= max(total, prompt) * (WIDTH * 4 + 3 * 4)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    rows, positions = track.read(start, stop)
    expected_rows, expected_positions = rows_at(start, stop - start)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(positions, expected_positions)
    assert rows.dtype == torch.float32
    assert positions.dtype == torch.int32


@given(length=st.integers(1, 300), start=st.integers(0, 320), count=st.integers(1, 40))
def test_past_its_end_the_last_row_repeats_and_its_position_runs_on(
    length: int, start: int, count: int
) -> None:
    track = ConditioningTrack(1, WIDTH, torch.bfloat16)
    add(track, 0, length, last=True)
    assert track.available == float("inf")
    rows, positions = track.read(start, start + count)
    assert rows.dtype == torch.bfloat16
    last_row, last_position = rows_at(length - 1, 1)
    for offset in range(count):
        position = start + offset
        beyond = position - (length - 1)
        expected_row, expected_position = rows_at(position, 1)
        if beyond > 0:
            expected_row, expected_position = last_row, last_position + beyond
        assert torch.equal(rows[offset], expected_row[0].bfloat16())
        assert torch.equal(positions[:, offset], expected_position[:, 0])


def test_nothing_is_read_that_is_not_there() -> None:
    track = ConditioningTrack(2, WIDTH, torch.float32)
    add(track, 0, 5)
    assert track.available == 5
    with pytest.raises(SequenceError, match="position 5 has no row yet, 5 are there"):
        track.read(4, 6)


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6), data=st.data())
def test_only_the_next_message_is_expected(counts: list[int], data: st.DataObject) -> None:
    track = ConditioningTrack(2, WIDTH, torch.float32)
    for seq, count in enumerate(counts):
        add(track, seq, count)
    seq = data.draw(st.integers(0, len(counts) + 3))
    start = data.draw(st.integers(0, track.length + 3))
    if seq < len(counts):
        with pytest.raises(RepeatedMessageError):
            track.expect(seq, start)
    elif (seq, start) != (len(counts), track.length):
        with pytest.raises(SequenceError) as caught:
            track.expect(seq, start)
        assert not isinstance(caught.value, RepeatedMessageError)
    else:
        track.expect(seq, start)


def test_nothing_follows_the_last_message() -> None:
    track = ConditioningTrack(2, WIDTH, torch.float32)
    add(track, 0, 3, last=True)
    with pytest.raises(SequenceError, match="after the last"):
        track.expect(1, 3)
    with pytest.raises(RepeatedMessageError):
        track.expect(0, 0)


@pytest.mark.parametrize(("length", "speakable"), [(0, False), (3, False), (4, True), (9, True)])
def test_a_closed_track_needs_the_prompt_to_be_spoken(length: int, speakable: bool) -> None:
    track = ConditioningTrack(4, WIDTH, torch.float32)
    add(track, 0, length)
    assert track.speakable
    add(track, 1, 0, last=True)
    assert track.speakable == speakable


def test_growth_is_rare() -> None:
    """Rows that come one by one are not copied each time."""
    track = ConditioningTrack(2, WIDTH, torch.float32)
    sizes = set()
    for seq in range(2000):
        add(track, seq, 1)
        sizes.add(track.nbytes)
    assert len(sizes) <= 5
    assert torch.equal(track.read(0, 2000)[0], rows_at(0, 2000)[0])


def test_rows_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    track = ConditioningTrack(8, WIDTH, torch.float32)
    rows, positions = rows_at(0, 8)
    payload = pack_rows(rows)
    with monkeypatch.context() as patched:
        # No tensor between the received frame and the track.
        patched.setattr(torch, "empty", None)
        track.append(payload, positions, last=True)
    assert torch.equal(track.read(0, 8)[0], rows)
