"""What only text has of sampling, compared with transformers' logits."""

import json
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from omnirelay.errors import InvalidRequestError
from shared.messages import TextDelta
from tests.support.answers import Reference, random_prompt
from tests.support.thinking import ThinkerRig, thinker_request

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


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"json_schema": "no JSON"}, "JSON"),
        ({"json_schema": '{"type": "nothing"}'}, "nothing"),
        ({"json_schema": '{"type": "string", "pattern": "\\\\p{L}"}'}, "not supported"),
        ({"json_schema": '{"type": "integer", "multipleOf": 2}'}, "not supported"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
    ],
)
def test_what_vllm_refuses_is_the_requests_error(
    thinker: ThinkerRig, values: dict[str, Any], problem: str
) -> None:
    failure = thinker.failure(thinker_request("bad", random_prompt(9), **values))
    assert isinstance(failure, InvalidRequestError)
    assert problem in str(failure)


@pytest.mark.parametrize(
    "schema",
    [
        '{"$ref": "#"}',
        '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
        '{"type": "string", "pattern": "a{1,900}b{1,900}"}',
    ],
)
def test_a_schema_that_cannot_be_compiled_is_the_requests_error(thinker: ThinkerRig, schema: str) -> None:
    """It turns out in the background, when the engine has the request already."""
    thinker.service.accept(thinker_request("bad", random_prompt(9), json_schema=schema))
    thinker.wait()
    deadline = time.monotonic() + 60
    while not (failed := thinker.step()):
        assert time.monotonic() < deadline
    thinker.service.abort("bad")
    assert failed.keys() == {"bad"}
    assert isinstance(failed["bad"], InvalidRequestError)
    assert "cannot be compiled" in str(failed["bad"])
