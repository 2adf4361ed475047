"""Reports of a gateway that knows more than the client."""

import msgspec

from omnirelay.status import StageLimits, StageLoad, StatusReport


def test_fields_of_a_later_gateway_are_ignored() -> None:
    stage = {
        "name": "talker",
        "replica": "1",
        "pid": 7,
        "state": "ready",
        "limits": {"max_positions": 8, "codec": {"frame_samples": 320, "later": 1}, "later": [1]},
        "load": {"running": 2, "later": {}},
        "later": None,
    }
    gateway = {"pid": 1, "uptime_s": 2.0, "peak_memory_bytes": 3, "model": "m", "later": 1}
    rest = {"requests": {}, "refused": {}, "dropped_events": 0, "later": 1}
    found = msgspec.convert({"gateway": gateway, "stages": [stage], **rest}, StatusReport)
    assert found.stages[0].limits.codec is not None
    assert found.stages[0].limits.codec.frame_samples == 320
    assert isinstance(found.stages[0].limits, StageLimits)
    assert isinstance(found.stages[0].load, StageLoad)
    assert found.stages[0].load.running == 2
