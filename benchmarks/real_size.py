"""Models of a real size on the GPUs of one host: Qwen3-30B-A3B, 8B and 32B, four agents, a killed worker.

    python benchmarks/real_size.py PART ... [--gpus 8] [--layers 48] [--response 1024] [key=value ...]
    python benchmarks/real_size.py --show [--out DIR]

experts_fsdp, experts_megatron: GRPO with a reference on Qwen3-30B-A3B's shape, experts sharded over all
ranks, engines of several GPUs. experts_replay: the first one, with the experts that the rollout
chose, and engines of one GPU.
killed: the first one again, with checkpoints in memory, of which a worker is killed twice.
hybrid: GRPO on Qwen3.5-0.8B's shape, sampled by Hugging Face.
dense_8B, dense_32B: README's keys, none of speed or memory. one_agent, four_agents: 8B, of which four debate:
two of weights of their own, two adapters on one base.

Weights are random, and made on the machine once (--folder keeps them): 61 GB of the 48 layers; fewer GPUs
have fewer layers (2: 8, 4: 24) unless --layers says how many. Each part writes OUT/real_size_<part>.json
after every step, and does nothing if that is complete of the same commit and sizes: a call may be cut, and
the next one goes on. It holds the seconds of a step's parts, tokens/s of a GPU, MFU, sync, the distance of
log-probs, and of each phase the memory that was measured over that of the plan.
--show: all parts that are there, beside what others have published. --small: sizes for two CPU processes.
Further keys go to the job.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from grpo_gpu import COMMON, HERE, REPOSITORY, environment, keep_logs, machine, make_data, make_model, summary
from report_file import Report, Rows, end_by_signals, following, rows_of, run_job

from siirl.launch.standby import NAME as STANDBY
from siirl.view.memory_phases import memory_phases

WARM_UP_STEPS = 1
POLICY = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{POLICY}.actor", f"{POLICY}.ref", f"{POLICY}.rollout"
EXPERTS = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
DENSE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
DENSE_32B = DENSE_8B | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
HYBRID = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Three gated delta nets to a layer of attention."""
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
SMALL_EXPERTS = SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SMALL_HYBRID = SMALL | {
    **{"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
LAYERS = {2: 8, 4: 24}
"""Of the experts' model on so many GPUs; on more all 48."""
KILLS = ((2, 0.3), (3, 0.7))
"""After which step, and after which part of another one."""
PUBLISHED = (
    "Qwen3-30B-A3B elsewhere: NeMo-RL 1,232 tokens/s of a GPU (32 H100, 2,048 rows of 4,096 tokens, "
    "on-policy steps of 171 s), weights replaced in 0.74 to 1.0 s; verl MFU 0.40 of the update on 8 GPUs"
)
CURVE = ("reward/total", "actor/loss", "actor/grad_norm", "actor/ref_kl")
FIGURES = {
    "step, s": "time/step_s",
    "rollout, s": "time/rollout_actor_s",
    "old log-probs, s": "time/actor_old_log_prob_s",
    "reference, s": "time/reference_log_prob_s",
    "update, s": "time/actor_train_s",
    "weight sync, s": "time/weight_sync_s",
    "tokens/s of a GPU": "perf/tokens_per_s_per_device",
    "MFU of the update": "perf/mfu",
    "log-prob distance": "actor/rollout_log_prob_diff",
}


@dataclass(frozen=True)
class Part:
    """A job."""

    sizes: dict[str, Any]
    keys: tuple[str, ...] = ()
    """{gpus}, {tensor}: of the machine, and of an engine."""
    reference: bool = False
    agents: int = 1
    kills: tuple[tuple[int, float], ...] = ()
    warm_up: int = WARM_UP_STEPS
    small: dict[str, Any] = field(default_factory=lambda: SMALL)


DEALT = (
    f"{ACTOR}.fsdp_config.expert_parallel_size={{gpus}}",
    f"{REF}.fsdp_config.expert_parallel_size={{gpus}}",
    f"{ROLLOUT}.tensor_model_parallel_size={{tensor}}",
)
MEGATRON = tuple(
    f"{role}.{key}"
    for role in (ACTOR, REF)
    for key in (
        "strategy=megatron",
        "megatron.tensor_model_parallel_size={tensor}",
        "megatron.expert_model_parallel_size={gpus}",
        "megatron.sequence_parallel=true",
    )
)
PARTS = {
    "experts_fsdp": Part(EXPERTS, DEALT, reference=True, small=SMALL_EXPERTS),
    "experts_megatron": Part(EXPERTS, (*MEGATRON, DEALT[-1]), reference=True, small=SMALL_EXPERTS),
    "experts_replay": Part(
        EXPERTS, (*DEALT[:2], f"{ACTOR}.router_replay.mode=R3"), reference=True, small=SMALL_EXPERTS
    ),
    "killed": Part(
        EXPERTS,
        (*DEALT, "trainer.memory_checkpoint_freq=1"),
        reference=True,
        kills=KILLS,
        warm_up=0,
        small=SMALL_EXPERTS,
    ),
    "hybrid": Part(HYBRID, (f"{ROLLOUT}.name=hf",), small=SMALL_HYBRID),
    "dense_8B": Part(DENSE_8B),
    "dense_32B": Part(DENSE_32B, (f"{ROLLOUT}.tensor_model_parallel_size={{tensor}}",)),
    "one_agent": Part(DENSE_8B),
    "four_agents": Part(DENSE_8B, agents=4),
}


def main() -> int:
    end_by_signals()
    args = arguments()
    if args.show:
        show(args.out)
        return 0
    for name in args.parts:
        begin_s = time.perf_counter()
        if status := Job(name, args).run():
            return status
        print(f"{name}: {time.perf_counter() - begin_s:.0f} s", flush=True)
    show(args.out)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, help="of the model with experts")
    parser.add_argument("--tensor", type=int, default=2, help="GPUs of an engine, and of a Megatron layer")
    parser.add_argument("--prompts", type=int, default=64, help="of a step, on all GPUs together")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=1024, help="tokens")
    parser.add_argument("--steps", type=int, default=4, help=f"of which {WARM_UP_STEPS} is not counted")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/real_size"), help="of models and runs")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--show", action="store_true")
    args, keys = parser.parse_known_args()
    args.keys = [word for word in (*args.parts, *keys) if "=" in word]
    args.parts = [word for word in args.parts if "=" not in word] or list(PARTS)
    if strange := [word for word in args.parts if word not in PARTS] + [k for k in keys if "=" not in k]:
        parser.error(f"{', '.join(strange)}: choose from {', '.join(PARTS)}")
    if args.small:
        args.gpus, args.prompts, args.prompt, args.response = 2, 4, 16, 16
    return args


class Job:
    """One part on this machine."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.args, self.part = name, args, PARTS[name]
        layers = args.layers or LAYERS.get(args.gpus, 48)
        sizes = self.part.sizes | ({"num_hidden_layers": layers} if "num_experts" in self.part.sizes else {})
        self.sizes = self.part.small if args.small else sizes
        self.out = args.folder / "runs" / name
        names = ("gpus", "tensor", "prompts", "samples", "prompt", "response", "small", "keys")
        settings = {key: getattr(args, key) for key in names} | {"sizes": self.sizes}
        steps = args.steps - self.part.warm_up
        self.report = Report(
            args.out / f"real_size_{name}.json", {name: steps}, settings=settings, machine=machine(), kills=[]
        )

    def run(self) -> int:
        """The exit code of the job; 0 at once if all is there."""
        if self._is_there():
            print(f"{self.name}: {self.report.path} is complete")
            return 0
        keys = self._keys()
        kills = Kills(self.out, self.part.kills, self.report)
        follow = following(self.out / "metrics.jsonl", self._counted)

        def seen() -> None:
            follow()
            kills.look()

        words = [sys.executable, "-m", "siirl.main_dag", *keys]
        status = run_job(words, seen, kills.started, cwd=REPOSITORY, env=environment())
        if status:
            keep_logs(self.out, self.report.path.parent / f"logs_{self.name}")
            return status
        self.report.finish()
        return 0

    def _is_there(self) -> bool:
        path = self.report.path
        before = json.loads(path.read_text()) if path.exists() else {}
        return before.get("complete", False) and all(
            before[key] == self.report[key] for key in ("commit", "settings", "machine", "asked_steps")
        )

    def _model(self) -> Path:
        """Made once for each shape."""
        shape = "_".join(
            str(self.sizes.get(key, 0)) for key in ("hidden_size", "num_hidden_layers", "num_experts")
        )
        folder = self.args.folder / f"model_{shape}"
        if not (folder / "config.json").exists():
            begin_s = time.perf_counter()
            part = folder.with_suffix(".part")
            make_model(part, self.sizes)
            part.rename(folder)
            print(f"{folder.name} made in {time.perf_counter() - begin_s:.0f} s", flush=True)
        return folder

    def _keys(self) -> list[str]:
        args, data = self.args, self.args.folder / f"{self.name}.parquet"
        args.folder.mkdir(parents=True, exist_ok=True)
        words = self.sizes.get("vocab_size", COMMON["vocab_size"])
        make_data(data, args.prompts * args.steps, args.prompt, words)
        values = {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": data,
            "data.train_batch_size": args.prompts,
            "data.max_prompt_length": args.prompt,
            "data.max_response_length": args.response,
            f"{POLICY}.model.path": self._model(),
            f"{ROLLOUT}.name": "vllm",
            f"{ROLLOUT}.n": args.samples,
            f"{ROLLOUT}.ignore_eos": True,
            "custom_reward_function.path": HERE / "grpo_gpu_reward.py",
            "trainer.n_gpus_per_node": args.gpus,
            "trainer.total_training_steps": args.steps,
            "trainer.save_freq": -1,
            "trainer.export_hf": False,
            "trainer.logger": "[console]",
            "trainer.resume_mode": "disable",
            "trainer.overwrite": True,
            "trainer.output_dir": self.out,
        }
        if self.part.reference:
            values |= {f"{ACTOR}.use_kl_loss": True}
        if self.part.agents > 1:
            values["dag.workflow_path"] = self._workflow()
        keys = [key.format(gpus=args.gpus, tensor=args.tensor) for key in self.part.keys]
        return [*(f"{key}={value}" for key, value in values.items()), *keys, *args.keys]

    def _workflow(self) -> Path:
        """Debaters that each say as much as one agent does alone, to the same prompts."""
        path = self.args.folder / f"{self.name}.yaml"
        code = path.with_suffix(".py")
        code.write_text("def pre_process(messages, episode):\n    return messages[:1]\n")
        path.write_text(yaml.safe_dump(debate(str(code)), sort_keys=False))
        return path

    def _counted(self, rows: Rows) -> None:
        counted = rows[self.part.warm_up :]
        if not counted:
            return
        self.report["metrics"] = summary(counted)
        names = [metric for metric in FIGURES.values() if metric in counted[0]]
        self.report["figures"] = {
            metric: statistics.median(row[metric] for row in counted if metric in row) for metric in names
        }
        self.report["curve"] = {name: [row[name] for row in rows if name in row] for name in CURVE}
        job = self.out / "job.json"
        if job.exists():
            series: dict[str, dict[int, float]] = {}
            for row in rows:
                for metric, value in row.items():
                    series.setdefault(metric, {})[row["step"]] = value
            self.report["memory"] = memory_over_plan(json.loads(job.read_text()), series)
        self.report.count(self.name, len(counted))


def debate(code: str) -> dict[str, Any]:
    """Agents 0 and 1 have weights of their own; 2 and 3 an adapter each on the base that 2 names."""
    nodes: list[dict[str, Any]] = []
    for agent in range(4):
        config: dict[str, Any] = {"rollout.agent.process_path": code}
        if agent > 1:
            config |= {"model.lora_rank": 32}
        if agent == 3:
            config |= {"rollout.agent.share_instance": 2}
        spoken = [f"rollout_{agent}"]
        for name, kind, role, needs, more in (
            (
                "rollout",
                "MODEL_INFERENCE",
                "ROLLOUT",
                [f"rollout_{agent - 1}"] if agent else [],
                {"config": config},
            ),
            ("reward", "COMPUTE", "REWARD", ["rollout_3"], {}),
            ("advantage", "COMPUTE", "ADVANTAGE", [f"reward_{agent}"], {}),
            ("old", "MODEL_TRAIN", "ACTOR", spoken, {"only_forward_compute": True}),
            ("train", "MODEL_TRAIN", "ACTOR", [f"advantage_{agent}", f"old_{agent}"], {}),
        ):
            node = {"node_id": f"{name}_{agent}", "node_type": kind, "node_role": role, "agent_group": agent}
            nodes.append(node | {"dependencies": needs} | more)
    return {"dag_id": "four_agents", "nodes": nodes}


def memory_over_plan(job: dict[str, Any], series: dict[str, dict[int, float]]) -> dict[str, Any]:
    """By phase: GiB of the device by the plan, what was measured, and the one over the other."""
    found = {}
    for phase in memory_phases(job, series)["phases"]:
        measured = (phase.get("device") or phase.get("peak") or [None])[0]
        planned = (phase["estimate"] or {}).get("device")
        if measured and planned:
            found[phase["name"]] = {"plan": planned, "measured": measured, "ratio": measured / planned}
    return found


class Kills:
    """SIGKILL for a worker of a job, as often as asked, and how long until all ranks are back."""

    def __init__(self, out: Path, planned: tuple[tuple[int, float], ...], report: Report):
        self._out, self._left, self._report = out, list(planned), report
        self._pid, self._draw = 0, random.Random(0)
        self._due_s: float | None = None
        self._waiting: dict[str, Any] | None = None

    def started(self, pid: int) -> None:
        self._pid = pid

    def look(self) -> None:
        """Called all the time."""
        metrics = self._out / "metrics.jsonl"
        rows = rows_of(metrics) if metrics.exists() else []
        if self._waiting is not None:
            later = [row for row in rows if row["time_s"] > self._waiting["killed_s"]]
            if later:  # the first step that ended after the kill was computed again, or anew
                self._waiting["next_step_ended_s"] = later[0]["time_s"] - self._waiting["killed_s"]
                self._waiting["step_s"] = later[0]["time/step_s"]
                self._waiting["recovery_s"] = self._waiting["next_step_ended_s"] - later[0]["time/step_s"]
                self._report["kills"].append(self._waiting)
                self._report.save()
                self._waiting = None
            return
        if not self._left or not rows or rows[-1]["step"] < self._left[0][0]:
            return
        if self._due_s is None:
            self._due_s = time.time() + self._left[0][1] * rows[-1]["time/step_s"]
        if time.time() >= self._due_s:
            self._kill(rows[-1]["step"])

    def _kill(self, step: int) -> None:
        workers: dict[int, psutil.Process] = {}
        children = psutil.Process(self._pid).children(recursive=True)
        for child in sorted(children, key=psutil.Process.create_time):  # what starts does not stand by yet
            with contextlib.suppress(psutil.Error, KeyError):
                if child.name() != STANDBY and "worker_entry" in " ".join(child.cmdline()):
                    workers.setdefault(int(child.environ()["RANK"]), child)
        rank = self._draw.choice(sorted(workers))
        self._waiting = {"after_step": step, "rank": rank, "killed_s": time.time()}
        workers[rank].send_signal(signal.SIGKILL)
        self._left.pop(0)
        self._due_s = None


def show(out: Path) -> None:
    """What is there."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("real_size_*.json"))]
    names = [next(iter(report["asked_steps"])) for report in found]
    print(f"{'':24s}" + "".join(f"{name:>18s}" for name in names))
    for title, metric in FIGURES.items():
        cells = (report.get("figures", {}).get(metric, float("nan")) for report in found)
        print(f"{title:24s}" + "".join(f"{cell:18.4g}" for cell in cells))
    for name, report in zip(names, found, strict=True):
        for phase, told in report.get("memory", {}).items():
            print(f"{name}, {phase}: {told['measured']:.4g} GiB, {told['ratio']:.2f} of the plan's")
        for kill in report["kills"]:
            began = f"{kill['recovery_s']:.1f} s until the next step began"
            print(f"{name}: killed after step {kill['after_step']}, {began}")
        if not report["complete"]:
            print(f"{name}: cut, {report['counted_steps'][name]} of {report['asked_steps'][name]} steps")
    curves = {name: report.get("curve", {}) for name, report in zip(names, found, strict=True)}
    for metric in CURVE if {"killed", "experts_fsdp"} <= curves.keys() else ():
        pairs = zip(curves["killed"].get(metric, ()), curves["experts_fsdp"].get(metric, ()), strict=False)
        print(f"{metric}, killed and not: " + "  ".join(f"{a:.6g} {b:.6g}" for a, b in pairs))
    print(PUBLISHED)


if __name__ == "__main__":
    sys.exit(main())
