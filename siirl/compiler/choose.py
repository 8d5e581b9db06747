"""The compiler's last pass: keys of speed and memory that nobody set are chosen, each with its reason. Pure.

In this order, as each needs what stands before it: micro-batches of one longest row; kernels; CUDA graphs; no
checkpointing of activations; weights that stay gathered; larger micro-batches; how many sequences an engine
has at once, whether it stays resident, and its share of the device. What takes memory is taken only if the
estimate fits beside all that was chosen before. What somebody set is never touched, and a run that goes on
keeps what was chosen at its start.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from siirl.compiler.backends import backend_of
from siirl.compiler.checks.model_checks import check_trained_model
from siirl.compiler.checks.service_checks import not_in_shared_passes
from siirl.compiler.choices import AS_BEFORE, Changes, Draft, Kept, Machine
from siirl.compiler.engine_choices import choose_engines, choose_graphs
from siirl.compiler.memory.estimate import longest_row, read_shape, stays_whole
from siirl.compiler.plan import Choice, ModelPlan, Plan
from siirl.config import Config, with_overrides
from siirl.config.batch import batch_of
from siirl.config.common import FLA, FLASH_4, why_not_fla
from siirl.config.resolve import COMPUTE_DTYPE, get
from siirl.config.roles import ROLES, BatchKeys, least_budget, role_group, role_model, token_budget
from siirl.models.config_json import as_built
from siirl.models.families import family_of
from siirl.models.sizes import head_size

MOST_TOKENS = {True: 32768, False: 65536}
"""Of a micro-batch on a GPU, in training and without gradient: matrix products are no faster with more."""
MOST_TOKENS_CPU = 16384
FEW_TOKENS = 8192
"""Micro-batches of so many without checkpointing are faster than larger ones with it."""
LEAST_PER_STAGE = 4
"""Micro-batches of a mini-batch for each pipeline stage: with fewer, stages wait for one another."""
FLASH_4_PACKAGE, FLA_PACKAGE, LIGER_PACKAGE = "flash-attn-4", "fla-core", "liger-kernel"
PACKAGES = (FLASH_4_PACKAGE, FLA_PACKAGE, LIGER_PACKAGE)
"""Those that choices depend on."""
FLASH_4_SINCE = (9, 0)
"""The CUDA capability for which there are kernels in it."""
FLASH_4_HEADS = (64, 96, 128)
"""Head sizes at which it was held against torch's."""


def choose(
    plan: Plan, configs: Mapping[str, Config], machine: Machine, kept: Kept | None = None
) -> tuple[Plan, dict[str, Config]]:
    """The plan and the configurations of its nodes, with values for the keys that nobody set (Rule.auto).

    kept: what was chosen at the start of the run that this one goes on with; it is taken if it was for as
    many ranks of the same devices. The same result in every process.
    """
    draft = Draft(plan, configs, machine)
    if kept is not None and kept.chosen_for == draft.chosen_for:
        _keep(draft, kept.choices)
        return draft.finished()
    computing = [model for model in draft.models if not model.generates]
    batches = [(model, keys) for model in computing for keys in _free_batches(draft, model)]
    for model, keys in batches:
        draft.take(model, _micro_batch(draft, model, keys, 1))
    for model in computing:
        _choose_kernels(draft, model)
    choose_graphs(draft)
    for model in computing:
        _choose_checkpointing(draft, model)
    for model in computing:
        _choose_gathered(draft, model)
    for model, keys in batches:
        _choose_micro_batch(draft, model, keys)
    choose_engines(draft, [_smaller(draft, batches, eighths) for eighths in (8, 6)])
    return draft.finished()


def _keep(draft: Draft, choices: Sequence[Choice]) -> None:
    """Take what was chosen before, but for keys that somebody has set since, and models that are gone."""
    models = {model.name: model for model in draft.models}
    for choice in choices:
        model = models.get(choice.model)
        if model is None:
            continue
        free = {key: value for key, value in choice.keys.items() if draft.is_free(model, key)}
        if free:
            draft.take(model, free, f"{AS_BEFORE}{choice.reason}")


def _free_batches(draft: Draft, model: ModelPlan) -> Iterator[BatchKeys]:
    """The keys of a model's micro-batches whose token budget is to be chosen: nobody set it, nor rows."""
    role = ROLES[model.role]
    for keys in filter(None, (role.train if model.trains else None, role.forward)):
        by_tokens = get(draft.cfg(model), keys.dynamic)
        chosen = draft.is_free(model, keys.dynamic) and draft.is_free(model, keys.max_rows)
        if chosen or (by_tokens and draft.is_free(model, keys.max_tokens)):
            yield keys


def _micro_batch(draft: Draft, model: ModelPlan, keys: BatchKeys, rows: int) -> Changes:
    """The values for so many rows of the longest kind."""
    cfg = draft.cfg(model)
    tokens = least_budget(cfg, model.role, rows * longest_row(cfg, model.role))
    values = {keys.dynamic: True, keys.max_tokens: tokens}
    return {key: value for key, value in values.items() if draft.is_free(model, key)}


def _most_rows(draft: Draft, model: ModelPlan, keys: BatchKeys) -> int:
    """The most rows that a micro-batch is to have: no more than there are, or than make it faster."""
    cfg, trains = draft.cfg(model), keys is ROLES[model.role].train
    row = longest_row(cfg, model.role)
    most = MOST_TOKENS_CPU if draft.machine.device == "cpu" else MOST_TOKENS[trains]
    batch = batch_of(cfg, model.role if model.trains else "actor")
    there = ceil((batch.mini_rows if trains else batch.rows) / model.dims.dp)
    if model.dims.pp > 1:
        there //= LEAST_PER_STAGE * model.dims.pp
    return max(1, min(most * model.dims.cp // row, there))


def _choose_micro_batch(draft: Draft, model: ModelPlan, keys: BatchKeys) -> None:
    """The largest of some sizes that fits."""
    row, most = longest_row(draft.cfg(model), model.role), _most_rows(draft, model, keys)
    sizes = sorted({max(1, most * eighths // 8) for eighths in (8, 6, 4, 3, 2, 1)} | {1}, reverse=True)
    for rows in sizes:
        changes = _micro_batch(draft, model, keys, rows)
        needs = draft.weigh(model, changes)
        if needs is None and rows > 1:
            continue
        what = "training" if keys is ROLES[model.role].train else "computing log-probs or values"
        fits = f"; {needs}" if needs is not None else f"; {draft.unknown}"
        more = "" if rows == most or needs is None else f"; {most} rows do not fit"
        takes = f"{rows} row{'s' * (rows > 1)} of {row} tokens (the longest)"
        draft.take(model, changes, f"{what} takes {takes} at once{more}{fits}")
        return


def _smaller(
    draft: Draft, batches: Sequence[tuple[ModelPlan, BatchKeys]], eighths: int
) -> list[tuple[ModelPlan, Changes]]:
    """So many eighths of the micro-batches, of training and passes alike; nothing of all eight."""
    found = []
    for model, keys in batches if eighths < 8 else ():
        row = longest_row(draft.cfg(model), model.role)
        rows = token_budget(draft.cfg(model), model.role, keys) // row
        found.append((model, _micro_batch(draft, model, keys, max(1, rows * eighths // 8))))
    return found


def _choose_kernels(draft: Draft, model: ModelPlan) -> None:
    """Kernels of states; compiled layers, else Liger's kernels; FlashAttention 4. On GPUs, in bf16, where
    they were compared."""
    group = ROLES[model.role].model
    dtype = get(draft.cfg(model), f"{ROLES[model.role].group}.{COMPUTE_DTYPE[model.backend]}")
    config = as_built(role_model(draft.cfg(model), model.role))
    family, machine = family_of(config.get("model_type")), draft.machine
    if machine.device != "cuda" or dtype != "bfloat16":
        return
    if family.has_states:
        _choose_state_kernels(draft, model, f"{group}.attention_kernels")
    if not family.compiled or model.base is not None:
        return
    layers, liger = f"{group}.compile_layers", f"{group}.use_liger"
    if draft.is_free(model, layers, liger) and backend_of(model).layers_by_keys:
        fused: list[tuple[Changes, str]] = [({layers: True}, "operations between matrix products are fused")]
        if LIGER_PACKAGE in machine.packages:
            fused.append(({liger: True}, f"{LIGER_PACKAGE} is installed"))
        for changes, reason in fused:
            if _is_accepted(draft, model, changes):
                draft.take(model, changes, reason)
                break
    kernels = {f"{group}.attention_kernels": FLASH_4}
    installed = FLASH_4_PACKAGE in machine.packages and machine.capability >= FLASH_4_SINCE
    whole = backend_of(model).kernels_of_parts or model.dims.cp == 1
    proven = installed and whole and head_size(config) in FLASH_4_HEADS and not family.has_states
    if proven and draft.is_free(model, *kernels) and _is_accepted(draft, model, kernels):
        draft.take(model, kernels, f"{FLASH_4_PACKAGE} is installed")


def _choose_state_kernels(draft: Draft, model: ModelPlan, key: str) -> None:
    if not draft.is_free(model, key):
        return
    missing = why_not_fla(draft.machine.capability, draft.machine.triton)
    if FLA_PACKAGE not in draft.machine.packages:
        missing = f"{FLA_PACKAGE} is not installed (pip install 'siirl[fla]')"
    if missing:
        draft.take(model, {key: "torch"}, f"{missing}, and torch's kernels of states are slow")
    elif _is_accepted(draft, model, {key: FLA}):
        draft.take(model, {key: FLA}, f"{FLA_PACKAGE} is installed")


def _is_accepted(draft: Draft, model: ModelPlan, changes: Changes) -> bool:
    """Whether the checks of a run take a model with these changes."""
    changed = with_overrides(draft.cfg(model), changes)
    if changed.service.enable and [*not_in_shared_passes(changed)]:
        return False
    return not [*check_trained_model(changed, model.role, model.name)]


def _choose_checkpointing(draft: Draft, model: ModelPlan) -> None:
    """Keep activations for the backward pass, if micro-batches of a useful size fit then."""
    keys, role = ROLES[model.role].train, ROLES[model.role]
    key = f"{role.model}.enable_gradient_checkpointing"
    recomputes = backend_of(model).own_recomputation(draft.cfg(model), model.role)
    kwargs = f"{role.model}.gradient_checkpointing_kwargs"
    if not model.trains or keys is None or recomputes or not draft.is_free(model, key, kwargs):
        return
    if model.base is not None:
        return
    rows = max(
        1, min(FEW_TOKENS // longest_row(draft.cfg(model), model.role), _most_rows(draft, model, keys))
    )
    changes = {key: False}
    beside = _micro_batch(draft, model, keys, rows) if keys in [*_free_batches(draft, model)] else {}
    if (needs := draft.weigh(model, changes | beside)) is not None:
        draft.take(model, changes, f"activations fit: {needs}")
    elif draft.machine.gib is not None and draft.weigh(model, {}) is not None:
        draft.take(model, {key: True}, "activations of the backward pass would not fit")


def _choose_gathered(draft: Draft, model: ModelPlan) -> None:
    """Weights under FSDP2 that stay gathered for a mini-batch, if they fit."""
    key = f"{ROLES[model.role].group}.fsdp_config.reshard_after_forward"
    if not backend_of(model).gathers_weights or not draft.is_free(model, key) or model.dims.ep > 1:
        return
    shape, fsdp = (
        read_shape(draft.cfg(model), model.role),
        role_group(draft.cfg(model), model.role).fsdp_config,
    )
    if isinstance(shape, str) or stays_whole(shape.params, model.dims.weight_shards, fsdp):
        return
    if (needs := draft.weigh(model, {key: False})) is not None:
        reason = f"weights stay gathered for a mini-batch: {needs}"
        draft.take(model, {key: False}, reason)
