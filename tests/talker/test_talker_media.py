"""Speech about sounds, pictures and videos: codec ids are transformers'."""

from typing import Any

import torch

from tests.support.answers import Answer, Reference
from tests.support.conversations import Processor, examples
from tests.support.talking import TalkerRig, check_codes

OPTIONS: dict[str, Any] = {"thinker_max_new_tokens": 12, "talker_max_new_tokens": 40}


def ask(reference: Reference, processor: Processor, name: str) -> Answer:
    conversation = examples()[name]
    heard = conversation.use_audio_in_video
    (answer,) = reference.answers_to(processor.inputs(conversation), use_audio_in_video=heard, **OPTIONS)
    return answer


def test_codes_are_transformers_codes(talker: TalkerRig, reference: Reference, processor: Processor) -> None:
    names = ("audio", "two images", "video", "video with its sound", "three turns")
    answers = {name.replace(" ", "-"): ask(reference, processor, name) for name in names}
    for name, answer in answers.items():
        plain = torch.arange(answer.positions.shape[1]).expand(3, -1)
        assert torch.equal(answer.positions, plain) == (name == "audio")
        talker.take(name, answer, max_tokens=40)
    talker.run()
    check_codes(talker, answers)
