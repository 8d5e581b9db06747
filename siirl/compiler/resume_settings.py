"""Which settings a run keeps when it goes on from a checkpoint, so that it is still the same run."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from fnmatch import translate
from typing import Any

from siirl.compiler.plan import Plan
from siirl.config import Config
from siirl.config.aliases import ALIASES
from siirl.config.effects import why_no_effect
from siirl.config.resolve import get
from siirl.config.roles import ROLE_GROUPS, role_group
from siirl.config.root import all_keys
from siirl.config.values import plain

FREE: Mapping[str, tuple[str, ...]] = {
    "what is written, and where": (
        *("trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.log_val_generations"),
        *("trainer.*_dir", "trainer.save_freq", "trainer.max_actor_ckpt_to_keep", "trainer.overwrite"),
        *("trainer.export_hf", "trainer.trace*", "*.checkpoint.*", "*.disable_log_stats"),
        *("reward_model.overlong_buffer.log", "trainer.progress", "trainer.prometheus_*"),
        *("trainer.samples_gib", "trainer.tensorboard_gib", "trainer.ledger*", "profiler.*"),
    ),
    "where the workflow is written: what its nodes are and set counts": ("dag.workflow_path",),
    "validation": (
        *("trainer.test_freq", "trainer.val_*", "data.val_*", "actor_rollout_ref.rollout.val_kwargs.*"),
    ),
    "how the run starts, resumes and ends": (
        *(
            "trainer.resume_*",
            "trainer.launcher",
            "trainer.deadline_s",
            "*_restarts",
            "trainer.behind_firewall",
        ),
        "*.max_log_prob_diff",
        *("trainer.restart_window_s", "trainer.memory_checkpoint_freq", "trainer.stuck_s", "ray_init.*"),
    ),
    "how services are asked": (
        *("*.timeout_s", "*.max_tries", "*.max_concurrent", "*.max_per_s", "*.token_env", "*.hf_hub_token"),
        *("*.cache_dir", "*.tool_timeout_s", "reward_model.num_workers", "*.serve.address", "*.serve.idle_s"),
        *("*.away_s",),
    ),
    "which devices there are, and how models lie on them: rounding apart, the numbers stay": (
        *("trainer.*nnodes", "trainer.n_gpus_per_node", "trainer.device", "trainer.device_memory_gib"),
        *("trainer.balance_batch", "*.strategy", "*.fsdp_size", "*_offload", "*_model_parallel_size"),
        "*.expert_parallel_size",
        *("*.context_parallel_size", "*.expert_tensor_parallel_size", "*.sequence_parallel"),
        "*.ulysses_sequence_parallel_size",
        *("*.use_distributed_optimizer", "*.override_ddp_config", "*.use_mbridge", "*.weight_link"),
        *("*.use_dist_checkpointing", "*.dist_checkpointing_path", "*.share_instance"),
    ),
    "memory and speed": (
        *("*micro_batch_size*", "*use_dynamic_bsz", "*max_token_len_per_gpu", "*.use_liger"),
        "*.compile_layers",
        *("*.enable_gradient_checkpointing", "*.gradient_checkpointing_kwargs", "*.attention_kernels"),
        *("*.enforce_eager", "*.replace_weights", "*.weight_buffer_gib", "*.merge_lora"),
        *("*.gpu_memory_utilization", "*.free_cache_engine", "*.max_num_batched_tokens", "*.max_num_seqs"),
        *("*.enable_chunked_prefill", "*.multi_turn.max_parallel_calls"),
    ),
}
"""Why a key may be another one when a run goes on -> patterns of such keys. Any other key counts."""
_FREE = re.compile("|".join(translate(pattern) for patterns in FREE.values() for pattern in patterns))
WHOLE_PATH = re.compile(r"^/(?:[^:]*/)?([^:/]*)")
LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")
"""Count only where the learning rate depends on how long the run is."""


def settings_of(cfg: Config, plan: Plan) -> dict[str, Any]:
    """Name -> value of all that changes what a run computes: JSON values, no secrets, kept in checkpoints.

    Keys that act and are not FREE; those of a node are named "node NAME: key". Of free-form maps, a digest.
    """
    found = {name: _value(name, value) for name, value in counting_values(cfg, plan).items()}
    for node in plan.nodes.values():
        found[f"node {node.name}"] = [node.op, node.executable, *node.dependencies]
    return found


def counting_values(cfg: Config, plan: Plan | None) -> dict[str, Any]:
    """Name -> value, as it is, of all settings that count; of a node also its code and its options."""
    names = [name for name, key in all_keys().items() if key.rule.status == "supported"]
    acting = [name for name in names if name not in ALIASES and not is_free(name, cfg)]
    found = {name: get(cfg, name) for name in acting if not why_no_effect(cfg, name)}
    for node in plan.nodes.values() if plan is not None else ():
        found[f"node {node.name}"] = node.executable
        if node.options:
            found[f"node {node.name}: options"] = dict(node.options)
        for name, value in node.overrides.items():
            if not is_free(name, cfg):
                found[f"node {node.name}: {name}"] = value
    return found


def differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the settings of a checkpoint and those of now, a line each.

    A key that only one of them has acts in one of them alone, because of another that differs; or it is newer
    than the checkpoint. What a node is, or sets, counts in any case; what it reads ("KEY, FILE") may be new.
    """
    absent = object()
    lines = []
    for name in sorted({*saved, *now}):
        old, new = saved.get(name, absent), now.get(name, absent)
        if old == new or (absent in (old, new) and (not name.startswith("node ") or ", " in name)):
            continue
        if _is_moved(name, saved, now):
            continue
        texts = ["not there" if value is absent else json.dumps(value) for value in (old, new)]
        lines.append(f"{name}: {texts[0]} in the checkpoint, {texts[1]} now")
    return lines


def _is_moved(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether what a setting names lies elsewhere and is what it was, by the digests of its files."""
    before, here = (
        {key: digest for key, digest in settings.items() if key.startswith(f"{name}, ")}
        for settings in (saved, now)
    )
    return bool(here) and before == here and _unplaced(saved[name]) == _unplaced(now[name])


def _unplaced(value: Any) -> Any:
    """Without the folders of whole paths; in a list names stay, as their order counts."""
    if isinstance(value, list):
        return [WHOLE_PATH.sub(r"\1", item) if isinstance(item, str) else item for item in value]
    return WHOLE_PATH.sub("", value) if isinstance(value, str) else value


def is_free(name: str, cfg: Config) -> bool:
    """Whether a key may differ between two starts of a run."""
    if name in LENGTH:
        return not any(_depends_on_length(cfg, group) for group in ROLE_GROUPS)
    return _FREE.match(name) is not None


def _depends_on_length(cfg: Config, role: str) -> bool:
    """Whether the learning rate of a role follows from the number of steps of the run."""
    optim = getattr(role_group(cfg, role), "optim", None)
    if optim is None or optim.total_training_steps:
        return False
    by_share = optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    style = optim.lr_decay_style or optim.warmup_style
    return by_share or (style not in ("constant", "inverse-square-root") and not optim.lr_decay_steps)


def _value(name: str, value: Any) -> Any:
    """The value as it is kept. A file or folder that is here by its whole path, however it was given."""
    if isinstance(value, dict):
        return _digest(value)
    if isinstance(value, tuple | list):
        return [_value(name, item) for item in value]
    if isinstance(value, str) and value and os.path.exists(os.path.expanduser(value)):
        return os.path.abspath(os.path.expanduser(value))
    return plain(value)


def _digest(value: Mapping[str, Any]) -> str:
    """Tells free-form maps apart without a word of theirs, which may be secret."""
    if not value:
        return "{}"
    text = json.dumps(plain(dict(value)), sort_keys=True, default=str)
    return f"{len(value)} entries, {hashlib.sha256(text.encode()).hexdigest()[:12]}"
