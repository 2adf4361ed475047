"""The tables of a run, in Markdown."""

from benchmarks.gateway.measure import GatewayResult, Latency, ReplicaLevel, SessionLevel, StreamLevel
from benchmarks.gateway.pace import CODES, TEXT_S

_MIB = 2**20


def report(result: GatewayResult) -> str:
    """All figures of a run."""
    machine = result.machine
    lines = [
        "# The gateway alone",
        "",
        f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.versions['python']}; "
        f"the gateway has one core. Load average before the run: {machine.load}.",
        "",
        "No model; each stream is on a connection of its own and has the pace of a speaker: "
        f"a text token each {TEXT_S} s, {CODES} codec tokens each {CODES / 50} s, and chunks of audio of "
        "0.24, 0.48, 0.96, and then 1.92 s. Latency: from before a stage sends until the client has read.",
    ]
    if result.streams:
        lines += [
            "",
            "| | streams | events/s | gateway's core | per event | memory per stream | text P50, P99 "
            "| audio P50, P99 | all P99, longest | stages' core | others' CPU |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
            *map(_streams, result.streams),
        ]
    if result.replicas:
        lines += [
            "",
            "| replicas of each stage | heartbeats each | gateway's core | of it the event loop "
            "| resident memory |",
            "|--:|--:|--:|--:|--:|",
            *map(_replicas, result.replicas),
        ]
    if result.sessions:
        lines += [
            "",
            "| realtime sessions that hear silence | gateway's core | of it the event loop "
            "| memory per session |",
            "|--:|--:|--:|--:|",
            *map(_sessions, result.sessions),
        ]
    if result.missed:
        lines += ["", "Not held:", "", *(f"- {each}" for each in result.missed)]
    return "\n".join(lines) + "\n"


def _streams(level: StreamLevel) -> str:
    every = f"{_ms(level.every.p99)}, {_ms(level.every.most)} ms"
    return (
        f"| {level.interface} | {level.streams:,} | {level.events_per_s:,.0f} | {level.cpu:.1%} "
        f"| {level.cpu_us_per_event:.0f} µs | {level.bytes_per_stream / 1024:,.0f} KiB "
        f"| {_both(level.text)} | {_both(level.audio)} | {every} "
        f"| {level.stages_cpu:.0%} | {level.others_cpu:.0%} |"
    )


def _replicas(level: ReplicaLevel) -> str:
    return (
        f"| {level.replicas} | {level.heartbeat_s:g} s | {level.cpu:.2%} | {level.loop_cpu:.2%} "
        f"| {level.resident_bytes / _MIB:.0f} MiB |"
    )


def _sessions(level: SessionLevel) -> str:
    return (
        f"| {level.sessions} | {level.cpu:.1%} | {level.loop_cpu:.1%} "
        f"| {level.bytes_per_session / 1024:,.0f} KiB |"
    )


def _both(latency: Latency) -> str:
    return f"{_ms(latency.p50)}, {_ms(latency.p99)} ms"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
