"""What compiles layers: torch's compiler, of graphs that are changed before it sees them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from siirl.engines.train.merged_linears import merge_linears, value_of


def compile_layer(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile."""
    from torch._inductor.compile_fx import compile_fx

    merge_linears(module)
    orders = straighten_outputs(module)
    compiled: Any = compile_fx(module, inputs)
    return functools.partial(_turned_back, compiled, orders) if orders else compiled


def straighten_outputs(module: fx.GraphModule) -> dict[int, list[int]]:
    """Have a graph give its outputs with dimensions in the order in which they lie in memory.

    Gradients of outputs come in the layout of these, but the compiler of graphs with sizes that are no
    constants takes them as contiguous only, and has others copied: those of queries, keys and values, whose
    heads are turned in front of their tokens.

    Position of an output that is changed -> the order of its dimensions that makes it what it was.
    """
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    outputs, orders = list(output.args[0]), {}
    for index, node in enumerate(outputs):
        value = value_of(node)
        if value is None or node.op == "placeholder" or not value.requires_grad:
            continue
        order = order_in_memory(value)
        if order != sorted(order):
            with module.graph.inserting_before(output):
                outputs[index] = module.graph.call_function(torch.permute, (node, order))
            orders[index] = [order.index(dim) for dim in range(value.dim())]
    output.args = (tuple(outputs),)
    module.recompile()
    return orders


def order_in_memory(value: Tensor) -> list[int]:
    """Dimensions of a traced tensor from the widest stride to the narrowest, those of size 1 where they are.

    By the sizes that it was traced with, without a condition that others are alike: in other tensors the
    order is a worse one at most. As they are, where these sizes are not known.
    """
    sizes, strides = ([_traced_with(x) for x in numbers] for numbers in (value.shape, value.stride()))
    if None in (*sizes, *strides):
        return list(range(value.dim()))
    wide = [dim for dim, size in enumerate(sizes) if size != 1]
    by_stride = iter(sorted(wide, key=lambda dim: strides[dim] or 0, reverse=True))
    return [next(by_stride) if dim in wide else dim for dim in range(value.dim())]


def _traced_with(number: int | torch.SymInt) -> int | None:
    if not isinstance(number, torch.SymInt):
        return number
    return number.node.hint if number.node.has_hint() else None


def _turned_back(
    compiled: Callable[..., Any], orders: dict[int, list[int]], *args: Any
) -> Sequence[Tensor | None]:
    outputs = list(compiled(*args))
    for index, order in orders.items():
        outputs[index] = outputs[index].permute(order)
    return outputs
