"""Speech that lasts several times as long, for models that a machine computes too slowly."""

import os
import subprocess
import sys

import pytest

from benchmarks.adapters.slowed import VARIABLE
from benchmarks.measure.answer import MeasuredAnswer, timing

SHOW = """
import benchmarks.adapters.slowed
from shared.messages import SAMPLE_RATE
from services.families.qwen2_5_omni.files import CODEC_RATE
print(SAMPLE_RATE, CODEC_RATE)
"""


def shown(slower: str) -> str:
    """The rates that the stack's modules see."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        check=False,
        env=os.environ | {VARIABLE: slower},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_every_module_sees_the_slower_rates() -> None:
    assert shown("1").split() == ["24000", "50.0"]
    assert shown("5").split() == ["4800", "10.0"]
    assert "7 does not" in shown("7")


def test_times_of_an_answer_are_those_of_a_faster_machine() -> None:
    answer = MeasuredAnswer(
        index=0,
        sent=100.0,
        first_text=101.0,
        pieces=[(104.0, 24_000), (110.0, 24_000)],
        made=[103.0, 109.0],
        start_delay_s=2.0,
        done=110.0,
        text_ids=[1],
        codec_ids=[2],
    )
    slow, fast = timing(answer), timing(answer.on_faster_clock(4))
    assert (slow.underruns, slow.stalled_s) == (1, 5.0)
    assert (fast.ttft_s, fast.ttfa_s, fast.start_s, fast.completion_s) == (0.25, 1.0, 1.5, 2.5)
    assert fast.underruns == 1
    assert fast.stalled_s == pytest.approx(0.5)
    assert fast.underruns_after_delay == 0
    assert fast.delivery_s == [0.25, 0.25]
