#!/usr/bin/env python3
"""Write the alert rules as a resource of the Prometheus Operator.

    .venv/bin/python scripts/prometheus_rule.py

Run it after a change of ``deploy/prometheus/rules.yml``; ``tests/tools/test_kubernetes.py`` compares both.
"""

from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
RULES: Final = ROOT / "deploy" / "prometheus" / "rules.yml"
RESOURCE: Final = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "rules.yaml"
HEAD: Final = f"# Made of {RULES.relative_to(ROOT)} by scripts/prometheus_rule.py.\n"


def resource() -> str:
    """Return the text of the resource."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    made = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "omnirelay", "labels": {"app.kubernetes.io/name": "omnirelay"}},
        "spec": rules,
    }
    return HEAD + yaml.safe_dump(made, sort_keys=False, allow_unicode=True, width=118)


if __name__ == "__main__":
    RESOURCE.write_text(resource(), encoding="utf-8")
