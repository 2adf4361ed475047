"""What a camera sees while somebody speaks: to the model it is a video file of the same frames and sound."""

import numpy as np
import pytest

from services.thinker.media.decoded import DecodedVideo
from services.thinker.media.decoder import MediaDecoder
from tests.support.answers import Reference
from tests.support.camera import as_sent, frames, said, video_file
from tests.support.conversations import Item, Processor, asks, expected
from tests.support.media import motion, spoken
from tests.support.thinking import ThinkerRig
from tests.thinker.test_thinker_media import check, request_of


@pytest.mark.parametrize("seconds", [1, 3, 6])
def test_text_and_rows_are_transformers_of_a_video_file(
    thinker: ThinkerRig, processor: Processor, reference: Reference, seconds: int
) -> None:
    pictures, pcm = frames(2 * seconds), said(seconds)
    file = asks(Item("video", video_file(pictures, pcm)), "What?", use_audio_in_video=True)
    answer = expected(file, processor, reference)
    sent = asks(Item("video", as_sent(pictures, pcm)), "What?", use_audio_in_video=True)
    thinker.run(request_of("a", sent, processor))
    check(thinker, "a", answer)
    # It is seen: without motion the rows are others.
    still = asks(Item("video", as_sent(pictures[:1], pcm)), "What?", use_audio_in_video=True)
    thinker.run(request_of("b", still, processor))
    difference = thinker.rows("b")[: len(answer.prompt)] - answer.rows[: len(answer.prompt)]
    assert float(difference.abs().max()) > 0.01


@pytest.mark.parametrize("other", ["sound", "pictures"])
def test_what_was_computed_for_other_sound_or_pictures_is_not_taken(
    chunked_thinker: ThinkerRig, processor: Processor, reference: Reference, other: str
) -> None:
    pictures, pcm = frames(6), said(3)
    sent = as_sent(pictures, np.frombuffer(pcm, "<i2")[::-1].tobytes())
    if other == "pictures":
        sent = as_sent(pictures[::-1], pcm)
    # Behind a recording sound comes first in vLLM's order.
    before = [Item("audio", spoken("wav", "Hi."))] * (other == "pictures")
    asked = asks(*before, Item("video", sent), "What?", use_audio_in_video=True)
    chunked_thinker.run(request_of("first", asked, processor))
    asked = asks(*before, Item("video", as_sent(pictures, pcm)), "What?", use_audio_in_video=True)
    file = asks(*before, Item("video", video_file(pictures, pcm)), "What?", use_audio_in_video=True)
    chunked_thinker.run(request_of("second", asked, processor))
    check(chunked_thinker, "second", expected(file, processor, reference))


@pytest.mark.parametrize("form", ["jpeg", "png"])
def test_frames_are_seen_as_they_were_taken(decoder: MediaDecoder, form: str) -> None:
    sent = as_sent(frames(6, form=form), said(2.7))
    seen = decoder.decode("video", sent, name="video 1", with_audio=True)
    assert isinstance(seen, DecodedVideo)
    assert seen.audio is not None
    assert seen.audio.size == round(2.7 * 16_000)
    error = np.abs(seen.frames.astype(int) - motion(3.0, 2, 160, 112)).mean()
    assert error == 0 if form == "png" else error < 4
