"""What the stages send of an answer, as the client's events."""

from gateway.requests.active import ActiveRequest
from gateway.requests.record import Delta
from omnirelay.events import AudioEvent, CodecEvent, DoneEvent, TextEvent
from shared.messages import SAMPLE_RATE, CodecDelta, TextDelta


def event_of(active: ActiveRequest, delta: Delta) -> TextEvent | CodecEvent | AudioEvent | None:
    """The event of a delta that the record has taken; none if it tells the client nothing."""
    if isinstance(delta, TextDelta):
        return _text_event(active, delta)
    if isinstance(delta, CodecDelta):
        if not active.resumable or not (delta.token_ids or delta.finish_reason):
            return None
        return CodecEvent(token_ids=delta.token_ids, finish_reason=delta.finish_reason)
    number = active.record.audio.chunks - 1
    delay_ms = round(1000 * active.meter.start_delay_s) if number == 0 else 0
    return AudioEvent(seq=number, pcm=bytes(delta.data.view), start_delay_ms=delay_ms)


def done_event(active: ActiveRequest) -> DoneEvent:
    """The last event of a complete answer."""
    record = active.record
    speech = record.think.speech
    return DoneEvent(
        request_id=record.request_id,
        text=active.detokenizer.text,
        prompt_token_ids=record.think.prompt_token_ids,
        text_token_ids=record.text.token_ids,
        codec_token_ids=record.codec.token_ids,
        audio_seconds=record.audio.samples / SAMPLE_RATE,
        finish_reason=record.text.finish_reason or "stop",
        codec_finish_reason=record.codec.finish_reason,
        seed=record.think.seed,
        speaker=speech.speaker if speech else None,
        state_seconds=record.lifecycle.offsets(),
        prompt_tokens=record.prompt.tokens,
        cached_prompt_tokens=record.prompt.cached_tokens,
    )


def _text_event(active: ActiveRequest, delta: TextDelta) -> TextEvent | None:
    text = active.detokenizer.push(delta.token_ids, last=delta.finish_reason is not None)
    if active.detokenizer.stopped:
        active.record.text.finish_reason = "stop"
    reason = active.record.text.finish_reason if active.resumable else None
    if not (delta.token_ids or text or reason):
        return None
    return TextEvent(token_ids=delta.token_ids, text=text, logprobs=delta.logprobs, finish_reason=reason)
