"""What the thinker tells Prometheus moves when it should."""

import pytest

from omnirelay.errors import OmniRelayError
from tests.support.answers import random_prompt
from tests.support.conversations import Item, Processor, asks
from tests.support.http import Change, Readings
from tests.support.media import picture, spoken
from tests.support.thinking import ThinkerRig, speech_of, thinker_request

OURS = {"stage": "thinker"}


def test_rows_batches_and_the_prefix_cache_are_told(thinker: ThinkerRig) -> None:
    change = Change(thinker.service.collect)
    prompt = random_prompt(300, seed=77)
    thinker.run(thinker_request("first", prompt, speech=speech_of()), thinker_request("text", [5, 6, 7]))
    assert change("omnirelay_conditioning_rows_sent_total", **OURS) == thinker.rows("first").shape[0]
    assert change("omnirelay_stage_batch_requests_sum", **OURS) == sum(map(len, thinker.steps.scheduled))
    assert change("omnirelay_prefix_cache_queried_tokens_total", **OURS) == 303
    assert change("omnirelay_prefix_cache_hit_tokens_total", **OURS) == 0
    thinker.run(thinker_request("again", prompt, max_tokens=2))
    usage = thinker.texts["again"][0].prompt
    assert usage is not None
    assert usage.cached_tokens > 0
    assert change("omnirelay_prefix_cache_hit_tokens_total", **OURS) == usage.cached_tokens
    assert change("omnirelay_prefix_cache_queried_tokens_total", **OURS) == 603


def test_the_use_of_the_kv_cache_is_told(thinker: ThinkerRig) -> None:
    thinker.service.accept(thinker_request("a", random_prompt(40)))
    thinker.step()
    assert 0 < Readings(thinker.service.collect())("omnirelay_kv_cache_usage_ratio", **OURS) < 1
    thinker.run()
    assert Readings(thinker.service.collect())("omnirelay_kv_cache_usage_ratio", **OURS) == 0


def test_preemptions_are_told(tight_thinker: ThinkerRig) -> None:
    change = Change(tight_thinker.service.collect)
    tight_thinker.run(
        *(thinker_request(f"r{seed}", random_prompt(125, seed=seed), priority=seed) for seed in range(4))
    )
    assert tight_thinker.steps.preemptions.total() > 0
    assert change("omnirelay_preemptions_total", **OURS) >= tight_thinker.steps.preemptions.total()


def test_media_are_told_by_kind_and_outcome(thinker: ThinkerRig, processor: Processor) -> None:
    change = Change(thinker.service.collect)

    def items(kind: str, outcome: str) -> float:
        return change("omnirelay_media_items_total", **OURS, kind=kind, outcome=outcome)

    seen = asks(
        Item("image", picture("png", 771)),
        Item("audio", spoken("wav", "How many of them are there?")),
        "What is this?",
    )
    prompt = processor.prompt(seen)
    thinker.run(thinker_request("first", prompt, media=seen.media, max_tokens=2))
    assert [items(kind, "decoded") for kind in ("image", "audio", "video")] == [1, 1, 0]
    thinker.run(thinker_request("again", prompt, media=seen.media, max_tokens=2))
    assert [items(kind, "cached") for kind in ("image", "audio", "video")] == [1, 1, 0]
    assert [items(kind, "decoded") for kind in ("image", "audio", "video")] == [1, 1, 0]
    bad = asks(Item("image", b"no picture at all"), "Well?")
    thinker.service.accept(thinker_request("bad", processor.prompt(bad), media=bad.media))
    failures: dict[str, OmniRelayError] = {}
    while not failures:
        thinker.wait()
        failures = thinker.step()
    thinker.service.abort("bad")
    assert items("image", "failed") == 1
    assert items("image", "decoded") == 1
    assert change("omnirelay_media_decode_seconds_count", **OURS, kind="image") == 2
    assert change("omnirelay_media_decode_seconds_sum", **OURS, kind="image") > 0
    assert change("omnirelay_media_prepare_seconds_count", **OURS) == 3
    decoded = change("omnirelay_media_decode_seconds_sum", **OURS, kind="image")
    assert change("omnirelay_media_prepare_seconds_sum", **OURS) > decoded


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_what_has_not_happened_is_told_as_zero(thinker: ThinkerRig, kind: str) -> None:
    """Else the first of its kind would be no increase."""
    read = Readings(thinker.service.collect())
    for outcome in ("decoded", "cached", "failed"):
        assert read("omnirelay_media_items_total", **OURS, kind=kind, outcome=outcome) >= 0
