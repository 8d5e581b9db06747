"""What compiles layers: torch's compiler, of graphs that are changed before it sees them.

Models have several matrices read one input, as those of query, key and value do. Where one of them gives few
features, its product, and that of its weight's gradient, leave much of a device idle; and the gradients of
the input are as many products, which are added up. So their weights are laid one under the other, and what
one product gives is cut into the outputs (`merge_linears`).
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

CHANGES = {
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    operator.setitem,
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift),
}
"""Calls after which the same operation may give something else, besides those whose names end in _."""


def compute_by(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have a module compute so: by a class of its own. The compiler takes a module that has a function of its
    own, and a partial one of each, as unlike all others, and compiles every layer anew; one forward is given
    to all of a kind."""
    module.__class__ = _computing_by(forward, type(module))


@functools.cache
def _computing_by(forward: Callable[..., Any], base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (base,), {"forward": forward})


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


def merge_linears(module: fx.GraphModule) -> None:
    """Make one product of the linear layers of a graph that read one tensor, where it pays; in place."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    region = 0
    for node in module.graph.nodes:
        region += _changes_something(node)
        if (kind := _kind(node)) is not None:
            groups.setdefault((region, *kind), []).append(node)
    for linears in groups.values():
        if len(linears) > 1 and _pays(linears):
            _merge(module.graph, linears)
    module.graph.lint()
    module.recompile()


def _changes_something(node: fx.Node) -> bool:
    """Whether operations on two sides of this one may not change places: it writes, or sets a mode."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    named_so = getattr(node.target, "__name__", "").endswith("_") or "out" in node.kwargs
    return node.op == "call_function" and (named_so or node.target in CHANGES)


def _arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear layer; these may be given by name."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return given["input"], given["weight"], given.get("bias")


def value_of(node: Any) -> Tensor | None:
    """The tensor that stands for a node in tracing."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _kind(node: fx.Node) -> tuple[Any, ...] | None:
    """What linear layers of one product have in common; None for what is no such layer.

    Weights come into the graph as they are. Frozen ones have no gradient that a common product could leave
    out, so they are not with those that train. Rows of adapters may be no constant: those of one product
    then have as many.
    """
    if node.op != "call_function" or node.target is not F.linear:
        return None
    x, weight, bias = _arguments(node)
    kind: list[Any] = [x]
    for param in (weight, bias):
        if param is None:
            kind.append(None)
            continue
        value = value_of(param)
        if value is None or param.op not in ("placeholder", "get_attr"):
            return None
        rows, *others = value.shape
        if not all(isinstance(size, int) for size in others):
            return None
        symbol = None if isinstance(rows, int) else str(rows)
        kind.append((type(value), value.dtype, value.device, value.requires_grad, symbol))
    value = value_of(weight)
    return tuple(kind) if value is not None and value.dim() == 2 else None


def _pays(linears: list[fx.Node]) -> bool:
    """Whether one of the layers is narrow: has no more outputs than inputs.

    Keys and values are, of nearly all models. Gate and up of an MLP are not: each fills a device, and the
    compiler's kernel that makes both of their gradients is faster where these do not lie side by side.
    """
    shapes = [_shape(node) for node in linears]
    return any(rows <= columns for rows, columns in shapes)


def _shape(linear: fx.Node) -> tuple[int, int]:
    """Outputs and inputs, by the sizes that a layer was traced with."""
    value = value_of(_arguments(linear)[1])
    assert value is not None
    return _traced_with(value.shape[0]) or 0, value.shape[1]


def _merge(graph: fx.Graph, linears: list[fx.Node]) -> None:
    """One product in the place of the first of these."""
    x, _, with_bias = _arguments(first := linears[0])
    with graph.inserting_before(first):
        weight = _joined(graph, [_arguments(node)[1] for node in linears])
        bias = None if with_bias is None else _joined(graph, [_arguments(node)[2] for node in linears])
        product = graph.call_function(F.linear, (x, weight, bias))
        rows = [value_of(_arguments(node)[1]).shape[0] for node in linears]  # type: ignore[union-attr]
        if all(isinstance(size, int) for size in rows):
            parts = graph.call_function(torch.split, (product, rows, -1))
        else:  # they are alike
            parts = graph.call_function(torch.chunk, (product, len(rows), -1))
        outputs = [graph.call_function(operator.getitem, (parts, index)) for index in range(len(linears))]
    for node, output in zip(linears, outputs, strict=True):
        output.meta = dict(node.meta)
        node.replace_all_uses_with(output)
        graph.erase_node(node)


def _joined(graph: fx.Graph, params: list[fx.Node]) -> fx.Node:
    """Parameters one under the other; the backward pass lays them so again, instead of keeping a copy."""
    joined = graph.call_function(torch.cat, (params,))
    joined.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return joined
