"""The thinker's text: transformers' greedy one, repeatable draws, and what only text has of sampling."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from omnirelay.errors import BusyError, InvalidRequestError, OmniRelayError
from services.thinker import grammars as compiler
from shared.messages import TextDelta
from tests.support.answers import Reference, random_prompt
from tests.support.thinking import ThinkerRig, thinker_request


def test_an_end_token_stops_and_is_delivered_and_there_is_none_before_min_tokens(
    thinker: ThinkerRig, reference: Reference
) -> None:
    end = reference.model.config.thinker_config.eos_token_id
    prompt = random_prompt(7)
    kinds: dict[str, dict[str, Any]] = {"stops": {}, "cut": {"max_tokens": 5}, "late": {"min_tokens": 36}}
    thinker.run(*(thinker_request(name, prompt, **options) for name, options in kinds.items()))
    stops = thinker.text("stops")
    assert thinker.reason("stops") == "stop"
    assert stops[-1] == end
    assert end not in stops[:-1]
    assert len(stops) < 36 <= len(thinker.text("late"))
    assert end not in thinker.text("late")[:35]
    assert thinker.reason("cut") == "length"
    assert thinker.text("cut") == stops[:5]
    assert all(delta.finish_reason is None for delta in thinker.texts["stops"][:-1])


def test_a_seed_makes_sampling_repeatable(thinker: ThinkerRig) -> None:
    prompt = random_prompt(7)
    drawn: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.9,
        "min_tokens": 30,
        "max_tokens": 30,
    }
    thinker.run(thinker_request("alone", prompt, seed=5, **drawn))
    thinker.run(
        thinker_request("again", prompt, seed=5, **drawn),
        thinker_request("other", prompt, seed=6, **drawn),
        thinker_request("greedy", prompt, min_tokens=30, max_tokens=30),
        thinker_request("different", random_prompt(33), seed=5, **drawn),
    )
    assert thinker.text("again") == thinker.text("alone")
    assert len({tuple(thinker.text(name)) for name in ("alone", "other", "greedy", "different")}) == 4


def test_priority_decides_who_is_served_first(single_thinker: ThinkerRig, reference: Reference) -> None:
    order = {"last": 9, "middle": 5, "equal": 5, "first": -3}
    prompts = {name: random_prompt(20, seed=index) for index, name in enumerate(order)}
    single_thinker.run(
        *(thinker_request(name, prompts[name], priority=priority) for name, priority in order.items())
    )
    assert single_thinker.finished == ["first", "middle", "equal", "last"]
    assert max(len(step) for step in single_thinker.steps.scheduled) == 1
    for name, prompt in prompts.items():
        assert single_thinker.text(name) == reference.text(prompt, max_tokens=40)


def test_the_stage_says_what_it_holds(single_thinker: ThinkerRig) -> None:
    service = single_thinker.service
    for name in ("a", "b"):
        service.accept(thinker_request(name, random_prompt(20)))
    single_thinker.step()
    load = service.load()
    assert (load.running, load.waiting) == (1, 1)
    single_thinker.step()
    assert service.load().steps == load.steps + 1
    assert service.holds("a")
    assert not service.holds("c")
    assert service.active_requests() == ["a", "b"]
    assert service.limits.speakers == ["Chelsie", "Ethan"]


TOLERANCE = 1e-3


def logits_of(reference: Reference, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """From which transformers would draw each token of a reply, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = reference.model.thinker(input_ids=torch.tensor([prompt + reply])).logits
    # A clone is no inference tensor, and may be changed.
    return logits[0, len(prompt) - 1 : -1].clone()


def test_penalties_and_biases_change_the_logits(thinker: ThinkerRig, reference: Reference) -> None:
    prompt = random_prompt(20)
    # These tokens alone are drawn then, again and again.
    biases = {7: 50.0, 8: 49.5, 9: 48.0}
    cases = {"plain": (0.0, 0.0), "presence": (2.0, 0.0), "both": (0.5, 1.5)}
    thinker.run(
        *(
            thinker_request(name, prompt, logit_bias=biases, presence_penalty=once, frequency_penalty=each)
            for name, (once, each) in cases.items()
        ),
        thinker_request("unbiased", prompt),
        thinker_request("min-p", prompt, temperature=2.0, min_p=1.0),
    )
    assert thinker.text("min-p") == thinker.text("unbiased")
    assert len({tuple(thinker.text(name)) for name in (*cases, "unbiased")}) == 4
    for name, penalties in cases.items():
        reply = thinker.text(name)
        seen: Counter[int] = Counter()
        for logits, token in zip(logits_of(reference, prompt, reply), reply, strict=True):
            for each, count in seen.items():
                logits[each] -= penalties[0] + penalties[1] * count
            for each, value in biases.items():
                logits[each] += value
            assert float(logits.max() - logits[token]) < TOLERANCE
            seen[token] += 1


def test_log_probabilities_are_transformers(thinker: ThinkerRig, reference: Reference) -> None:
    prompt = random_prompt(20)
    drawn: dict[str, Any] = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    thinker.run(
        thinker_request("five", prompt, logprobs=5, **drawn),
        thinker_request("none", prompt, logprobs=0, **drawn),
        thinker_request("unasked", prompt, **drawn),
    )
    reply = thinker.text("five")
    expected = logits_of(reference, prompt, reply).log_softmax(-1)

    def told(name: str) -> list[TextDelta]:
        return thinker.texts[name]

    found = [each for delta in told("five") for each in delta.logprobs]
    for row, token, each in zip(expected, reply, found, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert [value for _, value in each.top] == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)
    assert [each.top for delta in told("none") for each in delta.logprobs] == [[]] * len(reply)
    assert not any(delta.logprobs for delta in told("unasked"))
    # Compilation would take seconds, in which nobody is answered.
    assert not counters["stats"]


def test_a_schema_is_obeyed(thinker: ThinkerRig) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    thinker.run(
        thinker_request("json", random_prompt(9), json_schema=json.dumps(schema), max_tokens=60),
        thinker_request("free", random_prompt(9)),
    )
    tokenizer = thinker.engine.get_tokenizer()
    assert thinker.reason("json") == "stop"
    text = tokenizer.decode(thinker.text("json"), skip_special_tokens=True)
    answer = json.loads(text)
    # No free white space, which a model may fill its answer with.
    assert text in (json.dumps(answer), json.dumps(answer, separators=(",", ":")))
    assert answer.keys() == {"ok", "kind"}
    assert answer["ok"] in (True, False)
    assert answer["kind"] in ("cat", "dog")


def test_what_vllm_refuses_is_the_requests_error(thinker: ThinkerRig) -> None:
    failure = thinker.failure(thinker_request("bad", random_prompt(9), logit_bias={10**6: 1.0}))
    assert isinstance(failure, InvalidRequestError)
    assert "logit_bias" in str(failure)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ('{"$ref": "#"}', "allows no answer"),
        ('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "allows no answer"),
        ("no JSON", "not JSON"),
        ('{"type": "nothing"}', "nothing"),
        ('{"type": "string", "pattern": "\\\\p{L}"}', "not supported"),
        ('{"type": "integer", "multipleOf": 2}', "not supported"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_the_requests_error(
    thinker: ThinkerRig, schema: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = thinker.failure(thinker_request("bad", random_prompt(9), json_schema=schema))
    assert isinstance(failure, InvalidRequestError)
    assert "the JSON schema cannot be compiled" in str(failure)
    assert problem in str(failure)
    # Where in its source the library noticed it, and since when, is of no use to anybody.
    assert ".cc" not in str(failure) + capfd.readouterr().err


BOMB = json.dumps(
    {"type": "string", "pattern": f"[^{''.join(map(chr, range(0x1000, 0x1080, 16)))}]{{1,1980}}"}
)
"""It takes the compiler 14 s."""


@pytest.fixture
def grammars(thinker: ThinkerRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[compiler.Grammars]:
    """The thinker's, in the place of the session's."""
    service = thinker.service
    assert service.wake_fd is not None
    made = compiler.Grammars(thinker.engine, service._end_tokens, service.wake_fd)
    monkeypatch.setattr(service, "_grammars", made)
    yield made
    made.close()


@pytest.mark.parametrize(("bound", "value"), [("COMPILE_S", 1.0), ("MEMORY_BYTES", 2**20)])
def test_a_schema_that_takes_too_much_ends_its_own_request(
    thinker: ThinkerRig,
    grammars: compiler.Grammars,
    bound: str,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, bound, value)
    bad = thinker_request("bad", random_prompt(9), json_schema=BOMB)
    thinker.accept(bad, thinker_request("text", random_prompt(9), min_tokens=30))
    failures: dict[str, OmniRelayError] = {}
    while thinker.service.holds("text") or not failures:
        thinker.wait()
        failures |= thinker.step()
    assert thinker.finished == ["text"]
    assert isinstance(failures["bad"], InvalidRequestError)
    assert "simplify it" in str(failures["bad"])
    thinker.service.abort("bad")
    # What is known of it is not found out again, and the next one is compiled.
    child = grammars._child
    assert str(thinker.failure(bad)) == str(failures["bad"])
    assert grammars._child is child
    if bound == "COMPILE_S":
        good = thinker_request("good", random_prompt(9), json_schema='{"enum": [7]}', max_tokens=5)
        thinker.run(good)
        assert thinker.reason("good") == "stop"


def test_a_compiler_that_does_not_start_or_ends_is_no_fault_of_the_schema(
    thinker: ThinkerRig, grammars: compiler.Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = '{"enum": [9]}'
    starts = (
        ("sleep 600", 0.1, "has not started"),
        ("false", 60.0, "try again"),
        ("/no/such", 60.0, "No such file"),
    )
    for command, start_s, problem in starts:
        with monkeypatch.context() as slow:
            slow.setattr(compiler, "WORKER", tuple(command.split()))
            slow.setattr("services.thinker.media.decoder._START_S", start_s)
            failure = thinker.failure(thinker_request("early", random_prompt(9), json_schema=schema))
        assert isinstance(failure, BusyError)
        assert problem in str(failure)
    thinker.run(thinker_request("later", random_prompt(9), json_schema=schema, max_tokens=5))
    assert thinker.reason("later") == "stop"
    # As the kernel does for want of memory.
    grammars.interrupt()
    thinker.run(thinker_request("last", random_prompt(9), json_schema='{"enum": [6]}', max_tokens=5))
    assert thinker.reason("last") == "stop"


def test_a_request_that_is_dropped_while_its_schema_is_compiled_leaves_nothing(thinker: ThinkerRig) -> None:
    schema = json.dumps({"enum": ["dropped"]})
    thinker.service.accept(thinker_request("dropped", random_prompt(9), json_schema=schema))
    assert thinker.service.active_requests() == ["dropped"]
    thinker.service.abort("dropped")
    thinker.run(thinker_request("good", random_prompt(9), json_schema='{"enum": [8]}', max_tokens=5))
    assert thinker.service._grammars._ready == {}
