"""No message of rows is larger than the talker takes, however many rows a step brings."""

import pytest

from tests.support.answers import random_prompt
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

LIMIT = 40 * 512
"""Bytes of 40 rows of the tiny thinker."""


def test_many_rows_at_once_leave_in_messages_within_the_limit(
    thinker: ThinkerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(300)
    thinker.run(thinker_request("whole", prompt, speech=speech_of()))
    assert max(message.rows.data.nbytes for message in thinker.tracks["whole"]) > LIMIT
    monkeypatch.setattr(thinker.service._rows, "_max_payload_bytes", LIMIT)
    # The second finds its prompt in the prefix cache: one step brings all of its rows.
    thinker.run(thinker_request("cut", prompt, speech=speech_of()))
    assert max(message.rows.data.nbytes for message in thinker.tracks["cut"]) <= LIMIT
    assert thinker.rows("cut").equal(thinker.rows("whole"))
    assert thinker.positions("cut").equal(thinker.positions("whole"))
