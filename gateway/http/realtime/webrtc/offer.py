"""The SDP offer of a client, checked, and the answer to it."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Final

from omnirelay.errors import InvalidRequestError

MAX_SDP_BYTES: Final = 2**16
MAX_LINES: Final = 1000
MAX_LINE: Final = 1024
MEDIA: Final = ("application", "audio")
_LINE: Final = re.compile(r"[a-z]=[\x20-\x7e\t]*")
_DROPPED: Final = ("a=candidate:", "a=end-of-candidates", "a=remote-candidates:")
_CANDIDATE: Final = re.compile(r"(a=candidate:\S+ \S+ udp \S+ )(\S+)( \S+ typ host.*)", re.IGNORECASE)


def read_offer(data: bytes) -> str:
    """Check an offer of one voice and one data channel on one transport, and return it without candidates.

    Nothing is ever sent to an address that a client names: its own checks, which prove that it is there, show
    where it is.  That also spares resolving the mDNS names behind which browsers hide their addresses.

    Raises:
        InvalidRequestError: It is no such offer, or exceeds a limit.
    """
    if len(data) > MAX_SDP_BYTES:
        raise _invalid(f"it has more than {MAX_SDP_BYTES} bytes")
    try:
        lines = data.decode("ascii").replace("\r\n", "\n").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise _invalid("it is not ASCII") from error
    if len(lines) > MAX_LINES or any(len(line) > MAX_LINE for line in lines):
        raise _invalid(f"it has more than {MAX_LINES} lines, or one with more than {MAX_LINE} characters")
    if lines[0] != "v=0" or not all(_LINE.fullmatch(line) for line in lines):
        raise _invalid("it is not SDP, which begins with v=0")
    media = sorted(line[2:].partition(" ")[0] for line in lines if line.startswith("m="))
    if tuple(media) != MEDIA:
        raise _invalid(
            f"it offers {', '.join(media) or 'nothing'}: one audio track and a data channel are needed"
        )
    sections = "\n".join(lines).split("\nm=")[1:]
    mids = [" ".join(_values(section.split("\n"), "a=mid:")) for section in sections]
    bundles = [each.split(" ") for each in _values(lines, "a=group:")]
    if len(set(mids)) < len(MEDIA) or ["BUNDLE", *mids] not in bundles:
        raise _invalid(
            "audio and data channel must share one transport: a=group:BUNDLE with the a=mid of both"
        )
    if not _values(lines, "a=fingerprint:"):
        raise _invalid("it has no a=fingerprint of a certificate for DTLS")
    kept = [line for line in lines if not line.startswith(_DROPPED)]
    return "\r\n".join([*kept, ""])


def advertise(answer: str, addresses: Sequence[str]) -> str:
    """Return an answer whose candidates name these addresses instead, if there are any."""
    if not addresses:
        return answer
    lines: list[str] = []
    for line in answer.split("\r\n"):
        found = _CANDIDATE.fullmatch(line)
        if found is None:
            lines.append(line)
            continue
        version = ipaddress.ip_address(found[2]).version
        same = [address for address in addresses if ipaddress.ip_address(address).version == version]
        lines += [f"{found[1]}{address}{found[3]}" for address in same]
    return "\r\n".join(lines)


def _values(lines: Iterable[str], prefix: str) -> list[str]:
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the SDP offer cannot be used: {problem}", "sdp")
