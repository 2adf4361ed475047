"""Lets ``import torchvision`` succeed beside a CPU build of torch.

PyPI has no CPU build of torchvision: the C++ operators of the one it has cannot load beside a CPU
torch, and the import then dies on "operator torchvision::nms does not exist".  Declaring the two
operator schemas first is enough for its pure-Python transforms, all that Qwen2.5-Omni needs.
"""

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[torch.library.Library] = []


def declare_missing_operators() -> None:
    """Declare the torchvision operator schemas that are missing; harmless to call twice.

    Must run before anything imports torchvision.  Where the real operators load, their own
    definitions come later or came before, and these schemas equal them.
    """
    if _libraries:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        name = schema.split("(", maxsplit=1)[0]
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)  # type: ignore[no-untyped-call]
    # torch withdraws the definitions when the library object dies.
    _libraries.append(library)
