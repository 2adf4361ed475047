"""The media section of the configuration."""

from typing import Annotated, Literal

from pydantic import Field

from shared.config.values import Bytes, Section
from shared.messages import MAX_MEDIA_ITEMS

AudioClamp = Literal["recording", "causal"]


class MediaConfig(Section):
    """Limits on audio, images and videos, checked before decoding; see docs/configuration.md."""

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
