"""Gateways that begin requests anew, and requests that are half answered when something happens."""

from typing import Any

from omnirelay import AsyncClient
from omnirelay.client.answer import AsyncAnswer
from shared.config import Config
from shared.messages import StageName, ThinkRequest
from tests.gateway.bench import Bench, Configure
from tests.gateway.fake_stages import until
from tests.gateway.scripted import CHUNKS, CODES, Script

SOON_S = 0.8
"""When silence counts, in tests that wait for it; in the others a slow machine must not look like it."""


def recovering(configure: Configure, limits: dict[str, Any] | None = None, **gateway: Any) -> Config:
    values = {"heartbeat_timeout_s": 10.0, "resume_attempts": 3, "resume_wait_s": 10.0}
    return configure(values | gateway, **(limits or {}))


def is_lost(b: Bench, stage: StageName) -> bool:
    replica = b.process.gateway.registry.get(stage, "first")
    return replica is not None and replica.down


async def half_played(
    b: Bench, client: AsyncClient, **options: Any
) -> tuple[Script, AsyncAnswer, ThinkRequest]:
    """A request of which about the half of every stream is answered."""
    script = Script(b)
    answer = client.chat("Hi", **options)
    request = await b.stages.request(0)
    await script.play(request, 0.5, 0.5, 0.4)
    return script, answer, request


async def seen(b: Bench, script: Script, request: ThinkRequest, point: tuple[float, float, float]) -> None:
    """Wait until the gateway has taken what was sent up to a point."""
    active = b.process.gateway.dispatcher.of(request.request_id)
    assert active is not None
    record = active.record
    sizes = len(script.text), len(CODES), len(CHUNKS)
    lengths = [round(share * size) for share, size in zip(point, sizes, strict=True)]
    await until(
        lambda: [len(record.text.token_ids), len(record.codec.token_ids), record.audio.chunks] == lengths
    )
