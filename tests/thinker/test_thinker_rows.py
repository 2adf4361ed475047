"""The conditioning rows that leave the thinker are those that transformers hands to its talker."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from services.families.qwen2_5_omni.thinker import QwenTrackWriter
from shared.vllm.tensors import POSITIONS
from tests.support.answers import Reference, random_prompt
from tests.support.children import Patch
from tests.support.http import Change
from tests.support.thinking import ThinkerRig, speech_of, thinker_request
from tests.thinker.conftest import BLOCK_SIZE

TOLERANCE = 1e-4


def check_track(rig: ThinkerRig, name: str, reference: Reference, prompt: list[int], **options: str) -> float:
    """Compare a finished track with transformers'; gives the largest difference."""
    expected = reference.answer(prompt, thinker_max_new_tokens=40, talker_max_new_tokens=2, **options)
    assert rig.text(name) == expected.text
    rows = rig.rows(name)
    assert rows.dtype == torch.float32
    assert rows.shape == expected.rows.shape
    error = float((rows - expected.rows).abs().max())
    assert error < TOLERANCE
    assert torch.equal(rig.positions(name).to(torch.int64), expected.positions)
    assert [message.last for message in rig.tracks[name]] == [False] * (len(rig.tracks[name]) - 1) + [True]
    return error


def check_spoken(rig: ThinkerRig, reference: Reference, prompts: dict[str, list[int]]) -> None:
    """Let all of them be answered together, and compare; who comes first has precedence."""
    rig.run(
        *(
            thinker_request(name, prompt, speech=speech_of(), priority=index)
            for index, (name, prompt) in enumerate(prompts.items())
        )
    )
    for name, prompt in prompts.items():
        check_track(rig, name, reference, prompt)


def test_rows_are_fetched_before_tokens_are_sampled(thinker: ThinkerRig, monkeypatch: Patch) -> None:
    """On a GPU their copy then ends before that of the tokens; reading them afterwards computes nothing."""
    worker = thinker.engine.model_executor.driver_worker.worker
    events: list[str] = []

    def noted(name: str, work: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                result = work(*arguments, **options)
            if name == "read":
                assert [each.key for each in profiled.key_averages()] == []
            return result

        return call

    monkeypatch.setattr(thinker.runner, "sample_tokens", noted("sample", thinker.runner.sample_tokens))
    monkeypatch.setattr(worker, "read_rows", noted("read", worker.read_rows))
    store = thinker.model.conditioning
    monkeypatch.setattr(store, "gather", noted("gather", store.gather))
    thinker.run(thinker_request("a", random_prompt(30), speech=speech_of(), max_tokens=3))
    assert events == ["gather", "sample", "read"] * 3


@pytest.mark.parametrize("length", [1, 7, 130, 2000])
def test_the_rows_are_transformers_rows(thinker: ThinkerRig, reference: Reference, length: int) -> None:
    prompt = random_prompt(length)
    speech = speech_of("Chelsie", seed=3)
    thinker.run(thinker_request("a", prompt, speech=speech, priority=4))
    check_track(thinker, "a", reference, prompt, speaker="Chelsie")
    assert thinker.starts["a"].prompt_tokens == length
    assert thinker.starts["a"].speech == speech
    assert thinker.starts["a"].priority == 4


def test_a_row_leaves_as_soon_as_it_exists(thinker: ThinkerRig) -> None:
    prompt = random_prompt(7)
    thinker.service.accept(thinker_request("a", prompt, speech=speech_of(), max_tokens=4))
    sent = []
    for count in range(1, 5):
        thinker.step()
        sent.append(thinker.rows("a").shape[0])
        assert len(thinker.texts["a"]) == len(thinker.text("a")) == count
    # The prompt and the voice's row; one row a token; with the last token, also the two closing rows.
    assert sent == [8, 9, 10, 13]


def test_rows_of_a_prompt_computed_in_pieces(chunked_thinker: ThinkerRig, reference: Reference) -> None:
    prompts = {"long": random_prompt(300), "longer": random_prompt(501), "short": random_prompt(7)}
    check_spoken(chunked_thinker, reference, prompts)
    pieces = [count for count in chunked_thinker.steps.of("longer") if count > 1]
    assert len(pieces) >= 10
    assert sum(pieces) >= 500
    # Each piece's rows were sent at once.
    sizes = [message.rows.shape[0] for message in chunked_thinker.tracks["longer"]]
    assert sizes[: len(pieces) - 1] == pieces[:-1]


def test_rows_of_a_cached_prompt(chunked_thinker: ThinkerRig, reference: Reference) -> None:
    prompt = random_prompt(300, seed=1)
    sharing = [*prompt[:200], *random_prompt(90, seed=2)]
    rig = chunked_thinker
    rig.run(thinker_request("first", prompt, speech=speech_of()))
    rig.run(thinker_request("second", prompt, speech=speech_of("Chelsie")))
    rig.run(thinker_request("third", sharing, speech=speech_of()))
    computed = {name: sum(count for count in rig.steps.of(name) if count > 1) for name in rig.texts}
    cached = 300 // BLOCK_SIZE * BLOCK_SIZE
    assert computed == {"first": 300, "second": 300 - cached, "third": 290 - 200 // BLOCK_SIZE * BLOCK_SIZE}
    check_track(rig, "first", reference, prompt)
    check_track(rig, "second", reference, prompt, speaker="Chelsie")
    check_track(rig, "third", reference, sharing)
    assert torch.equal(rig.rows("second")[:cached], rig.rows("first")[:cached])


def test_a_prompt_that_text_only_requests_left_in_the_cache(
    chunked_thinker: ThinkerRig, reference: Reference
) -> None:
    prompt = random_prompt(96, seed=3)
    chunked_thinker.run(thinker_request("text", prompt))
    chunked_thinker.run(thinker_request("speech", prompt, speech=speech_of()))
    # A prompt of whole blocks: the last one is computed again, for its logits.
    assert chunked_thinker.steps.of("speech")[0] == BLOCK_SIZE
    check_track(chunked_thinker, "speech", reference, prompt)


def test_rows_after_preemption(tight_thinker: ThinkerRig, reference: Reference) -> None:
    # Of 14 blocks, three prompts take twelve; their replies need more than the two that are left.
    prompts = {f"r{seed}": random_prompt(125, seed=seed) for seed in range(4)}
    change = Change(tight_thinker.service.collect)
    check_spoken(tight_thinker, reference, prompts)
    told = change("omnirelay_preemptions_total", stage="thinker")
    assert told >= tight_thinker.steps.preemptions.total() > 0
    preempted, _ = tight_thinker.steps.preemptions.most_common(1)[0]
    computed = sum(tight_thinker.steps.of(preempted))
    rows = 125 + len(tight_thinker.text(preempted)) - 1
    if tight_thinker.engine.vllm_config.cache_config.enable_prefix_caching:
        assert computed >= rows
    else:
        assert computed > rows + 125


def test_a_checkpoint_of_other_sizes(other_thinker: ThinkerRig, other_reference: Reference) -> None:
    check_spoken(other_thinker, other_reference, {"short": random_prompt(9), "long": random_prompt(350)})


def test_text_alone_reads_and_sends_no_rows(thinker: ThinkerRig) -> None:
    with mock.patch.object(thinker.engine, "collective_rpc", wraps=thinker.engine.collective_rpc) as calls:
        thinker.run(thinker_request("text", random_prompt(33)))
        assert calls.call_count == 0
        thinker.run(thinker_request("speech", random_prompt(33), speech=speech_of(), max_tokens=3))
        assert calls.call_count == 3
    assert thinker.tracks.keys() == thinker.starts.keys() == {"speech"}


def test_a_reply_of_one_token_closes_its_track_without_closing_rows(thinker: ThinkerRig) -> None:
    prompt = random_prompt(20)
    thinker.run(thinker_request("one", prompt, speech=speech_of(), max_tokens=1))
    assert len(thinker.text("one")) == 1
    assert [(message.rows.shape[0], message.last) for message in thinker.tracks["one"]] == [
        (21, False),
        (0, True),
    ]


def test_bfloat16_stays_bfloat16(half_thinker: ThinkerRig, reference: Reference) -> None:
    prompt = random_prompt(130)
    half_thinker.run(thinker_request("a", prompt, speech=speech_of(), max_tokens=10))
    messages = half_thinker.tracks["a"]
    assert sum(message.rows.shape[0] for message in messages) == 130 + 1 + len(half_thinker.text("a")) - 1 + 2
    for message in messages:
        count, width = message.rows.shape
        assert width == 128
        assert message.rows.dtype == "bfloat16"
        assert message.rows.data.nbytes == 2 * count * width
        assert message.additional.entries[POSITIONS].tensor_dtype == "int32"
    assert half_thinker.engine.collective_rpc("read_rows")[0][0].dtype == torch.bfloat16
    rows = half_thinker.rows("a")
    assert rows.dtype == torch.bfloat16
    exact = reference.answer(prompt, thinker_max_new_tokens=40, talker_max_new_tokens=2).rows[:130]
    error = (rows[:130].float() - exact).norm() / exact.norm()
    # bfloat16 keeps 8 bits: what is computed in it is off by more than float32 is, and by not much more.
    assert 1e-4 < error < 0.05


def test_rows_are_copied_for_a_message_only_where_the_voice_joins_them() -> None:
    writer = QwenTrackWriter("a", 4, torch.ones(8), torch.zeros(2, 8))
    rows, positions = torch.rand(5, 8), torch.arange(5).expand(3, -1)
    for start, stop, shared in ((0, 2, True), (2, 4, False), (4, 5, True)):
        message = writer.rows(start, rows[start:stop], positions[:, start:stop])
        assert message.start == start + (start >= 4)
        sent = np.frombuffer(message.rows.data.view, np.uint8)
        assert np.shares_memory(sent, rows.numpy()) == shared


LIMIT = 40 * 512
"""Bytes of 40 rows of the tiny thinker."""


def test_many_rows_at_once_leave_in_messages_within_the_limit(
    thinker: ThinkerRig, monkeypatch: Patch
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
