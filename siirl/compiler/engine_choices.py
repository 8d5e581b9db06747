"""What is chosen of rollout engines: CUDA graphs, sequences at once, their memory between rollouts. Pure."""

from collections import Counter
from collections.abc import Sequence
from math import ceil, floor

from siirl.compiler.backends import backend_of
from siirl.compiler.choices import Changes, Draft
from siirl.compiler.memory.engine_memory import engine_bytes
from siirl.compiler.memory.estimate import read_shape
from siirl.compiler.memory.phases import engine_rows
from siirl.compiler.plan import ModelPlan
from siirl.config.resolve import get
from siirl.config.roles import ROLES
from siirl.models.config_json import model_type_of
from siirl.models.families import family_of
from siirl.spelling import GIB

WORKSPACE_BYTES = 4 * GIB
"""Of a vLLM engine's share beside weights and KV cache: what it measures for its largest step at most."""
GRAPHS_BYTES = 4 * GIB
"""The same for its CUDA graphs, which some versions of vLLM count in."""
SAMPLER_COPIES = 6
"""Of a step's logits in fp32 which vLLM has at once, its sorted words and their places counted as such."""
ROLLOUT = "actor_rollout_ref.rollout"
FREE_CACHE, SHARE = f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.gpu_memory_utilization"
EAGER, SEQUENCES = f"{ROLLOUT}.enforce_eager", f"{ROLLOUT}.max_num_seqs"
TOKENS, MOST_TOKENS = f"{ROLLOUT}.max_num_batched_tokens", 16384
"""Of an engine step: prompts are read no faster by more, whose activations are taken from its KV cache."""
MOST_SHARE, SHARE_STEP = 0.85, 0.05
SOME_SEQUENCES = 64
"""No engine is limited to fewer: validation may have more rows than a training step."""


def choose_graphs(draft: Draft) -> None:
    """CUDA graphs for each engine that has some, if they fit; on devices that are not known, too."""
    why = "CUDA graphs: the host cannot keep up without"
    for model in _engines(draft):
        if draft.machine.device == "cpu" or not draft.is_free(model, EAGER):
            continue
        least = _share_of(draft, model, with_rows=False, graphs=True)
        free = least is not None and _share_is_free(draft, model)
        needs = draft.weigh(model, {EAGER: False} | ({SHARE: least} if free else {}))
        if needs is None and draft.is_known:
            draft.take(model, {EAGER: True}, "CUDA graphs would not fit beside the trainer")
        else:
            fits = "" if needs is None else f"; {needs}"
            draft.take(model, {EAGER: False}, f"{why}{fits}")


def choose_engines(draft: Draft, batches: Sequence[Sequence[tuple[ModelPlan, Changes]]]) -> None:
    """Sequences at once, engines that stay resident or give their memory back, and their share of the device.

    batches: changes of micro-batches, the best first, any of which is worth an engine that stays resident.
    """
    if draft.machine.device != "cuda":
        return
    for model in _engines(draft):
        _choose_sequences(draft, model)
        _choose_tokens(draft, model)
    if not any(_choose_resident(draft, smaller) for smaller in batches):
        for model in _engines(draft):
            _choose_share(draft, model)


def _engines(draft: Draft) -> list[ModelPlan]:
    """Those that take a share of a device; of models on one base, which agree on their keys, none."""
    return [
        model
        for model in draft.models
        if model.generates and backend_of(model).device_share and model.base is None
    ]


def _choose_sequences(draft: Draft, model: ModelPlan) -> None:
    """All that a step has in flight, and no more, as CUDA graphs and sampling keep memory for each."""
    rows = engine_rows(draft.plan, model, draft.configs)
    value = min(max(SOME_SEQUENCES, 32 * ceil(rows / 32)), get(draft.cfg(model), SEQUENCES))
    if model.role == "rollout" and draft.is_free(model, SEQUENCES):
        more = "" if value >= rows else "; the host keeps up with no more at once"
        draft.take(model, {SEQUENCES: value}, f"a step has {rows} responses in flight on an engine{more}")


def _choose_tokens(draft: Draft, model: ModelPlan) -> None:
    """As many tokens of prompts in an engine step as a training step has, up to MOST_TOKENS."""
    cfg = draft.cfg(model)
    rollout = cfg.actor_rollout_ref.rollout
    if model.role != "rollout" or model.is_teacher or not draft.is_free(model, TOKENS):
        return
    if family_of(model_type_of(cfg.actor_rollout_ref.model)).sees_images:
        return  # a tower takes memory for each token
    prompts = ceil(engine_rows(draft.plan, model, draft.configs) / rollout.n)
    tokens = prompts * rollout.prompt_length
    value = MOST_TOKENS if tokens > rollout.max_num_batched_tokens else rollout.max_num_batched_tokens
    draft.take(model, {TOKENS: value}, f"the prompts of a step have up to {tokens} tokens")


def _share_of(draft: Draft, model: ModelPlan, with_rows: bool, graphs: bool) -> float | None:
    """The share of a device that holds an engine's weights, and the rows of a step; None if not known."""
    cfg = ROLES[model.role].engine_cfg(draft.cfg(model))
    shape, gib = read_shape(cfg, model.role), draft.machine.gib
    if isinstance(shape, str) or gib is None:
        return None
    rows = engine_rows(draft.plan, model, draft.configs)
    weights, cache = engine_bytes(model, cfg, shape, rows, shares_prompts=True)
    logits = SAMPLER_COPIES * 4 * min(rows, cfg.actor_rollout_ref.rollout.max_num_seqs) * shape.vocabulary
    workspace = max(WORKSPACE_BYTES, logits)
    held = weights + workspace + (cache if with_rows else 0) + (GRAPHS_BYTES if graphs else 0)
    return min(1.0, ceil(100 * held / (gib * GIB)) / 100)


def _choose_resident(draft: Draft, smaller: Sequence[tuple[ModelPlan, Changes]]) -> bool:
    """Engines keep their memory between rollouts, if all may, and fit beside micro-batches with all rows of
    a step: all, or none. A cache that holds fewer costs more than waking.

    Whether they do.
    """
    engines = [model for model in draft.models if model.is_rollout]
    on_rank = Counter(rank for model in engines for rank in model.ranks)
    others = {rank for model in draft.models if not model.is_rollout for rank in model.ranks}
    beside = [model for model in engines if not others.isdisjoint(model.ranks)]  # others never sleep
    gib = draft.machine.gib
    if gib is None or not beside or not all(_may_stay(draft, model) for model in engines):
        return False
    if max(on_rank.values()) > 1:
        return False
    found: list[tuple[ModelPlan, Changes]] = []
    for model in beside:
        changes: Changes = {FREE_CACHE: False}
        if _share_is_free(draft, model):
            graphs = not draft.cfg(model).actor_rollout_ref.rollout.enforce_eager
            share = _share_of(draft, model, with_rows=True, graphs=graphs)
            if share is None:
                return False
            if share != draft.cfg(model).actor_rollout_ref.rollout.device_share:
                changes[SHARE] = share
        found.append((model, changes))
    needs = draft.weigh_all([*smaller, *found])
    if needs is None:
        return False
    for model, changes in smaller:
        tokens = max(value for value in changes.values() if not isinstance(value, bool))
        draft.take(model, changes, f"{tokens} tokens at once, beside a resident rollout engine")
    for model, changes in found:
        draft.take(model, changes, f"it stays resident between rollouts: {needs}")
    return True


def _may_stay(draft: Draft, model: ModelPlan) -> bool:
    """Whether an engine gives its memory back by default, and for no other reason than the memory."""
    return (
        backend_of(model).device_share
        and model.role == "rollout"
        and not model.is_teacher
        and model.base is None
        and not draft.plan.nodes[model.node].max_lag
        and draft.is_free(model, FREE_CACHE)
        and draft.cfg(model).actor_rollout_ref.rollout.free_cache_engine
    )


def _share_is_free(draft: Draft, model: ModelPlan) -> bool:
    own = draft.cfg(model).actor_rollout_ref.rollout.engine_kwargs.vllm
    return draft.is_free(model, SHARE) and "gpu_memory_utilization" not in own


def _choose_share(draft: Draft, model: ModelPlan) -> None:
    """The share that holds the rows of a step, at least the default; less where that does not fit."""
    rollout = draft.cfg(model).actor_rollout_ref.rollout
    graphs = not rollout.enforce_eager
    least = _share_of(draft, model, with_rows=False, graphs=graphs)
    needed = _share_of(draft, model, with_rows=True, graphs=graphs)
    if least is None or needed is None or not _share_is_free(draft, model):
        return
    wanted = min(MOST_SHARE, max(needed + SHARE_STEP, rollout.device_share))  # vLLM's own parts vary
    for steps in range(floor((wanted - least) / SHARE_STEP + 1e-9) + 1):
        share = round(wanted - steps * SHARE_STEP, 2)
        needs = draft.weigh(model, {SHARE: share})
        if needs is not None:
            if share != rollout.device_share:
                rows = "all rows of a step" if share >= needed else "some of the rows of a step at once"
                draft.take(model, {SHARE: share}, f"it holds {rows}; {needs}")
            return
