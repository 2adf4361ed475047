"""What a camera sends, and the video file of the same frames and sound that FFmpeg writes."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from io import BytesIO

import av
import numpy as np
from av.packet import Packet
from PIL import Image

from gateway.fairness.quota import MemoryBudget
from gateway.http.encoding.encoders import wav_header
from gateway.http.realtime.input_buffers import InputVideo
from omnirelay.content import MediaPart
from shared.config import MediaConfig
from tests.support.media import encode_image, motion, speech

FRAME_MS = 500


@cache
def frames(count: int, width: int = 160, height: int = 112, form: str = "jpeg") -> tuple[bytes, ...]:
    """Files of pictures on which shapes move, two a second."""
    moving = motion(count * FRAME_MS / 1000, 1000 // FRAME_MS, width, height)
    return tuple(encode_image(Image.fromarray(each), form) for each in moving)


def said(seconds: float) -> bytes:
    """So much speech, as samples of the input audio buffer."""
    samples = np.resize(speech(rate=24_000), round(24_000 * seconds))
    return (samples * 32767).astype("<i2").tobytes()


def as_sent(pictures: Sequence[bytes], pcm: bytes) -> bytes:
    """The video that a session makes of pictures, two a second, and of what is said meanwhile."""
    video = InputVideo(MediaConfig(), MemoryBudget(2**30, lambda: 1).of("a"))
    for at, picture in enumerate(pictures):
        video.append(picture, at * FRAME_MS)
    [part] = video.recorded(memoryview(bytes(wav_header(len(pcm))) + pcm), 0).parts
    assert isinstance(part, MediaPart)
    return bytes(part.data or b"")


def video_file(pictures: Sequence[bytes], pcm: bytes, rate: int = 24_000) -> bytes:
    """A QuickTime file of JPEG pictures, two a second, and int16 samples, neither of them encoded again."""
    file = BytesIO()
    with av.open(file, "w", format="mov", options={"fflags": "+bitexact"}) as container:
        width, height = Image.open(BytesIO(pictures[0])).size
        seen = container.add_mux_stream("mjpeg", rate=1000 // FRAME_MS, width=width, height=height)
        heard = container.add_stream("pcm_s16le", rate=rate, layout="mono")
        for at, picture in enumerate(pictures):
            packet = Packet(picture)
            packet.stream, packet.time_base = seen, Fraction(1, 1000)
            packet.pts = packet.dts = at * FRAME_MS
            packet.is_keyframe = True
            container.mux(packet)
        samples = np.frombuffer(pcm, "<i2")[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        container.mux(heard.encode(frame))
        container.mux(heard.encode(None))
    return file.getvalue()


def read_file(data: bytes) -> tuple[list[bytes], bytes, list[float]]:
    """The pictures and the samples in a video file as they were written, and the times of the pictures."""
    seen, heard, times = [], b"", []
    with av.open(BytesIO(data), "r") as container:
        for packet in container.demux():
            if packet.size and packet.stream.type == "audio":
                heard += bytes(packet)
            elif packet.size and packet.pts is not None and packet.time_base is not None:
                seen.append(bytes(packet))
                times.append(float(packet.pts * packet.time_base))
    return seen, heard, times
