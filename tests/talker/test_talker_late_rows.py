"""Speech may end before the text does: at its limit, or at an end token."""

import itertools

import pytest

from omnirelay.errors import RepeatedMessageError, SequenceError
from tests.support.answers import Reference, random_prompt
from tests.support.talking import TalkerRig, rows_of, start_of
from tests.support.thinking import speech_of


def test_rows_behind_the_end_of_speech_are_taken_until_the_last(
    talker: TalkerRig, reference: Reference
) -> None:
    answer = reference.answer(random_prompt(7, 0), thinker_max_new_tokens=20, talker_max_new_tokens=60)
    first, *late = rows_of("short", answer, answer.prompt_positions, answer.prompt_positions + 1)
    start = start_of("short", answer, speech_of(max_tokens=1))
    for message in (start, first):
        talker.service.accept(message)
    talker.run()
    assert talker.codes("short") == answer.codes[:1]
    with pytest.raises(RepeatedMessageError):
        talker.service.accept(start)
    for message in late:
        talker.service.accept(message)
    assert late[-1].last
    with pytest.raises(SequenceError, match="not known here"):
        talker.service.accept(late[-1])
    talker.check_empty()


def test_an_abort_ends_the_wait_for_late_rows(talker: TalkerRig, reference: Reference) -> None:
    answer = reference.answer(random_prompt(7, 0), thinker_max_new_tokens=20, talker_max_new_tokens=60)
    talker.service.accept(start_of("short", answer, speech_of(max_tokens=1)))
    messages = rows_of("short", answer, answer.prompt_positions, answer.prompt_positions + 1)
    for message in itertools.islice(messages, 1):
        talker.service.accept(message)
    talker.run()
    talker.service.abort("short")
    with pytest.raises(SequenceError, match="not known here"):
        talker.service.accept(next(messages))
