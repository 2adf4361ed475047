"""Alert rules and dashboard are whole, and ask only for what is told."""

import re
from typing import Any

import pytest

from tests.support.monitoring import alerts, panels


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"OmniRelay[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert len(rule["annotations"]["description"].split()) >= 10


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        # What is shown of each series is what tells it apart.
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert label in target["expr"] or label == "instance"


def test_panels_and_alerts_have_names_of_their_own() -> None:
    assert len({panel["title"] for panel in panels()}) == len(panels())
    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
