"""The section of the configuration that bounds sounds, pictures and videos."""

from typing import Annotated

from pydantic import Field

from shared.config.values import Bytes, Section
from shared.messages import MAX_MEDIA_ITEMS


class MediaConfig(Section):
    """What sounds, pictures and videos a request may bring; checked before anything large is made of them.

    Attributes:
        max_item_bytes: Largest file.
        max_request_bytes: All files of a request together.
        max_audios: Most sounds of a request.
        max_images: Most pictures of a request.
        max_videos: Most videos of a request.
        max_audio_seconds: Longest sound; the checkpoint may allow less.
        min_image_side: A picture or video frame with a shorter side is refused; in pixels.
        max_image_pixels: Largest picture, and largest frame of a video.
        max_video_seconds: Longest video.
        max_video_frames: Most frames of a video after sampling, two a second.
        max_decoded_bytes: Most bytes of one item decoded; the frames of a video that would need more are
            scaled down while it is decoded.
        max_held_bytes: While the thinker holds more bytes of prepared items, further requests wait.
        decoders: Processes of the thinker that decode.
        decode_timeout_s: An item that takes longer to decode is refused.
        cache_bytes: Prepared items kept for the next request with the same file; 0 keeps none.
        url_hosts: Hosts from which the gateway may fetch media by https; none means by value only.
        url_timeout_s: Longest time for fetching one item.
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
    max_decoded_bytes: Bytes = 384 * 2**20
    max_held_bytes: Bytes = 2**30
    decoders: Annotated[int, Field(gt=0)] = 2
    decode_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    url_hosts: list[str] = Field(default_factory=list)
    url_timeout_s: Annotated[float, Field(gt=0)] = 10.0
