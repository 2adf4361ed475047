"""What a gateway tells the actor on its node about the stack."""

from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from omnirelay import StatusReport
from omnirelay.errors import GatewayUnreachableError, MessageError
from ops.target import probe_target
from shared.config import Config

UNDERRUNS: Final = "omnirelay_playback_underruns_total"
TIMEOUT_S: Final = 5.0
MAX_METRICS_BYTES: Final = 2**24


@dataclass(frozen=True)
class GatewayReport:
    """What a gateway tells at one moment.

    Attributes:
        status: Its stages and requests.
        underruns: Gaps in playback since its start; 0 without ``gateway.monitor``.
    """

    status: StatusReport
    underruns: int


async def ask(config: Config, number: int) -> GatewayReport | None:
    """Ask the gateway of a number, on this node; None while it does not answer."""
    try:
        status = await probe_target(config, number).status()
        return GatewayReport(status, await _underruns(config.gateway.own_addresses(number)["monitor"]))
    except (GatewayUnreachableError, MessageError, aiohttp.ClientError, TimeoutError):
        return None


async def _underruns(monitor: str | None) -> int:
    if monitor is None:
        return 0
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{monitor.replace('tcp:', 'http:', 1)}/metrics") as response,
    ):
        text = (await response.content.read(MAX_METRICS_BYTES)).decode()
    return read_underruns(text)


def read_underruns(exposition: str) -> int:
    """The counter in a gateway's metrics; 0 where it is absent."""
    samples = (sample for family in text_string_to_metric_families(exposition) for sample in family.samples)
    return int(next((sample.value for sample in samples if sample.name == UNDERRUNS), 0))
