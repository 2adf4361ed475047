import gc
import logging
import random
import time
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from omnirelay.errors import StageFailedError, UnknownSpeakerError
from services.token2wav.engine import ChunkOutcome
from services.token2wav.family import Budget
from tests.token2wav.support import MAX_BATCH_FRAMES, MAX_VOCODER_FRAMES, counting, run_all, solving

TOLERANCE = 1e-4
TWO_PIECES = MAX_VOCODER_FRAMES // 2 + 5
"""Codec ids of a chunk that becomes audio in two pieces."""


def progress(engine) -> dict[str, int]:
    """Solver steps taken, by request."""
    internal = {internal: name for name, (internal, _) in engine._in_flight.items()}
    return {internal[request.request_id]: request.num_computed_tokens for request in engine.scheduler.running}


def waiting(engine) -> int:
    return engine.scheduler.get_request_counts()[1]


def test_all_advance_one_step_and_a_newcomer_joins_at_once(oracle, idle, synthesizer):
    idle.submit_chunk("a", oracle.chunk(3, seed=1))
    idle.submit_chunk("b", oracle.chunk(30, seed=2))
    with counting(synthesizer, "_step") as calls:
        idle.step()
        idle.step()
        assert progress(idle) == {"a": 2, "b": 2}
        idle.submit_chunk("c", oracle.chunk(14, seed=3))
        idle.step()
        assert progress(idle) == {"a": 3, "b": 3, "c": 1}
    assert [len(active) for active, _ in calls] == [2, 2, 3]
    results = run_all(idle)
    assert results.keys() == {"a", "b", "c"}
    oracle.check(results, {"a": oracle.chunk(3, seed=1), "c": oracle.chunk(14, seed=3)})


@pytest.mark.parametrize("places", [8, 1])
def test_a_suspect_advances_alone_once_it_has_a_place(oracle, idle, monkeypatch, places):
    monkeypatch.setattr(idle.scheduler, "max_num_active_reqs", places)
    idle.submit_chunk("a", oracle.chunk(30, seed=2))
    idle.submit_chunk("b", oracle.chunk(3, seed=1), suspect=True)
    idle.step()
    assert progress(idle) == {"a": 1}
    assert idle.scheduler.take_turn() == ("b" if places > 1 else None)
    idle.step()
    assert progress(idle) == ({"a": 1, "b": 1} if places > 1 else {"a": 2})
    results: dict[str, torch.Tensor | None] = {}
    while idle.has_work:
        before = progress(idle).get("a")
        alone = idle.scheduler.take_turn()
        results |= {outcome.request_id: outcome.waveform for outcome in idle.step()}
        assert alone is None or progress(idle).get("a") == before
    oracle.check(results, {"a": oracle.chunk(30, seed=2), "b": oracle.chunk(3, seed=1)})


def test_a_lone_request_takes_no_more_steps_at_once_than_the_budgets_allow(oracle, idle, synthesizer):
    chunk = oracle.chunk(120, seed=6)
    idle.submit_chunk("lone", chunk)
    steps, pieces = [], []
    outcomes: list[ChunkOutcome] = []
    while not outcomes:
        with counting(synthesizer, "_step") as solved, counting(synthesizer, "_vocode") as vocoded:
            outcomes = idle.step()
        steps.append(len(solved))
        pieces.append(len(vocoded))
    # Two times 240 frames are within the 500 of a step; 240 are three pieces of at most 90.
    assert steps == [2, 2, 2, 2, 1, 0, 0]
    assert pieces == [0, 0, 0, 0, 1, 1, 1]
    assert (outcomes[0].waveform - oracle.waveform(chunk)).abs().max() < TOLERANCE


def audio_of_steps(engine, synthesizer, results) -> list[dict[int, int]]:
    """Step until idle; gives the mel frames that each step made audio, by the seed of their chunk."""
    made = []
    while engine.has_work:
        with counting(synthesizer, "_vocode") as vocoded:
            results |= {outcome.request_id: outcome.waveform for outcome in engine.step()}
        made.append({state.chunk.seed: frames_of_piece(state, pieces) for state, _, pieces in vocoded})
    return made


def frames_of_piece(state, pieces: int) -> int:
    return -(-state.chunk.target_frames // pieces)


def test_no_step_makes_more_audio_than_the_budget_and_all_take_turns(oracle, idle, synthesizer):
    now = time.monotonic()
    # Of two pieces of 50 frames, and of one of 80, 10 and 80.
    long, soon, small, late = range(4)
    chunks = [oracle.chunk(codes, seed=seed, due=now + seed) for seed, codes in enumerate((50, 40, 5, 40))]
    for chunk in chunks:
        idle.submit_chunk(str(chunk.seed), chunk)
    results: dict[str, torch.Tensor] = {}
    made = audio_of_steps(idle, synthesizer, results)
    assert made[:8] == [{}] * 8
    assert [set(frames) for frames in made[8:12]] == [{long, small}, {soon}, {late}, {long}]
    for chunk in chunks:
        assert (results[str(chunk.seed)] - oracle.waveform(chunk)).abs().max() < TOLERANCE


def test_a_newcomer_does_not_wait_for_all_pieces_of_a_long_chunk(oracle, idle, synthesizer):
    idle.submit_chunk("long", oracle.chunk(180, seed=1, due=0.0))
    idle.submit_chunk("new", oracle.chunk(5, seed=2, due=time.monotonic() + 5))
    results: dict[str, torch.Tensor] = {}
    made = [set(frames) for frames in audio_of_steps(idle, synthesizer, results) if frames]
    # 360 frames are four pieces of 90, which leave no room beside them.
    assert made == [{1}, {2}, {1}, {1}, {1}]


def test_what_begins_with_audio_is_held_to_the_budget_as_it_joins(oracle, idle, pooler):
    results: dict[str, torch.Tensor] = {}
    with solving(idle, time_points=2):
        for seed in range(5):
            idle.submit_chunk(str(seed), oracle.chunk(20, seed=seed))
        made = audio_of_steps(idle, pooler.synthesizer, results)
    # 40 frames each.
    assert [len(frames) for frames in made if frames] == [2, 2, 1]
    assert results.keys() == set("01234")


def test_a_chunk_larger_than_the_budget_and_the_others_take_turns(oracle, idle, monkeypatch):
    monkeypatch.setattr(idle.scheduler, "_budget", Budget(20, MAX_VOCODER_FRAMES))
    idle.submit_chunk("large", oracle.chunk(30, seed=1, due=0.0))
    idle.submit_chunk("a", oracle.chunk(2, seed=2, due=1.0))
    idle.submit_chunk("b", oracle.chunk(3, seed=3, due=2.0))
    seen = []
    for _ in range(5):
        idle.step()
        seen.append(progress(idle))
    assert seen == [
        {"large": 1},
        # Who waits in line is seen when there is somebody to wait for.
        {"large": 2},
        {"large": 2, "a": 1, "b": 1},
        {"large": 3, "a": 1, "b": 1},
        {"large": 3, "a": 2, "b": 2},
    ]
    assert run_all(idle).keys() == {"large", "a", "b"}


@pytest.mark.parametrize("seed", range(4))
def test_no_step_exceeds_a_budget_and_nobody_waits_longer_than_all_others_take(
    oracle, idle, synthesizer, seed
):
    chance = random.Random(seed)
    now = time.monotonic()
    scheduler, total = idle.scheduler, 12
    for number in range(total):
        codes, due = chance.choice((1, 5, 24, 60, 150)), now + chance.uniform(-5, 5)
        idle.submit_chunk(str(number), oracle.chunk(codes, seed=number, due=due))
    ended: list[str] = []
    left_out: Counter[str] = Counter()
    while idle.has_work:
        before = {request.request_id: request.num_computed_tokens for request in scheduler.running}
        if len(before) < scheduler.max_num_running_reqs and scheduler.waiting:
            before[scheduler.waiting.peek_request().request_id] = 0
        with counting(synthesizer, "_step") as solved, counting(synthesizer, "_vocode") as vocoded:
            ended += [outcome.request_id for outcome in idle.step()]
        assert sum(state.frames for active, _ in solved for state, _ in active) <= MAX_BATCH_FRAMES
        assert sum(frames_of_piece(state, pieces) for state, _, pieces in vocoded) <= MAX_VOCODER_FRAMES
        for name, tokens in before.items():
            request = scheduler.requests.get(name)
            served = request is None or request.num_computed_tokens > tokens
            left_out[name] = 0 if served else left_out[name] + 1
            assert left_out[name] < scheduler.max_num_running_reqs
    assert len(ended) == total


def test_one_that_can_wait_does_not_join_before_those_that_are_due(oracle, idle, monkeypatch):
    monkeypatch.setattr(idle.scheduler, "_margin_s", 1.0)
    now = time.monotonic()
    for name, due in (("due", now), ("later", now + 100), ("soon", now)):
        idle.submit_chunk(name, oracle.chunk(20, due=due))
    idle.step()
    assert progress(idle) == {"due": 1, "soon": 1}
    for _ in range(8):
        idle.step()
    # When nobody else is there any more.
    assert run_all(idle).keys() == {"later"}


def test_abort_between_two_pieces_of_audio_frees_the_state(oracle, idle, pooler, synthesizer):
    idle.submit_chunk("aborted", oracle.chunk(120, seed=7))
    while True:
        with counting(synthesizer, "_vocode") as vocoded:
            assert idle.step() == []
        if vocoded:
            break
    assert pooler.active_states == 1
    del vocoded
    idle.abort(["aborted"])
    assert idle.has_work
    idle.step()
    gc.collect()
    assert pooler.active_states == idle.in_flight == 0
    assert not idle.has_work


def test_what_does_not_fit_the_budget_waits_and_is_not_overtaken(oracle, idle):
    third = MAX_BATCH_FRAMES // 2 // 3 + 5
    for name in ("a", "b", "c"):
        idle.submit_chunk(name, oracle.chunk(third))
    idle.submit_chunk("small", oracle.chunk(1))
    idle.step()
    assert progress(idle).keys() == {"a", "b"}
    assert waiting(idle) == 2
    assert run_all(idle).keys() == {"a", "b", "c", "small"}


def test_priority_decides_who_waits(oracle, idle):
    third = MAX_BATCH_FRAMES // 2 // 3 + 5
    for name, priority in (("late", 5), ("later", 9), ("soon", 1)):
        idle.submit_chunk(name, oracle.chunk(third), priority=priority)
    idle.step()
    assert progress(idle).keys() == {"soon", "late"}
    run_all(idle)


def test_a_request_id_can_be_used_again_after_an_abort(oracle, idle):
    idle.submit_chunk("again", oracle.chunk(5, seed=1))
    idle.submit_chunk("other", oracle.chunk(5))
    idle.step()
    idle.abort(["again"])
    chunk = oracle.chunk(7, seed=2)
    idle.submit_chunk("again", chunk)
    assert (run_all(idle)["again"] - oracle.waveform(chunk)).abs().max() < TOLERANCE


def collect(engine) -> list[ChunkOutcome]:
    outcomes: list[ChunkOutcome] = []
    while engine.has_work:
        outcomes += engine.step()
    return outcomes


@pytest.fixture
def propagate_logs(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def test_an_unknown_voice_fails_in_the_model_at_once_and_alone(oracle, idle, pooler, propagate_logs):
    good = oracle.chunk(5, seed=1)
    idle.submit_chunk("good", good)
    idle.submit_chunk("bad", oracle.chunk(5, seed=1, speaker="Nobody"))
    outcomes = idle.step()
    assert [outcome.request_id for outcome in outcomes] == ["bad"]
    assert isinstance(outcomes[0].error, UnknownSpeakerError)
    assert "Chelsie, Ethan" in str(outcomes[0].error)
    assert "unknown_speaker" in propagate_logs.text
    assert (run_all(idle)["good"] - oracle.waveform(good)).abs().max() < TOLERANCE
    assert pooler.active_states == 0
    assert idle.scheduler.take_failures() == {}


def test_an_exception_while_preparing_or_vocoding_fails_one_request(
    oracle, idle, pooler, synthesizer, monkeypatch
):
    prepare, vocode = synthesizer._conditioner.prepare, synthesizer._vocode

    def prepare_or_break(chunk):
        if chunk.seed == 13:
            raise RuntimeError("broken on purpose")
        return prepare(chunk)

    def vocode_or_break(state, piece, pieces):
        if (state.chunk.seed, piece) in ((14, 0), (15, 1)):
            raise RuntimeError(f"broken at piece {piece}")
        return vocode(state, piece, pieces)

    monkeypatch.setattr(synthesizer._conditioner, "prepare", prepare_or_break)
    monkeypatch.setattr(synthesizer, "_vocode", vocode_or_break)
    for seed in (12, 13, 14, 15):
        idle.submit_chunk(f"seed-{seed}", oracle.chunk(TWO_PIECES, seed=seed))
    outcomes = {outcome.request_id: outcome for outcome in collect(idle)}
    assert outcomes["seed-12"].error is None
    for seed, reason in ((13, "broken on purpose"), (14, "broken at piece 0"), (15, "broken at piece 1")):
        error = outcomes[f"seed-{seed}"].error
        assert isinstance(error, StageFailedError)
        assert reason in str(error)
    gc.collect()
    assert pooler.active_states == 0


def test_chunks_due_later_wait_for_one_that_is_due(oracle, idle, monkeypatch):
    monkeypatch.setattr(idle.scheduler, "_margin_s", 1.0)
    later = time.monotonic() + 100
    chunks = {name: oracle.chunk(30, seed=seed, due=later) for seed, name in enumerate(("a", "b"))}
    for name, chunk in chunks.items():
        idle.submit_chunk(name, chunk)
    idle.step()
    assert progress(idle) == {"a": 1, "b": 1}
    chunks["new"] = oracle.chunk(14, seed=3, due=time.monotonic())
    idle.submit_chunk("new", chunks["new"])
    idle.step()
    assert progress(idle) == {"a": 1, "b": 1, "new": 1}
    results: dict[str, torch.Tensor | None] = {}
    while "new" not in results:
        results |= {outcome.request_id: outcome.waveform for outcome in idle.step()}
        assert progress(idle)["a"] == progress(idle)["b"] == 1
    results |= run_all(idle)
    oracle.check(results, chunks)


def test_those_due_later_do_not_wait_for_one_that_is_due_and_has_no_place(oracle, idle, monkeypatch):
    monkeypatch.setattr(idle.scheduler, "_margin_s", 1.0)
    monkeypatch.setattr(idle.scheduler, "max_num_active_reqs", 2)
    for name in ("a", "b"):
        idle.submit_chunk(name, oracle.chunk(60, due=time.monotonic() + 100))
    idle.step()
    idle.submit_chunk("due", oracle.chunk(130, due=time.monotonic()))
    idle.step()
    assert progress(idle) == {"a": 2, "b": 2}
    assert run_all(idle).keys() == {"a", "b", "due"}


def test_a_waveform_that_is_not_finite_fails_its_chunk_alone(oracle, idle, synthesizer, monkeypatch):
    vocode = synthesizer._vocode

    def broken_for_one(state, piece, pieces):
        waveform = vocode(state, piece, pieces)
        if state.chunk.seed == 14 and piece == 1:
            waveform[-1] = float("nan")
        return waveform

    monkeypatch.setattr(synthesizer, "_vocode", broken_for_one)
    for seed in (12, 14):
        idle.submit_chunk(f"seed-{seed}", oracle.chunk(TWO_PIECES, seed=seed))
    outcomes = {outcome.request_id: outcome for outcome in collect(idle)}
    assert outcomes["seed-12"].error is None
    assert "not finite" in str(outcomes["seed-14"].error)


def test_a_step_asks_once_whether_audio_is_finite(oracle, idle, pooler, monkeypatch):
    """Each question stops the host until a GPU has answered."""
    made: list[int] = []
    end = pooler._outputs_of

    def profiled(*arguments):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            outputs = end(*arguments)
        counts = Counter({each.key: each.count for each in profiler.key_averages()})
        # Each would be a truth value asked for by itself; the list of all is one copy.
        assert counts["aten::_local_scalar_dense"] == 0
        made.append(sum(output is not None for output in outputs))
        return outputs

    monkeypatch.setattr(pooler, "_outputs_of", profiled)
    for seed in range(2):
        idle.submit_chunk(f"seed-{seed}", oracle.chunk(6, seed=seed))
    assert len(collect(idle)) == 2
    assert made[-1] == 2


def test_pieces_of_equal_shapes_become_audio_together(oracle, idle, synthesizer, monkeypatch):
    monkeypatch.setattr(synthesizer, "_together", True)
    chunks = {f"c{seed}": oracle.chunk(length, seed=seed) for seed, length in enumerate((12, 12, 30, 12))}
    with counting(synthesizer._vocoder, "forward") as vocoded:
        for name, chunk in chunks.items():
            idle.submit_chunk(name, chunk)
        results = run_all(idle)
    assert sorted(target.shape[:-2] for _, target, _ in vocoded) == [(), (3,)]
    oracle.check(results, chunks)
