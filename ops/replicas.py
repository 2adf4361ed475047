"""Where the further replicas of a stage listen, which ``omnirelay up`` starts on one machine."""

from typing import Final

from shared.config import Config
from shared.messages import StageName

HTTP_PORTS_APART: Final = 10
"""Each further replica serves HTTP so many ports above the one before."""


def own_addresses(config: Config, name: StageName, number: int) -> dict[str, str | None]:
    """Give ``inbox`` and ``http`` of a further replica: it cannot listen where the first does.

    Args:
        config: The stack's.
        name: The stage.
        number: Of the replica, from 2.
    """
    stage = config.stage(name)
    if stage.inbox.startswith("ipc://"):
        inbox = f"{stage.inbox}.{number}"
    else:
        inbox = f"{stage.inbox.rpartition(':')[0]}:*"
    http = None
    if stage.http is not None:
        host, _, port = stage.http.rpartition(":")
        http = f"{host}:{int(port) + HTTP_PORTS_APART * (number - 1)}"
    return {"inbox": inbox, "http": http}
