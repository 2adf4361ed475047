"""Drawn answers: each stage of a request draws with random numbers of its own."""

from omnirelay import Client, GenerateRequest, SamplingOverrides
from tests.support.stack import RunningStack

SEEDS = 12
TOKENS = 64
LAGS = range(-3, 4)
DRAWN = SamplingOverrides(temperature=2.0, top_k=0, top_p=1.0, max_tokens=TOKENS, min_tokens=TOKENS)


def test_text_and_codec_tokens_are_drawn_independently(stack: RunningStack) -> None:
    """With the same random numbers 35 pairs were of the same id; by chance hardly any is."""
    with Client(stack.address) as client:
        answers = [
            client.chat(
                GenerateRequest(
                    prompt_token_ids=[seed, 7, 9], seed=seed, text_sampling=DRAWN, codec_sampling=DRAWN
                )
            )
            for seed in range(SEEDS)
        ]
        pairs = [
            (done.text_token_ids, done.codec_token_ids) for done in (each.result().done for each in answers)
        ]
    assert all(len(text) == len(codec) == TOKENS for text, codec in pairs)
    alike = {
        lag: sum(text[at] == codec[at + lag] for text, codec in pairs for at in range(3, TOKENS - 3))
        for lag in LAGS
    }
    assert max(alike.values()) <= 4, alike
