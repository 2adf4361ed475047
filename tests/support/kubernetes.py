"""What ``deploy/kubernetes`` is, rendered by kustomize, and read as Kubernetes would read it."""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from shared.config import Config, load_config
from shared.messages import STAGES
from tests.support.children import ROOT

MANIFESTS: Final = ROOT / "deploy" / "kubernetes"
PROCESSES: Final = (*STAGES, "gateway")
COMPONENT: Final = "app.kubernetes.io/component"
VARIANTS: Final = {
    "cpu-demo": ("cpu-demo",),
    "gpu": ("gpu",),
    "gpu, monitored and scaled": ("gpu", "monitoring", "keda"),
}
"""An overlay, and components that are added to it."""
POD_IP: Final = "10.244.0.7"

Resource = dict[str, Any]


def kustomize() -> str:
    """The program; `make kustomize` gets it."""
    found = shutil.which("kustomize") or str(ROOT / ".cache/debian-13/usr/bin/kustomize")
    assert Path(found).exists(), "kustomize is missing: run `make kustomize`, or install it"
    return found


@functools.cache
def _rendered(variant: str) -> list[Resource]:
    overlay, *components = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        # As an operator's own overlay, which lies elsewhere.
        manifests = os.path.relpath(MANIFESTS, Path(folder).resolve())
        text = {
            "resources": [f"{manifests}/overlays/{overlay}"],
            "components": [f"{manifests}/components/{name}" for name in components],
        }
        Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
        done = subprocess.run(
            [kustomize(), "build", folder], capture_output=True, text=True, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")
    # Written in C, and so several times as fast.
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


class Rendered:
    """The resources of a variant."""

    def __init__(self, variant: str) -> None:
        self.variant: Final = variant
        self.all: Final[list[Resource]] = _rendered(variant)

    def of_kind(self, kind: str) -> dict[str, Resource]:
        """The resources of a kind, by name."""
        return {each["metadata"]["name"]: each for each in self.all if each["kind"] == kind}

    def deployment(self, process: str) -> Resource:
        """The Deployment of a process."""
        return self.of_kind("Deployment")[f"omnirelay-{process}"]

    def pod(self, process: str) -> Resource:
        """The specification of the pods of a process."""
        spec: Resource = self.deployment(process)["spec"]["template"]["spec"]
        return spec

    def container(self, process: str) -> Resource:
        """The container of a process."""
        (found,) = self.pod(process)["containers"]
        container: Resource = found
        return container

    def pods(self) -> Iterator[tuple[str, Resource]]:
        """Every pod that any resource makes: the resource's name, and the specification."""
        for kind in ("Deployment", "Job"):
            for name, each in self.of_kind(kind).items():
                yield f"{kind} {name}", each["spec"]["template"]["spec"]

    def environment(self, process: str) -> dict[str, str]:
        """The variables of a process, but those that only Kubernetes knows."""
        container = self.container(process)
        found: dict[str, str] = {}
        for source in container["envFrom"]:
            found |= self.of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"]
        for variable in container.get("env", []):
            if "value" in variable:
                found[variable["name"]] = variable["value"].replace("$(POD_IP)", POD_IP)
        return found

    def config(self, process: str) -> Config:
        """What a process reads; unknown keys are errors."""
        return load_config(environment=self.environment(process))

    def ports(self, process: str) -> dict[str, int]:
        """The ports of a process's container, by name."""
        return {each["name"]: each["containerPort"] for each in self.container(process)["ports"]}


def memory(text: str) -> int:
    """The bytes of a size, as Kubernetes or Compose writes it."""
    number, unit = text.rstrip("KMGTikmgt"), text.lstrip("0123456789").lower().removesuffix("i")
    return int(number) * 1024 ** " kmgt".index(unit)
