"""The media section of the configuration."""

from typing import Annotated, Literal

from pydantic import Field

from shared.config.values import Bytes, Section
from shared.messages import MAX_MEDIA_ITEMS

AudioClamp = Literal["recording", "causal"]


class MediaConfig(Section):
    """Limits on audio, images and videos, checked before decoding.

    Attributes:
        max_item_bytes: Largest file.
        max_request_bytes: All files of a request together.
        max_audios: Audio items of a request.
        max_images: Images of a request.
        max_videos: Videos of a request.
        max_audio_seconds: Longest audio. The checkpoint may allow less.
        min_image_side: Shortest side of an image or video, in pixels.
        max_image_pixels: Largest image, and largest frame of a video.
        max_video_seconds: Longest video.
        max_video_frames: Most frames of a video after sampling.
        realtime_fps: Frames of a camera kept per second, 1 to 2. See docs/api-realtime.md#a-camera.
        realtime_video_seconds: Most seconds of a camera that go with a turn, 2 to 300.
        realtime_video_tokens: Most tokens of all frames in a session's prompt, at least 64. Older turns lose
            theirs first.
        max_decoded_bytes: Most bytes of one decoded item. Video frames are scaled down to fit.
        max_held_bytes: While the thinker holds more prepared media, further requests with media wait.
        audio_clamp: What clamps quiet mel frames: the loudest moment of the ``recording``, as in
            transformers; or ``causal``, the loudest so far, which keeps early computed audio valid and
            differs from transformers. See docs/stages.md#prefill-before-the-request.
        decoders: Decoder processes of the thinker. One starts with it, others on first use.
        decode_timeout_s: Longest time to decode an item.
        cache_bytes: Cache of prepared items. ``0``: none.
        url_hosts: Hosts from which the gateway may fetch media by https: exact names, with ``:PORT`` if not
            443.
        url_timeout_s: Longest time to fetch one item.
    """

    max_item_bytes: Bytes = 64 * 2**20
    max_request_bytes: Bytes = 96 * 2**20
    max_audios: Annotated[int, Field(ge=0, le=MAX_MEDIA_ITEMS)] = 8
    max_images: Annotated[int, Field(ge=0, le=MAX_MEDIA_ITEMS)] = 16
    max_videos: Annotated[int, Field(ge=0, le=MAX_MEDIA_ITEMS)] = 4
    max_audio_seconds: Annotated[float, Field(gt=0)] = 300.0
    min_image_side: Annotated[int, Field(gt=0)] = 8
    max_image_pixels: Annotated[int, Field(gt=0)] = 50_000_000
    max_video_seconds: Annotated[float, Field(gt=0)] = 300.0
    max_video_frames: Annotated[int, Field(ge=2)] = 600
    realtime_fps: Annotated[float, Field(ge=1, le=2)] = 2.0
    realtime_video_seconds: Annotated[int, Field(ge=2, le=300)] = 30
    realtime_video_tokens: Annotated[int, Field(ge=64)] = 8192
    max_decoded_bytes: Bytes = 384 * 2**20
    max_held_bytes: Bytes = 2**30
    audio_clamp: AudioClamp = "recording"
    decoders: Annotated[int, Field(gt=0)] = 2
    decode_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    url_hosts: list[str] = Field(default_factory=list)
    url_timeout_s: Annotated[float, Field(gt=0)] = 10.0
