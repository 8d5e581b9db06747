"""What may become another one while a run goes on, and what two plans of it differ in. Pure.

A run is amended by a checkpoint between two steps, from which the workers go on by the new plan. So what may
change is what a checkpoint says nothing of; what it does hold must find the place that it had.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from siirl.compiler.plan import ModelPlan, NodePlan, Plan
from siirl.config import Config
from siirl.config.aliases import ALIASES
from siirl.config.resolve import get
from siirl.config.root import all_keys
from siirl.config.values import show

AMENDABLE: Mapping[str, tuple[str, ...]] = {
    "learning rate and optimizer": (
        *("*.optim.lr", "*.optim.lr_*", "*.optim.min_lr*", "*.optim.warmup_style", "*.optim.num_cycles"),
        *("*.optim.weight_decay", "*.optim.betas", "*.optim.total_training_steps"),
        "*.grad_clip",
    ),
    "who is trained": ("*.actor.freeze", "*.rollout.agent.train_cycle", "trainer.critic_warmup"),
    "staleness": ("*.rollout.max_lag", "*.rollout.surplus", "*.rollout.stale"),
    "shares of data sources": ("data.mixture",),
    "the loss": (
        *("*.actor.clip_ratio*", "*.actor.entropy_coeff", "*.actor.use_kl_loss", "*.actor.kl_loss_*"),
        *("*.actor.policy_loss.*", "*.actor.rollout_correction.*", "*.actor.distill.*"),
    ),
    "teachers": ("teacher.*",),
    "sampling": ("*.rollout.temperature", "*.rollout.top_p", "*.rollout.top_k"),
    "rewards": ("custom_reward_function.*", "reward_model.weights", "reward_model.overlong_buffer.*"),
    "the workflow, with the keys of its nodes": (
        "dag.workflow_path",
        "dag.custom_pipeline_fn",
        "dag.node_config",
    ),
    "length and what is written": (
        *("trainer.total_training_steps", "trainer.total_epochs", "trainer.save_freq", "trainer.test_freq"),
        *("trainer.log_val_generations", "trainer.max_actor_ckpt_to_keep", "trainer.logger"),
        *("trainer.ledger", "trainer.trace"),
    ),
}
"""What a run may be told while it goes on -> patterns of keys."""
OF_THE_START = ("trainer.resume_*", "trainer.overwrite")
"""Say how a start begins."""
REFUSED: Mapping[str, tuple[str, ...]] = {
    "its processes, devices and layouts are those of its start": (
        *("trainer.*nnodes", "trainer.n_gpus_per_node", "trainer.device*", "trainer.launcher", "*.strategy"),
        *("*_parallel_size", "*.fsdp_config.*", "*.megatron.*", "ray_init.*"),
    ),
    "the checkpoint holds the models that are trained, and the engines those that they were started with": (
        *("*.model.*", "*.rollout.name", "*.lora_*", "*.rollout.dtype", "*.quantization"),
        *("*.gpu_memory_utilization", "*.engine_kwargs*", "*.max_num_*"),
    ),
    "optimizer steps, mini-batches and the place in the data are counted by it": (
        *("data.train_batch_size", "*mini_batch_size", "*micro_batch_size*", "*.rollout.n", "*.ppo_epochs"),
        *("data.*_files", "data.seed", "data.shuffle", "*.seed", "*_length"),
    ),
    "the run writes there": ("trainer.*_dir", "trainer.project_name", "trainer.experiment_name"),
}
"""Why a key cannot -> patterns of such keys."""


def changed_keys(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Key -> (value of before, new value) of each key that differs, but those that say how a start begins."""
    names = [name for name in all_keys() if name not in ALIASES and not _fits(name, OF_THE_START)]
    both = {name: (get(before, name), get(after, name)) for name in names}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def why_not(name: str) -> str:
    """Why a key cannot be another one while the run goes on; empty if it can."""
    if any(_fits(name, patterns) for patterns in AMENDABLE.values()):
        return ""
    reasons = (why for why, patterns in REFUSED.items() if _fits(name, patterns))
    return next(reasons, "a run keeps it from its start")


def problems(before: Plan, after: Plan) -> Iterator[str]:
    """Why a run cannot go on by another plan from a checkpoint between two steps."""
    if before.world_size != after.world_size:
        yield f"the run has {before.world_size} processes, and the new plan {after.world_size}"
    for name, was in before.models.items():
        now = after.models.get(name)
        if now is None and (was.trains or was.is_rollout):
            yield (
                f"model {name} would be gone, and with it what it has learnt. To stop its training and keep "
                "its weights, set actor.freeze=true at the node that trains it"
            )
        elif now is not None and (what := _moved(was, now)):
            yield f"model {name} would have another {what}"
    for name, now in after.models.items():
        older = {link.target for link in after.links.values() if link.is_stale}
        if name not in before.models and (now.trains or now.is_rollout or name in older):
            yield f"model {name} would be new, and the checkpoint has no weights of it"
    if before.interactions != after.interactions:
        yield "who speaks after whom would change, and conversations of the run go on as they began"
    for name, was in before.nodes.items():
        now = after.nodes.get(name)
        if was.keeps_rows and (now is None or not now.keeps_rows):
            yield (
                f"node {name} has prompts in flight, which would be lost. Amend it to max_lag=1 and "
                "surplus=0, which trains them first"
            )
        for key in _other_overrides(was, now) if now is not None else ():
            if why := why_not(key):
                yield f"node {name}: {key}: {why}"


KEY_OF_RUN = object()


def _other_overrides(was: NodePlan, now: NodePlan) -> list[str]:
    """The keys that a node sets otherwise than before."""
    both = was.overrides.keys() | now.overrides.keys()
    values = ((key, [side.overrides.get(key, KEY_OF_RUN) for side in (was, now)]) for key in both)
    return sorted(key for key, (old, new) in values if old != new)


def _moved(was: ModelPlan, now: ModelPlan) -> str:
    """In what a model's place or shape differs; empty if in nothing."""
    for what in ("backend", "head", "ranks", "dims", "base", "adapters"):
        if getattr(was, what) != getattr(now, what):
            return f"{what} ({getattr(was, what)}, {getattr(now, what)})"
    return "part in the training" if was.trains != now.trains else ""


def differences(before: Plan, after: Plan, keys: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """What two plans differ in, in words: a line each. keys: those of the run, see changed_keys."""
    lines = [f"{name}: {_show(name, was)} -> {_show(name, now)}" for name, (was, now) in keys.items()]
    for name, now in after.nodes.items():
        was = before.nodes.get(name)
        if was is None:
            ranks = ",".join(map(str, after.run_of(name).ranks)) if _runs(after, name) else "none"
            lines.append(f"node {name}: new, {now.op} of agent {now.agent} on ranks {ranks}")
            continue
        for key in _other_overrides(was, now):
            values = [side.overrides.get(key, KEY_OF_RUN) for side in (was, now)]
            texts = ["as the run" if value is KEY_OF_RUN else _show(key, value) for value in values]
            lines.append(f"node {name}: {key}: {texts[0]} -> {texts[1]}")
        if (was.op, was.executable, was.options) != (now.op, now.executable, now.options):
            lines.append(f"node {name}: {was.op} -> {now.op}, or its code or its options")
        if was.max_lag != now.max_lag:
            lines.append(f"node {name}: staleness of at most {was.max_lag} -> {now.max_lag}")
    lines += [f"node {name}: gone" for name in before.nodes if name not in after.nodes]
    lines += [
        f"model {name}: {what}"
        for here, there, what in ((after, before, "new"), (before, after, "gone"))
        for name in here.models
        if name not in there.models
    ]
    return lines


def _show(name: str, value: Any) -> str:
    return show(all_keys()[name], value) if name in all_keys() else str(value)


def _runs(plan: Plan, name: str) -> bool:
    return any(getattr(ins, "node", None) == name for ins in plan.instructions)


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
