"""What compiles layers: torch's compiler, of graphs that are changed before it sees them."""

from collections.abc import Callable
from typing import Any

from torch import fx

from siirl.engines.train.merged_linears import merge_linears


def compile_layer(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile."""
    from torch._inductor.compile_fx import compile_fx

    merge_linears(module)
    return compile_fx(module, inputs)
