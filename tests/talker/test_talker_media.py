"""Speech about sounds, pictures and videos: codec ids are transformers'."""

from typing import Any

import pytest
import torch

from tests.support.answers import Answer, Reference, cut_padding
from tests.support.conversations import Processor, asks, examples
from tests.support.talking import TalkerRig

OPTIONS: dict[str, Any] = {"thinker_max_new_tokens": 12, "talker_max_new_tokens": 40}


def ask(reference: Reference, processor: Processor, name: str) -> Answer:
    conversation = examples()[name]
    heard = conversation.use_audio_in_video
    (answer,) = reference.answers_to(processor.inputs(conversation), use_audio_in_video=heard, **OPTIONS)
    return answer


@pytest.mark.parametrize("name", ["audio", "two images", "video", "video with its sound", "three turns"])
def test_codes_are_transformers_codes(
    talker: TalkerRig, reference: Reference, processor: Processor, name: str
) -> None:
    answer = ask(reference, processor, name)
    plain = torch.arange(answer.positions.shape[1]).expand(3, -1)
    assert torch.equal(answer.positions, plain) == (name == "audio")
    talker.take("a", answer, max_tokens=40)
    talker.run()
    assert talker.codes("a") == answer.codes


@pytest.mark.parametrize("name", ["two images", "video with its sound"])
def test_a_batch_with_padding_gets_the_same_codes(
    talker: TalkerRig, reference: Reference, processor: Processor, name: str
) -> None:
    alone = ask(reference, processor, name)
    conversation = examples()[name]
    heard = conversation.use_audio_in_video
    longer = asks("A longer one. " * 9, *conversation.items, use_audio_in_video=heard)
    answer, _ = reference.answers_to(
        processor.inputs(conversation, longer), use_audio_in_video=heard, **OPTIONS
    )
    answer = cut_padding(answer, reference.model.config.thinker_config.eos_token_id)
    assert answer.codes == alone.codes
    talker.take("a", answer, max_tokens=40)
    talker.run()
    assert talker.codes("a") == answer.codes
