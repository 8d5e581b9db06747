"""Gated delta nets and Mamba-2 over packed rows: each row's state and convolution start over, or where its
prompt ended.

transformers hands the keywords of a decoder down to the convolution and the rule, or scan, of each such
layer, so the bounds of packed rows arrive there: two functions of the modules that define a model are
replaced, and which kernels compute the others is not left to what happens to be installed. Packed rows are
computed by torch's kernels, padded, or by fla's (model.attention_kernels, `fla_kernels.py`); the convolution
of compiled layers is part of their graph (`traced_convolution`). Where rows share a prompt, its last state
and the last inputs of its convolution start each of its responses, and gradients flow back through both.
Sources: Yang et al., "Gated Delta Networks" (2024); Dao and Gu, "Transformers are SSMs" (2024).

Legend: N packed tokens, M the first ones behind shared prompts, S segments, L the longest, C channels of the
convolution, W its width, H value heads, K and V features of a head's keys and values.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siirl.engines.train.attention.ulysses import all_tokens, own_shares
from siirl.engines.train.layer_compiler import compute_by
from siirl.engines.train.packed.sequence_bounds import SequenceBounds, taps_of

CONVOLUTION, RULE, SCAN = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
KERNELS = {
    RULE: ("causal_conv1d_update", "torch_recurrent_gated_delta_rule"),
    SCAN: ("causal_conv1d_update", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"),
}
"""Of each kind of layer, by the function that has its states, those that are beside it and the convolution.

As transformers imports them they are other packages' where these are there, which fail on a CPU, and leak
between packed rows where one of two is missing."""
NO_STEP = -1e4
"""A step of a scan before its softplus, which makes it 0."""


def pin_state_layers(model: nn.Module, kernels: ModuleType | None = None) -> None:
    """Have the layers of a model that have states, if it has some, compute packed rows, by these kernels, or
    torch's; all else by torch's."""
    layers = [module for module in model.modules() if hasattr(module, "A_log")]
    for name in {type(layer).__module__ for layer in layers}:
        for kind in KERNELS:
            if hasattr(sys.modules[name], kind):
                _pin(sys.modules[name], kind)
    for block in model.modules():
        if any(child in layers for child in block.children()):
            block.register_forward_pre_hook(_tabulate, with_kwargs=True)
    if kernels is None:
        return
    for layer in layers:  # it hands keywords on, as those of a decoder
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"kernels": kernels}), with_kwargs=True
        )
        if hasattr(sys.modules[type(layer).__module__], RULE):  # Mamba-2 norms what is gated already
            compute_by(layer.get_submodule("norm"), kernels.gated_norm)


def _tabulate(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Have what a graph's convolution reads be there: a graph computes no tables of its own."""
    if (bounds := kwargs.get("sequence_bounds")) is not None and bounds.taps is None:
        widths = {module.weight.shape[-1] for module in block.modules() if isinstance(module, nn.Conv1d)}
        bounds.taps = taps_of(bounds, max(widths))


@functools.cache
def _pin(module: ModuleType, kind: str) -> None:
    theirs = {name: inspect.unwrap(getattr(module, name)) for name in (CONVOLUTION, kind, *KERNELS[kind])}
    packed = {name: _packed_or(name, theirs[name]) for name in (CONVOLUTION, kind)}
    for name, function in (theirs | packed).items():
        setattr(module, name, function)


def _packed_or(name: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    ours, by_torch = PACKED[name]

    @torch.compiler.disable
    def apart(
        *args: Any,
        sequence_bounds: SequenceBounds | None = None,
        kernels: ModuleType | None = None,
        **kwargs: Any,
    ) -> Any:
        if sequence_bounds is None:
            return theirs(*args, **kwargs)
        by = functools.partial(by_torch, theirs) if kernels is None else getattr(kernels, by_torch.__name__)
        return ours(*args, by=by, bounds=sequence_bounds, **kwargs)

    def call(*args: Any, sequence_bounds: SequenceBounds | None = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() or sequence_bounds is None or sequence_bounds.shard is not None:
            return apart(*args, sequence_bounds=sequence_bounds, **kwargs)
        if name == CONVOLUTION:
            return traced_convolution(*args, bounds=sequence_bounds, **kwargs)
        # Heads are cut out of the convolution's channels: the compiler copies these faster than fla has it.
        args = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)
        return apart(*args, sequence_bounds=sequence_bounds, **kwargs)

    return call


def traced_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    bounds: SequenceBounds,
    kernels: ModuleType | None = None,
    **extra: object,
) -> Tensor:
    """`packed_convolution` as operations of a graph: each tap is the inputs, so many tokens later, where
    these are of the same segment. In float32 at least, or by one operation of `kernels`.

    The first tokens behind a shared prompt are computed once more by themselves, as they read its last ones.
    """
    assert activation in (None, "silu", "swish") and bounds.taps is not None
    x_NC, taps = hidden_states.squeeze(0).T, bounds.taps
    wide = torch.promote_types(x_NC.dtype, torch.float32)
    inputs_NC, weight_WC = x_NC.to(wide), weight.to(wide).T.flip(0)

    def finished(sum_XC: Tensor) -> Tensor:
        sum_XC = sum_XC if bias is None else sum_XC + bias.to(wide)
        return (sum_XC if activation is None else F.silu(sum_XC)).to(x_NC.dtype)

    if kernels is not None and weight.shape[1] <= kernels.WIDEST:
        y_NC = kernels.convolved(x_NC, weight, bias, taps.place_N1, activation is not None)
    else:
        y_NC = inputs_NC * weight_WC[0]
        for back in range(1, weight.shape[1]):
            before_NC = F.pad(inputs_NC, (0, 0, back, 0))[:-back]
            y_NC = y_NC + torch.where(taps.place_N1 >= back, before_NC, 0.0) * weight_WC[back]
        y_NC = finished(y_NC)
    if taps.begin_M is not None:
        read_WMC = inputs_NC[taps.source_WM.clamp(min=0)] * (taps.source_WM >= 0).unsqueeze(-1)
        y_MC = finished((read_WMC * weight_WC.unsqueeze(1)).sum(0))
        y_NC = y_NC.index_copy(0, taps.begin_M, y_MC)
    return y_NC.T.unsqueeze(0)


def packed_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    bounds: SequenceBounds,
    by: Callable[..., tuple[Tensor, Tensor | None]],
    **extra: object,
) -> Tensor:
    """The causal convolution of each channel, and its activation, within each row: [1, C, N] -> the same.

    Where ranks share the tokens, each has some of the channels of all, in messages around it.
    """
    x_NC, weight_CW, shard = hidden_states.squeeze(0).T, weight, bounds.shard
    if shard is not None:
        x_NC = all_tokens(x_NC.unsqueeze(-1), shard).squeeze(-1)
        weight_CW = weight_CW.chunk(shard.group.size())[shard.group.rank()]
    y_NC = _in_parts(bounds, lambda x, **part: by(x, weight_CW, bias, activation, **part), x_NC)
    y_NC = y_NC if shard is None else own_shares(y_NC.unsqueeze(-1), shard).squeeze(-1)
    return y_NC.T.unsqueeze(0)


def packed_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    bounds: SequenceBounds,
    by: Callable[..., tuple[Tensor, Tensor | None]],
    use_qk_l2norm_in_kernel: bool,
    **extra: object,
) -> tuple[Tensor, None]:
    """The gated delta rule within each row: queries, keys [1, N, H, K] and values [1, N, H, V], decays g and
    rates beta [1, N, H] -> [1, N, H, V].

    Where ranks share the tokens, each has some of the heads of all, in messages around it.
    """
    assert use_qk_l2norm_in_kernel
    given, shard = (query, key, value, g.unsqueeze(-1), beta.unsqueeze(-1)), bounds.shard
    given = [x.squeeze(0) if shard is None else all_tokens(x.squeeze(0), shard) for x in given]
    out_NHV = _in_parts(bounds, by, *given[:3], *(x.squeeze(-1) for x in given[3:]))
    return (out_NHV if shard is None else own_shares(out_NHV, shard)).unsqueeze(0), None


def packed_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    bounds: SequenceBounds,
    by: Callable[..., tuple[Tensor, Tensor | None]],
    initial_states: None = None,
    return_final_states: bool = False,
    **extra: Any,
) -> Tensor:
    """The scan of Mamba-2 within each row: inputs [1, N, H, V] and steps dt [1, N, H], before their softplus,
    keys B and queries C of each group [1, N, G, K], decays A [H] -> [1, N, H, V]."""
    assert bounds.shard is None, "ranks that share the tokens of rows have no scan"
    given = (x.squeeze(0) for x in (hidden_states, dt, B, C))
    return _in_parts(
        bounds, lambda x, step, b, c, **part: by(x, step, A, b, c, **part, **extra), *given
    ).unsqueeze(0)


def _in_parts(
    bounds: SequenceBounds, of_part: Callable[..., tuple[Tensor, Tensor | None]], *given_NX: Tensor
) -> Tensor:
    """What a function gives of the shared prompts, and of all behind them, which start with its last states
    of their prompts: [N, ...]. Nothing is copied where all tokens are one part.

    of_part: of what is given of a part's tokens, its bounds, the state that each of its segments starts with,
    or None, and whether its last states are wanted.
    """
    if bounds.shared is None:
        return of_part(*given_NX, part=bounds, state=None, ends=False)[0]
    outs, state = [], None
    parts = [part for _, part in bounds.parts]
    sizes = [len(part.padded_index) for part in parts]
    for part, *own in zip(parts, *(x_NX.split(sizes) for x_NX in given_NX), strict=True):
        out, last = of_part(*own, part=part, state=state, ends=state is None)
        outs.append(out)
        if last is not None and state is None:
            state = bounds.started_by(last)
    return torch.cat(outs)


def convolution(
    theirs: Callable[..., Tensor],
    x_NC: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None,
    activation: str | None,
    part: SequenceBounds,
    state: Tensor | None,
    ends: bool,
) -> tuple[Tensor, Tensor | None]:
    """state: inputs before each segment, [S, W - 1, C]."""
    x_SLC, width = _padded(x_NC, part), weight_CW.shape[1] - 1
    first = x_SLC.new_zeros(len(x_SLC), width, x_SLC.shape[2]) if state is None else state
    x_SLC = torch.cat([first, x_SLC], dim=1)
    y_SCL = theirs(x_SLC.transpose(1, 2), weight_CW, bias, activation=activation)
    last_SW = part.cu_seqlens.diff().unsqueeze(1) + torch.arange(width, device=x_NC.device)
    last = x_SLC.take_along_dim(last_SW.long().unsqueeze(-1), dim=1) if ends else None
    return _tokens(y_SCL.transpose(1, 2)[:, width:], part), last


def rule(
    theirs: Callable[..., tuple[Tensor, Tensor | None]],
    *given: Tensor,
    part: SequenceBounds,
    state: Tensor | None,
    ends: bool,
) -> tuple[Tensor, Tensor | None]:
    """given: query, key, value, decay, rate. state: [S, H, K, V]."""
    q, k, v, decay, rate = (_padded(x, part) for x in given)
    out_SLHV, last = theirs(
        *(q, k, v),
        g=decay,
        beta=rate,
        initial_state=state,
        output_final_state=ends,
        use_qk_l2norm_in_kernel=True,
    )
    return _tokens(out_SLHV, part), last


def scan(
    theirs: Callable[..., Any],
    x_NHV: Tensor,
    step_NH: Tensor,
    A: Tensor,
    b_NGK: Tensor,
    c_NGK: Tensor,
    *,
    part: SequenceBounds,
    state: Tensor | None,
    ends: bool,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """state: [S, H, V, K]. A step far below 0 behind each segment is none: it writes nothing, and decays
    nothing."""
    x, b, c = (_padded(given, part) for given in (x_NHV, b_NGK, c_NGK))
    step_SLH = _padded(step_NH, part, NO_STEP)
    out_SLHV, last = theirs(x, step_SLH, A, b, c, initial_states=state, return_final_states=True, **extra)
    return _tokens(out_SLHV, part), last


PACKED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    CONVOLUTION: (packed_convolution, convolution),
    RULE: (packed_rule, rule),
    SCAN: (packed_scan, scan),
}
"""What takes the place of a function of transformers, and how torch's kernels compute it of one part; other
kernels are a module with a function of that name."""


def _padded(x_NX: Tensor, part: SequenceBounds, behind: float = 0.0) -> Tensor:
    """[S, L, ...], zeros, or another number, behind each segment: to a delta net they write nothing into a
    state, and decay nothing of it."""
    shape = (part.num_sequences * part.max_length, *x_NX.shape[1:])
    return (
        x_NX.new_full(shape, behind)
        .index_copy(0, part.padded_index, x_NX)
        .unflatten(0, (-1, part.max_length))
    )


def _tokens(x_SLX: Tensor, part: SequenceBounds) -> Tensor:
    """The packed tokens of segments that were padded."""
    return x_SLX.flatten(0, 1).index_select(0, part.padded_index)
