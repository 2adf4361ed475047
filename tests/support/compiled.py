"""A decoder of a running engine as vLLM compiles it on GPUs, where Dynamo must trace it whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.debugging import aot_eager
from vllm.model_executor.layers.attention import Attention


@contextmanager
def compiled(decoder: Any) -> Iterator[list[Any]]:
    """Compile a decoder for the steps in this context; gives the graphs that were made, one a compilation.

    What breaks a graph raises.  As on GPUs, attention is one operator that is not looked into.
    """
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    layers = [each for each in decoder.modules() if isinstance(each, Attention)]
    assert layers
    made = torch.compile(decoder.forward, backend=backend, fullgraph=True, dynamic=True)
    with (
        mock.patch.object(decoder, "forward", made),
        _opaque(layers),
        # Workers on a CPU compile nothing.
        torch.compiler.set_stance("default"),
    ):
        yield graphs
    torch._dynamo.reset()


@contextmanager
def _opaque(layers: list[Any]) -> Iterator[None]:
    for each in layers:
        each.use_direct_call = False
    try:
        yield
    finally:
        for each in layers:
            each.use_direct_call = True
