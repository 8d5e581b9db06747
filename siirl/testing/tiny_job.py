"""The user's job as a test runs it: the same workflow, rewards, tools and keys of what is learnt; tiny
models, few rows, CPUs.
"""

import gzip
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from siirl.compiler.compile import load_dag
from siirl.config import Config, with_overrides
from siirl.config.batch import batch_of
from siirl.config.resolve import get
from siirl.config.roles import ROLES
from siirl.config.tree import default_config
from siirl.dag.spec import DagSpec, NodeSpec
from siirl.data.data_files import MADE, list_files
from siirl.errors import DataError, NotSupportedError
from siirl.model_files.hub import HubRepo, fetch, is_on
from siirl.model_files.local_models import CONFIG_FILES, MODELSCOPE_SWITCH, TOKENIZER_PATTERNS, on_hub
from siirl.testing.tiny_models import tiny_of

STEPS, PROMPTS, ROWS = 2, 4, 64
"""Training steps of a run, prompts of a step, rows of each file."""
MOST_FILES = 16
"""Of a pattern or folder, whose rows are taken."""
MOST_SAMPLES = 8
"""Of a prompt."""
LEARNING_RATE = 1e-3
"""With which one step of a tiny model is seen, and is small."""

OF_THE_MACHINE = re.compile(
    r"(^|\.)(strategy|fsdp_config|megatron|checkpoint|engine_kwargs|router_replay|endpoint)(\.|$)"
    r"|parallel_size|micro_batch_size|use_dynamic_bsz|max_token_len_per_gpu|gradient_checkpointing|use_liger"
    r"|compile_layers|attention_kernels|use_fused|remove_padding|_offload$|gpu_memory_utilization|max_num_"
    r"|max_model_len|enforce_eager|free_cache_engine|quantization|rollout\.(dtype|mode|seed_engine)$|weight_link"
    r"|replace_weights|weight_buffer_gib|max_log_prob_diff|max_engine_restarts|merge_lora"
    r"|optim\.(?!name|betas|weight_decay|override_optimizer_config|lr$)|^ray_init\.|^profiler\.|^dag\.|^trainer\."
    r"|\.model\.(override_config|model_revision|cache_dir|hf_hub_token)|^data\.(train_batch_size|gen_batch_size)"
    r"|ppo_mini_batch_size|^data\.val_|first_step$|last_step$|train_cycle$|actor\.freeze$|curriculum_steps"
    r"|judge\.name$"
)
"""Keys that say on what the job runs, how long, and how much at once: a test has its own."""
OF_THE_TRAINER = ("trainer.seed", "trainer.balance_batch")
"""Those of the group that say what is learnt."""


@dataclass(frozen=True)
class TinyJob:
    """A job of a few seconds, of which the runs of a test are made."""

    cfg: Config
    dag: DagSpec
    folder: Path

    def config(self, name: str, ranks: int, steps: int, settings: Mapping[str, Any]) -> Config:
        """That of one run of it, whose files go to a folder of that name."""
        written = self.folder / "workflow.yaml"
        if not written.exists():
            self.dag.save(written)
        own = {
            "dag.workflow_path": str(written),
            "trainer.device": "cpu",
            "trainer.launcher": "local",
            "trainer.nnodes": 1,
            "trainer.n_gpus_per_node": ranks,
            "trainer.total_training_steps": steps,
            "trainer.output_dir": str(self.folder / name),
            "trainer.logger": [],
            "trainer.progress": "plain",
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
            "trainer.save_freq": -1,
            "trainer.export_hf": False,
            "trainer.trace": False,
            "trainer.max_restarts": 0,
            "trainer.deadline_s": 80,
        }
        return with_overrides(self.cfg, own | dict(settings))


def tiny_job(cfg: Config, folder: Path, tiny: bool) -> TinyJob:
    """The job of a configuration as tests run it; its files go below `folder`. tiny: with models made for it.

    DataError, NotSupportedError: no tiny model can be made, there are no rows, or clients are served.
    """
    if cfg.service.enable:
        raise NotSupportedError(
            "not supported yet: siirl test of a job with service.enable=true: it learns from what its "
            "clients send, and here is none. Try it by siirl serve and a client (docs/serve.md)."
        )
    folder.mkdir(parents=True, exist_ok=True)
    models, dag = _Models(folder, tiny, _positions(cfg)), load_dag(cfg)
    kept = {
        name: get(cfg, name)
        for name in cfg.explicit
        if name in OF_THE_TRAINER or not OF_THE_MACHINE.search(name)
    }
    kept = {name: _fewer(name, value, models, folder, cfg) for name, value in kept.items()}
    learnt = {
        f"{group}.optim.lr": LEARNING_RATE if get(cfg, f"{group}.optim.lr") else 0.0
        for group in ("actor_rollout_ref.actor", "critic", "reward_model")
    }
    sizes = {"data.train_batch_size": PROMPTS} | {
        f"{ROLES[role].trainer}.ppo_mini_batch_size": PROMPTS // min(2, batch_of(cfg, role).mini_batches)
        for role in ("actor", "critic", "reward")
    }
    exact = {
        f"{group}.fsdp_config.mixed_precision.param_dtype": "float32"
        for group in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
    }
    rollout = cfg.actor_rollout_ref.rollout
    engine = {
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.name": _engine(rollout.name),
    }
    if rollout.n > MOST_SAMPLES:
        engine |= {"actor_rollout_ref.rollout.n": MOST_SAMPLES}
    values = kept | learnt | sizes | exact | engine
    nodes = [_tiny_node(node, models, folder, cfg) for node in dag.nodes]
    return TinyJob(with_overrides(default_config(), values), replace(dag, nodes=tuple(nodes)), folder)


def _engine(name: str) -> str:
    """What samples: the engine on transformers' models, unless nothing is sampled."""
    return name if name == "dataset" else "hf"


def _tiny_node(node: NodeSpec, models: "_Models", folder: Path, cfg: Config) -> NodeSpec:
    """The node without keys of the machine, on the models of the test, wherever it is placed."""
    group = node.role.group
    config = {}
    for name, value in node.config.items():
        full = name if not group or name.split(".")[0] in ("data", group.split(".")[0]) else f"{group}.{name}"
        if node.executable_ref is None and OF_THE_MACHINE.search(full):
            continue
        config[name] = (
            _engine(value) if full.endswith("rollout.name") else _fewer(full, value, models, folder, cfg)
        )
        if full.endswith("rollout.n"):
            config[name] = min(int(value), MOST_SAMPLES)
        if full.endswith("optim.lr"):
            config[name] = LEARNING_RATE if value else 0.0
    options = {k: v for k, v in (node.agent_options or {}).items() if k != "train_cycle"} or None
    return replace(node, config=config, placement=None, agent_options=options)


def _fewer(name: str, value: Any, models: "_Models", folder: Path, cfg: Config) -> Any:
    """The value of a key in the test: tiny models in the place of models, few rows in the place of files."""
    if name.endswith("model.path") and isinstance(value, str) and value:
        return models.of(value, "score" if name.startswith("reward_model.") and _scores(cfg) else "lm")
    if name == "data.train_files":
        names = [value] if isinstance(value, str) else value
        return [str(file) for one in names for file in few_rows(one, folder / "rows")]
    return value


def _scores(cfg: Config) -> bool:
    """Whether the reward model has a head that scores, not a judge's words."""
    judge = cfg.reward_model.judge
    return judge.name is None and judge.url is None


def _positions(cfg: Config) -> int:
    """That a tiny model has room for."""
    rollout = cfg.actor_rollout_ref.rollout
    return max(2048, 2 * (rollout.prompt_length + rollout.response_length) + 1024)


class _Models:
    """The tiny models of a test: one for each that the job names."""

    def __init__(self, folder: Path, tiny: bool, positions: int):
        self._folder, self._tiny, self._positions = folder / "models", tiny, positions
        self._made: dict[tuple[str, str], str] = {}

    def of(self, path: str, head: str) -> str:
        """The folder of the one that stands for a model."""
        if not self._tiny:
            return path
        if (path, head) not in self._made:
            number = len(self._made)
            source = Path(path).expanduser()
            if on_hub(path):
                files = (*CONFIG_FILES, *TOKENIZER_PATTERNS)
                source = fetch(HubRepo(path), files, is_on(MODELSCOPE_SWITCH))
            out = self._folder / f"{number}_{source.name}"
            made = tiny_of(source, out, number, self._positions, "score" if head == "score" else "lm")
            self._made[path, head] = str(made)
        return self._made[path, head]


def few_rows(name: str, folder: Path, most: int = ROWS) -> list[str]:
    """Files with the first rows of an entry of data.train_files; one of rows that are made stays as it is.

    DataError if there is no such file, or it cannot be read.
    """
    if name.startswith(tuple(MADE)):
        return [name]
    folder.mkdir(parents=True, exist_ok=True)
    written, files = [], list_files(name)
    for file in files[:MOST_FILES]:
        if not isinstance(file, Path):
            return [name]
        out = folder / f"{len(list(folder.iterdir()))}_{file.name}"
        try:
            written.append(str(_cut(file, out, max(1, most // len(files[:MOST_FILES])))))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{file} cannot be read: {error}. Write it again.") from error
    return written


def _cut(file: Path, out: Path, most: int) -> Path:
    """Write the first rows of a file in its own format; a file of another format is taken as it is."""
    names = [ending.lower() for ending in file.suffixes]
    if names[-1:] == [".parquet"]:
        batch = next(pq.ParquetFile(file).iter_batches(batch_size=most), None)
        if batch is None:
            return file
        pq.write_table(pa.Table.from_batches([batch]), out)
        return out
    lines = names[-1:] in ([".jsonl"], [".ndjson"]) or names[-2:] in ([".jsonl", ".gz"], [".ndjson", ".gz"])
    if lines:
        opened = gzip.open if names[-1] == ".gz" else open
        with opened(file, "rt", encoding="utf-8-sig") as read, opened(out, "wt", encoding="utf-8") as write:
            write.writelines(itertools.islice((line for line in read if line.strip()), most))
        return out
    if names[-1:] == [".json"] and file.stat().st_size > 1 << 20:
        rows = json.loads(file.read_text(encoding="utf-8-sig"))
        if isinstance(rows, list):
            out.write_text(json.dumps(rows[:most], ensure_ascii=False), encoding="utf-8")
            return out
    return file
