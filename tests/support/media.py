"""Real media for tests: speech, drawings, and videos of moving shapes, in the formats that people send.

Everything is a function of its arguments alone, and made once.
"""

import colorsys
import math
import subprocess
import sys
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal, cast

import av
import espeakng_loader
import numpy as np
import soxr
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Samples = NDArray[np.float32]
Frames = NDArray[np.uint8]
SoundFormat = Literal["wav", "flac", "ogg", "mp3", "aac", "m4a", "webm"]
VideoFormat = Literal["mp4", "mov", "webm", "mkv"]

SENTENCE: Final = "The quick brown fox jumps over the lazy dog."
SOUND_FORMATS: Final[tuple[SoundFormat, ...]] = ("wav", "flac", "ogg", "mp3", "aac", "m4a", "webm")
VIDEO_FORMATS: Final[tuple[VideoFormat, ...]] = ("mp4", "mov", "webm", "mkv")

_CODECS: Final[dict[str, str]] = {
    "wav": "pcm_s16le",
    "flac": "flac",
    "ogg": "libopus",
    "mp3": "libmp3lame",
    "aac": "aac",
    "m4a": "aac",
    "mp4": "aac",
    "mov": "aac",
    "webm": "libopus",
    "mkv": "libopus",
}
_PICTURE_CODECS: Final[dict[str, str]] = {
    "mp4": "libx264",
    "mov": "libx264",
    "webm": "libvpx-vp9",
    "mkv": "libx264",
}
_MUXERS: Final[dict[str, str]] = {"aac": "adts", "m4a": "ipod", "mkv": "matroska"}
_LAYOUTS: Final = {1: "mono", 2: "stereo", 3: "2.1", 4: "quad", 5: "5.0", 6: "5.1"}
_INTEGERS: Final[dict[str, type[np.signedinteger[Any]]]] = {"s16": np.int16, "s32": np.int32}
_SAMPLE_FORMATS: Final = {"int16": "s16p", "int32": "s32p", "float32": "fltp"}


@cache
def speech(text: str = SENTENCE, rate: int = 16_000) -> Samples:
    """The text spoken by espeak-ng: float32 in [-1, 1], mono, read-only."""
    spoken = subprocess.run(
        [
            sys.executable,
            "-I",
            str(Path(__file__).with_name("espeak.py")),
            espeakng_loader.get_library_path(),
            espeakng_loader.get_data_path(),
            text,
        ],
        capture_output=True,
        check=True,
    )
    samples = np.frombuffer(spoken.stdout, "<i2").astype(np.float32) / np.float32(2**15)
    resampled: Samples = soxr.resample(samples, int(spoken.stderr), rate)
    resampled.flags.writeable = False
    return resampled


def encode_audio(
    samples: Samples, rate: int, form: SoundFormat, *, codec: str | None = None, **options: str
) -> bytes:
    """A sound file.

    Args:
        samples: ``[n]`` or ``[channels, n]``, float32 in [-1, 1].
        rate: Samples a second.
        form: Container, and with it the codec.
        codec: Another codec that fits in the container.
        options: Of FFmpeg's muxer, such as ``live="1"`` for a webm as browsers record it.
    """
    file = BytesIO()
    with _open(file, form, options) as container:
        stream = _add_sound(container, codec or _CODECS[form], rate, np.atleast_2d(samples).shape[0])
        _write_sound(container, stream, samples, rate)
    return file.getvalue()


@cache
def spoken(form: SoundFormat = "wav", text: str = SENTENCE, rate: int = 16_000) -> bytes:
    """A file of the text spoken."""
    return encode_audio(speech(text, rate), rate, form)


@cache
def drawing(seed: int = 0, width: int = 320, height: int = 240) -> Image.Image:
    """A picture with a gradient, shapes and a word, RGB; not to be drawn upon."""
    generator = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, width * height).reshape(height, width)
    image = Image.fromarray(
        np.stack([ramp, ramp[::-1], np.full_like(ramp, generator.integers(256))], axis=2).astype(np.uint8)
    )
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, right = sorted(generator.integers(0, width, 2).tolist())
        top, bottom = sorted(generator.integers(0, height, 2).tolist())
        colour = tuple(generator.integers(0, 256, 3).tolist())
        draw.ellipse((left, top, right, bottom), fill=colour, outline="black")
    size = max(8, height // 8)
    draw.text((width // 10, height // 2), f"drawing {seed}", fill="white", font=ImageFont.load_default(size))
    return image


def encode_image(image: Image.Image, form: str = "png", **options: Any) -> bytes:
    """A picture file; ``options`` are those of Pillow."""
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@cache
def picture(form: str = "png", seed: int = 0, width: int = 320, height: int = 240) -> bytes:
    """A file of a drawing."""
    return encode_image(drawing(seed, width, height), form)


@cache
def motion(
    seconds: float = 2.0, rate: int = 24, width: int = 320, height: int = 240, seed: int = 0
) -> Frames:
    """Frames on which shapes move and the colour of the ground changes, ``[t, h, w, 3]``, read-only."""
    count = round(seconds * rate)
    frames = np.empty((count, height, width, 3), np.uint8)
    for index in range(count):
        turn = (index / rate + seed / 7) % 1.0
        ground = tuple(
            round(255 * part) for part in colorsys.hsv_to_rgb((index / max(count, 1)) % 1, 0.4, 0.5)
        )
        image = Image.new("RGB", (width, height), ground)
        draw = ImageDraw.Draw(image)
        x, y = width * turn, height * (0.5 + 0.3 * math.sin(2 * math.pi * turn))
        radius = min(width, height) / 6
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill="yellow")
        draw.rectangle((width - x, y / 2, width - x + radius, y / 2 + radius), fill="blue")
        draw.text((4, 4), str(index), fill="white", font=ImageFont.load_default(max(8, height // 8)))
        frames[index] = np.asarray(image)
    frames.flags.writeable = False
    return frames


@cache
def clip(
    form: VideoFormat = "mp4",
    seconds: float = 2.0,
    rate: int = 24,
    width: int = 320,
    height: int = 240,
    *,
    text: str | None = None,
    seed: int = 0,
) -> bytes:
    """A video of moving shapes: mp4 and mov with h264 and aac, webm with vp9, mkv with h264, both with opus.

    Args:
        form: Container, and with it the codecs.
        seconds: Length of the pictures.
        rate: Frames a second.
        width: In pixels, even.
        height: In pixels, even.
        text: Spoken in the sound track, which is as long as the pictures; without it there is none.
        seed: Other shapes.
    """
    samples = None
    if text is not None:
        samples = np.zeros(round(seconds * 48_000), np.float32)
        words = speech(text, 48_000)[: samples.size]
        samples[: words.size] = words
    return encode_video(motion(seconds, rate, width, height, seed), rate, form, samples=samples)


def encode_video(
    frames: Frames,
    rate: int | Fraction,
    form: VideoFormat = "mp4",
    *,
    codec: str | None = None,
    encoder: dict[str, str] | None = None,
    samples: Samples | None = None,
    **options: str,
) -> bytes:
    """A video file.

    Args:
        frames: ``[t, h, w, 3]``, RGB; height and width are even.
        rate: Frames a second.
        form: Container, and with it the codecs.
        codec: Another codec of the pictures.
        encoder: Options of its encoder.
        samples: The sound track, mono at 48 kHz.
        options: Of FFmpeg's muxer, such as ``movflags="faststart"``.
    """
    file = BytesIO()
    with _open(file, form, options) as container:
        pictures = _add_pictures(
            container, codec or _PICTURE_CODECS[form], rate, frames.shape[2], frames.shape[1]
        )
        if encoder is not None:
            pictures.codec_context.options = encoder
        sound = None if samples is None else _add_sound(container, _CODECS[form], 48_000, 1)
        _write_pictures(container, pictures, frames)
        if sound is not None and samples is not None:
            _write_sound(container, sound, samples, 48_000)
    return file.getvalue()


def animate(frames: Frames, form: str = "png", duration_ms: int | list[int] = 100, **options: Any) -> bytes:
    """An animated png, gif or webp of frames ``[t, h, w, 3]``."""
    first, *others = (Image.fromarray(frame) for frame in frames)
    return encode_image(
        first, form, save_all=True, append_images=others, duration=duration_ms, loop=0, **options
    )


def _open(file: BytesIO, form: str, options: dict[str, str]) -> OutputContainer:
    return av.open(
        file,
        "w",
        format=_MUXERS.get(form, form),
        # Without bitexact, some muxers write a random id.
        options={"fflags": "+bitexact", **options},
        # ``movflags="faststart"`` reads again what it wrote.
        io_open=lambda _url, _flags, _options: BytesIO(file.getvalue()),
    )


def _add_sound(container: OutputContainer, codec: str, rate: int, channels: int) -> AudioStream:
    stream = container.add_stream(codec, rate=rate, layout=_LAYOUTS[channels])
    return cast(AudioStream, stream)


def _add_pictures(
    container: OutputContainer, codec: str, rate: int | Fraction, width: int, height: int
) -> VideoStream:
    stream = cast(VideoStream, container.add_stream(codec, rate=rate))
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    # One thread, and code that does not depend on the processor: the same bytes each time.
    stream.codec_context.thread_count = 1
    stream.codec_context.options = {
        "preset": "veryfast",
        "x264-params": "cpu-independent=1",
        "deadline": "realtime",
        "cpu-used": "8",
    }
    return stream


def _write_pictures(container: OutputContainer, stream: VideoStream, frames: Frames) -> None:
    for pixels in frames:
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def _write_sound(container: OutputContainer, stream: AudioStream, samples: Samples, rate: int) -> None:
    planes: NDArray[Any] = np.atleast_2d(samples)
    kind = _INTEGERS.get(stream.format.name.removesuffix("p"))
    if kind is not None:
        # Exact for samples that were integers before; FFmpeg's own conversion need not be.
        top = -float(np.iinfo(kind).min)
        planes = np.clip(np.round(planes.astype(np.float64) * top), -top, top - 1).astype(kind)
    for frame in _sound_frames(planes, stream, rate):
        container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def _sound_frames(planes: NDArray[Any], stream: AudioStream, rate: int) -> Iterable[av.AudioFrame]:
    """Frames of at most a second; the stream cuts them to what its codec wants."""
    form = _SAMPLE_FORMATS[planes.dtype.name]
    for start in range(0, planes.shape[1], rate):
        piece = np.ascontiguousarray(planes[:, start : start + rate])
        frame = av.AudioFrame.from_ndarray(piece, format=form, layout=stream.layout.name)
        frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
        yield frame
