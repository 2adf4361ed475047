"""URLs of media: what they hold is decoded exactly or refused, and hosts are read in one way only."""

import base64
import ipaddress
from unittest import mock
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.input import urls
from gateway.input.fetch import is_public
from gateway.input.urls import HttpsUrl, decode_data_url, is_data_url, parse_host, parse_https
from omnirelay.errors import MediaError, MediaTooLargeError, MediaUnreachableError

HEADERS = ["data:", "DATA:image/png", "data:text/plain;charset=utf-8", "data:;x=y"]


def escaped(text: str, positions: set[int]) -> str:
    """The same text with some characters written as escapes."""
    return "".join(f"%{ord(each):02x}" if index in positions else each for index, each in enumerate(text))


@given(
    st.binary(max_size=60),
    st.sampled_from(HEADERS),
    st.booleans(),
    st.sets(st.integers(0, 80)),
    st.integers(3, 12),
)
def test_base64_is_whole(content: bytes, header: str, padded: bool, positions: set[int], piece: int) -> None:
    payload = base64.b64encode(content).decode()
    payload = escaped(payload if padded else payload.rstrip("="), positions)
    with mock.patch.object(urls, "PIECE_CHARACTERS", piece):
        url = f"{header};base64,{payload}"
        assert is_data_url(url)
        assert decode_data_url("image 1", url, len(content) + 2) == content


@given(st.binary(max_size=60), st.sampled_from(HEADERS), st.integers(3, 12))
def test_percent_encoding_comes_out_whole(content: bytes, header: str, piece: int) -> None:
    with mock.patch.object(urls, "PIECE_CHARACTERS", piece):
        url = f"{header},{quote_from_bytes(content)}"
        assert decode_data_url("image 1", url, len(content)) == content


@given(st.binary(min_size=1, max_size=60), st.booleans())
def test_what_is_too_large_is_refused_before_it_is_decoded(content: bytes, as_base64: bool) -> None:
    payload = base64.b64encode(content).decode() if as_base64 else quote_from_bytes(content)
    url = f"data:{';base64' if as_base64 else ''},{payload}"
    assert len(decode_data_url("image 1", url, len(content))) == len(content)
    with (
        mock.patch.object(urls, "_percent_decoded", side_effect=AssertionError),
        pytest.raises(
            MediaTooLargeError, match=rf"image 1: {len(content)} bytes, at most {len(content) - 1}"
        ),
    ):
        decode_data_url("image 1", url, len(content) - 1)


def test_too_many_escapes_are_refused_before_they_are_decoded() -> None:
    url = "data:," + "%41" * 100
    with mock.patch.object(urls, "MAX_ESCAPES", 100):
        assert decode_data_url("image 1", url, 1000) == b"A" * 100
    with (
        mock.patch.object(urls, "MAX_ESCAPES", 99),
        mock.patch.object(urls, "_percent_decoded", side_effect=AssertionError),
        pytest.raises(MediaTooLargeError, match="100 %-escapes, at most 99 are taken: write it in base64"),
    ):
        decode_data_url("image 1", url, 1000)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("data:", "no comma"),
        ("data:" + "x" * 2000 + ",", "no comma"),
        ("data:,%4", "hexadecimal"),
        ("data:,%zz", "hexadecimal"),
        ("data:,é", "not ASCII"),
        ("data:;base64,a", "1 more than"),
        ("data:;base64,YQ==YQ==", "after padding"),
        ("data:;base64,YWE=YQ", "behind its padding"),
        ("data:;base64,Y Q=", "Only base64 data"),
        ("data:;base64,Y-Q_", "Only base64 data"),
        # As some servers take the frames of a video.
        ("data:video/jpeg;base64," + ",".join(["/9j/4AAA"] * 1000), "Only base64 data"),
    ],
)
def test_what_cannot_be_decoded_is_explained(url: str, told: str) -> None:
    with pytest.raises(MediaError, match=told) as raised:
        decode_data_url("video 1", url, 10_000)
    assert not isinstance(raised.value, MediaTooLargeError)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.com", HttpsUrl("example.com", 443, "/")),
        ("HTTPS://Example.COM:8443/a%2Fb?c=%20#there", HttpsUrl("example.com", 8443, "/a%2Fb?c=%20")),
        ("https://example.com#@evil.test/x@", HttpsUrl("example.com", 443, "/")),
        ("https://example.com?q", HttpsUrl("example.com", 443, "/?q")),
        ("https://example.com/a@b:c\\d", HttpsUrl("example.com", 443, "/a@b:c\\d")),
    ],
)
def test_https_urls_are_taken_apart(url: str, expected: HttpsUrl) -> None:
    assert parse_https("image 1", url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://example.com/x",
        "ftp://example.com/x",
        "file:///etc/passwd",
        "//example.com/x",
        "https:example.com/x",
        "https:///x",
        "https://user@example.com/x",
        "https://user:secret@example.com/x",
        "https://example.com@evil.test/x",
        "https://example.com:443@evil.test/x",
        "https://example.com\\@evil.test/x",
        "https://example.com%5c@evil.test/x",
        "https://example.com\\.evil.test/x",
        "https://ex\tample.com/x",
        "https://example.com/x\r\nHost: evil.test",
        "https://example.com/ x",
        "https://example。com/x",
        "https://\uff45xample.com/x",
        "https://example.com/é",
        "https://%65xample.com/x",
        "https://[::1]/x",
        "https://[::ffff:127.0.0.1]/x",
        "https://example.com:/x",
        "https://example.com:0/x",
        "https://example.com:65536/x",
        "https://example.com:+443/x",
        "https://example.com:443:443/x",
        "https://example.com:\uff14\uff14\uff13/x",
        "https://" + "a" * 254 + "/x",
        "https://example.com/" + "x" * 9000,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(MediaUnreachableError, match=r"^image 1: "):
        parse_https("image 1", url)


def test_hosts_of_the_configuration() -> None:
    assert parse_host("Media.Example.com") == ("media.example.com", 443)
    assert parse_host("media.example.com:8443") == ("media.example.com", 8443)
    wrong = ("https://example.com", "example.com/x", "*.example.com", "example.com:99999", "[::1]")
    assert [parse_host(each) for each in ("", "a b", *wrong)] == [None] * 7


PRIVATE = """
127.0.0.1 127.8.8.8 0.0.0.0 0.1.2.3 10.1.2.3 172.16.0.1 192.168.1.1 100.64.0.1 169.254.169.254 192.0.0.8
198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::127.0.0.1 fe80::1 fe80::1%eth0 fc00::1 fec0::1 ff02::1
2001:db8::1 3fff::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b::10.0.0.1
2002:7f00:1:: 2002:0a00:0001::1 2001:0:4136:e378:8000:63bf:f5ff:fffe
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::8.8.8.8"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_ipv6_address_is_as_public_as_the_ipv4_address_in_it(address: ipaddress.IPv4Address) -> None:
    public = is_public(str(address))
    for form in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(form) is public
