"""Pictures against transformers' ``load_image``."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.decoded import DecodedImage, Pixels
from services.thinker.media.decoder import MediaDecoder
from shared.vllm.torchvision_compat import declare_missing_operators
from tests.support.decoding import decoding
from tests.support.media import animate, drawing, encode_image, motion, picture, spoken

FORMATS = ("png", "jpeg", "webp", "gif", "bmp")
ORIENTATION = 0x112


def decoded(decoder: MediaDecoder, data: bytes) -> Pixels:
    image = decoder.decode("image", data, name="image 1")
    assert isinstance(image, DecodedImage)
    assert (image.pixels.dtype.name, image.pixels.ndim) == ("uint8", 3)
    return image.pixels


def expected(data: bytes) -> Pixels:
    declare_missing_operators()
    from transformers.image_utils import load_image  # noqa: PLC0415 - imports torchvision

    return np.asarray(load_image(Image.open(BytesIO(data))))


def png(width: int, height: int, pixels: bytes) -> bytes:
    """A file with the sides of one picture and the pixels of another."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("form", FORMATS)
def test_equals_transformers(decoder, form):
    for seed in range(3):
        data = picture(form, seed, 320 + seed, 240)
        assert np.array_equal(decoded(decoder, data), expected(data))
    assert np.array_equal(decoded(decoder, picture("png")), np.asarray(drawing()))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_every_mode_equals_transformers(decoder, mode):
    image = drawing().convert(mode)
    forms = {"CMYK": ("jpeg",), "L": FORMATS, "1": ("png", "gif"), "P": ("png", "gif")}
    for form in forms.get(mode, ("png", "webp")):
        data = encode_image(image, form)
        assert np.array_equal(decoded(decoder, data), expected(data)), form


def test_greys_of_16_bits_are_scaled(decoder):
    greys = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    file = BytesIO()
    Image.fromarray(greys).save(file, "PNG")
    pixels = decoded(decoder, file.getvalue())
    assert pixels.shape == (64, 64, 3)
    assert np.abs(pixels - greys[:, :, None] / 257).max() <= 0.5


@pytest.mark.parametrize("form", ["jpeg", "png", "webp"])
def test_a_photo_is_turned_upright(decoder, form):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        data = encode_image(drawing(), form, exif=exif)
        pixels = decoded(decoder, data)
        assert pixels.shape == ((240, 320, 3) if orientation < 5 else (320, 240, 3))
        assert np.array_equal(pixels, expected(data))


def test_the_first_frame_of_an_animation_is_a_picture(decoder):
    for form in ("png", "gif", "webp"):
        data = animate(motion(1.0, 5), form)
        assert np.array_equal(decoded(decoder, data), expected(data))


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_is_cut_short_is_refused(decoder, form):
    data = picture(form)
    for share in (0.99, 0.9, 0.5, 0.2, 0.05, 0.01):
        with pytest.raises(MediaError, match=r"^image 1: (the file is damaged or cut short|this is none)"):
            decoder.decode("image", data[: int(len(data) * share)], name="image 1")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "this is none of png, jpeg, webp, gif, bmp"),
        (spoken("wav"), "this is none of png, jpeg, webp, gif, bmp, but wav"),
        (encode_image(Image.new("RGB", (1, 1))), "it is 1 by 1 pixels; each side must have 8 at least"),
        (encode_image(Image.new("RGB", (7, 100))), "it is 7 by 100 pixels; each side must have 8 at least"),
        (encode_image(Image.new("RGB", (1601, 8))), "one side may be 200 times the other at most"),
        (b"\x89PNG\r\n\x1a\n", "damaged or cut short"),
        (b"\xff\xd8\xff" + bytes(100), "damaged or cut short"),
        (b"GIF89a" + bytes(100), "damaged or cut short|each side"),
        (b"RIFF\x10\0\0\0WEBPVP8X", "damaged or cut short"),
    ],
)
def test_what_is_no_picture_is_refused(decoder, data, message):
    with pytest.raises(MediaError, match=rf"^image 2: .*({message})"):
        decoder.decode("image", data, name="image 2")


def test_the_smallest_and_the_longest_picture_are_taken(decoder):
    assert decoded(decoder, encode_image(Image.new("RGB", (8, 8)))).shape == (8, 8, 3)
    assert decoded(decoder, encode_image(Image.new("RGB", (1600, 8)))).shape == (8, 1600, 3)


def huge_webp(name: bytes) -> bytes:
    sides = {
        b"VP8X": bytes(4) + (16_382).to_bytes(3, "little") * 2,
        b"VP8L": b"\x2f" + (16_382 | 16_382 << 14).to_bytes(4, "little"),
        b"VP8 ": bytes(3) + b"\x9d\x01\x2a" + (16_383).to_bytes(2, "little") * 2,
    }[name]
    return b"RIFF\x64\0\0\0WEBP" + name + b"\x0a\0\0\0" + sides + bytes(100)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decompressed(decoder):
    decoded(decoder, picture())
    bomb = png(20_000, 20_000, bytes(1_000_000))
    with pytest.raises(MediaTooLargeError, match=r"image 1: it is 20000 by 20000 pixels, 400,000,000 in all"):
        decoder.decode("image", bomb, name="image 1")
    for name in (b"VP8X", b"VP8L", b"VP8 "):
        with pytest.raises(MediaTooLargeError, match="it is 16383 by 16383 pixels"):
            decoder.decode("image", huge_webp(name), name="image 1")


def test_a_picture_may_have_as_many_pixels_and_bytes_as_allowed_and_no_more():
    with decoding(max_image_pixels=10_000, max_decoded_bytes=27_000) as small:
        assert decoded(small, encode_image(Image.new("RGB", (90, 100)))).shape == (100, 90, 3)
        with pytest.raises(MediaTooLargeError, match="27,300 bytes when it is decoded; at most 27,000"):
            small.decode("image", encode_image(Image.new("RGB", (91, 100))), name="image 1")
        with pytest.raises(MediaTooLargeError, match="10,100 in all; at most 10,000"):
            small.decode("image", encode_image(Image.new("RGB", (101, 100))), name="image 1")
