"""What the thinker tells Prometheus moves when it should."""

from tests.support.answers import random_prompt
from tests.support.conversations import Item, Processor, asks
from tests.support.http import Change
from tests.support.media import picture, spoken
from tests.support.thinking import ThinkerRig, request_about, speech_of, thinker_request

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
    usage = thinker.usage("again")
    assert usage.cached_tokens > 0
    assert change("omnirelay_prefix_cache_hit_tokens_total", **OURS) == usage.cached_tokens
    assert change("omnirelay_prefix_cache_queried_tokens_total", **OURS) == 603


def test_media_are_told_by_kind_and_outcome(thinker: ThinkerRig, processor: Processor) -> None:
    change = Change(thinker.service.collect)

    def items(kind: str, outcome: str) -> float:
        return change("omnirelay_media_items_total", **OURS, kind=kind, outcome=outcome)

    seen = asks(
        Item("image", picture("png", 771)),
        Item("audio", spoken("wav", "How many of them are there?")),
        "What is this?",
    )
    thinker.run(request_about("first", seen, processor, speech=None, max_tokens=2))
    assert [items(kind, "decoded") for kind in ("image", "audio", "video")] == [1, 1, 0]
    thinker.run(request_about("again", seen, processor, speech=None, max_tokens=2))
    assert [items(kind, "cached") for kind in ("image", "audio", "video")] == [1, 1, 0]
    assert [items(kind, "decoded") for kind in ("image", "audio", "video")] == [1, 1, 0]
    bad = asks(Item("image", b"no picture at all"), "Well?")
    thinker.failure(request_about("bad", bad, processor, speech=None))
    assert items("image", "failed") == 1
    assert items("image", "decoded") == 1
    assert change("omnirelay_media_decode_seconds_count", **OURS, kind="image") == 2
    assert change("omnirelay_media_decode_seconds_sum", **OURS, kind="image") > 0
    assert change("omnirelay_media_prepare_seconds_count", **OURS) == 3
    decoded = change("omnirelay_media_decode_seconds_sum", **OURS, kind="image")
    assert change("omnirelay_media_prepare_seconds_sum", **OURS) > decoded
