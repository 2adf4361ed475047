"""The talker is given what transformers gives it: users' turns and the reply, however the rows come."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.families.qwen3_omni.thinker import HEADER, PADS, ReplyTrackWriter, Roles
from shared.vllm.tensors import unpack_positions, unpack_rows
from tests.qwen3_omni.tiny import (
    ASSISTANT,
    IM_END,
    IM_START,
    PAD,
    TEXT_BEGIN,
    TEXT_END,
    USER,
    Reference,
    Spoken,
    prompt_of,
)

ROLES = Roles(IM_START, USER, ASSISTANT)
TURNS = [*prompt_of(40, 41, system=1), 50, IM_END, 10]
PROMPTS = {
    "one turn": prompt_of(40, 41),
    "with a system's": prompt_of(40, system=4),
    "several turns": [*TURNS, *prompt_of(60, 61, 62)],
}
TEXT = 6


def project(reference: Reference, ids: list[int]) -> torch.Tensor:
    """Rows ``[n, width]`` of text."""
    model = reference.model
    with torch.no_grad():
        rows: torch.Tensor = model.talker.text_projection(
            model.thinker.get_input_embeddings()(torch.tensor(ids))
        )
    return rows


class Asked(NamedTuple):
    """A prompt, what transformers says to it, and the rows of all that."""

    prompt: list[int]
    spoken: Spoken
    rows: torch.Tensor
    opening: torch.Tensor
    closing: torch.Tensor


@pytest.fixture(scope="module", params=PROMPTS)
def asked(request: pytest.FixtureRequest, reference: Reference) -> Asked:
    prompt = PROMPTS[request.param]
    spoken = reference.speak(prompt, "ethan", TEXT, 2)
    sequence = [*prompt, *reference.text(prompt, TEXT)[:-1]]
    opening = project(reference, [PAD] * PADS + [TEXT_BEGIN])
    return Asked(prompt, spoken, project(reference, sequence), opening, project(reference, [TEXT_END, PAD]))


@settings(max_examples=50, deadline=None)
@given(cuts=st.sets(st.integers(1, 60)))
def test_the_track_is_what_transformers_gives(asked: Asked, cuts: set[int]) -> None:
    prompt, spoken, rows, opening, closing = asked
    writer = ReplyTrackWriter("a", prompt, ROLES, opening, closing)
    assert writer.prompt_rows == spoken.prompt_rows
    positions = torch.arange(len(rows)).expand(3, -1)
    borders = [0, *sorted(cut for cut in cuts if cut < len(rows)), len(rows)]
    messages = [
        writer.rows(start, rows[start:stop], positions[:, start:stop])
        for start, stop in itertools.pairwise(borders)
    ]
    messages.append(writer.close())
    found = torch.cat([unpack_rows(each.rows) for each in messages])
    ids = torch.cat([unpack_positions(each.additional, each.rows.shape[0]) for each in messages], dim=1)
    torch.testing.assert_close(found, spoken.rows, atol=1e-5, rtol=0)
    assert ids.tolist() == [list(range(len(found)))] * 3
    sizes = [each.rows.shape[0] for each in messages]
    assert [each.start for each in messages] == [0, *itertools.accumulate(sizes[:-1])]
    assert [each.last for each in messages] == [False] * (len(messages) - 1) + [True]


def test_turns_of_users_are_moved_together() -> None:
    prompt = [*TURNS, *prompt_of(60)]
    writer = ReplyTrackWriter("a", prompt, ROLES, torch.zeros(PADS + 1, 2), torch.zeros(2, 2))
    positions = torch.arange(len(prompt)).repeat(3, 1)
    # A picture of three columns in the first turn of the user: what follows is three positions earlier.
    positions[:, 9:12] = torch.tensor([[9, 9, 9], [9, 9, 9], [9, 10, 11]])
    positions[:, 12:] = torch.arange(12, 12 + len(prompt) - 12)
    message = writer.rows(0, torch.zeros(len(prompt), 2), positions)
    ids = unpack_positions(message.additional, message.rows.shape[0])
    assert ids[0, :7].tolist() == [0, 1, 2, 3, 3, 3, 6]
    assert ids[2, :7].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert ids[0, 7:].tolist() == list(range(7, 7 + writer.prompt_rows - 7 + HEADER + PADS + 1))
