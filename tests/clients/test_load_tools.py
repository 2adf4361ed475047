"""Tools that measure a server; what they measured is not judged, only that every request was answered."""

import json

import pytest

from tests.clients.running import Programs

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_guidellm(programs: Programs) -> None:
    programs.output("guidellm", "guidellm.sh")
    report = json.loads((programs.folder / "guidellm.json").read_text(encoding="utf-8"))
    metrics = report["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert metrics["output_token_count"]["successful"]["mean"] == 8
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0


def test_vllm_omnis_benchmark(programs: Programs) -> None:
    report = programs.run("vllm-omni", "vllm_omni_bench.py")
    assert (report["completed"], report["failed"]) == (4, 0)
    assert report["total_output_tokens"] > 0
    for measure in ("ttft_ms", "audio_ttfp_ms", "audio_rtf"):
        assert report[f"mean_{measure}"] > 0


def test_aiperf(programs: Programs) -> None:
    programs.output("aiperf", "aiperf.sh")
    path = programs.folder / "aiperf" / "profile_export_aiperf.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["is_complete"]
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == 6
    assert report["usage_completion_tokens"]["avg"] > 1
    assert report["time_to_first_token"]["avg"] > 0
