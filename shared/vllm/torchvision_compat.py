"""Lets torchvision be imported where its C++ operators cannot load.

PyPI carries no CPU build of torchvision.  The one it carries finds no CUDA beside a CPU torch, so its
operator library does not load, and ``import torchvision`` then dies on "operator torchvision::nms does
not exist", although Qwen2.5-Omni needs nothing but the transforms written in Python.
"""

import importlib.util
from pathlib import Path

import torch

_NAMESPACE = "torchvision"
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# A library whose handle is collected takes its schemas with it: this list lives as long as the process.
_declared: list[torch.library.Library] = []


def declare_missing_operators() -> None:
    """Declare the operator schemas that torchvision looks up while it is imported.

    Call it before anything imports torchvision, in every process.  It changes nothing where torchvision
    is not installed or where its own operators load, and a second call changes nothing.
    """
    if _declared or _operators_load():
        return
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(getattr(torch.ops, _NAMESPACE), name):
            library.define(schema)
    _declared.append(library)


def _operators_load() -> bool:
    """Load torchvision's own operators, as it would itself; true too where there is no torchvision."""
    spec = importlib.util.find_spec(_NAMESPACE)
    if spec is None or not spec.submodule_search_locations:
        return True
    for folder in spec.submodule_search_locations:
        for library in sorted(Path(folder).glob("_C*.so")):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
            return True
    return False
