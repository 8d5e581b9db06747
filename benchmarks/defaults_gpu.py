"""What a user gets who sets nothing: README's command with its keys alone, beside the best keys that we know.

    python benchmarks/defaults_gpu.py pairs --shape 0.6B [--rounds 1] [--steps 5]
    python benchmarks/defaults_gpu.py draws [--draws 20] [--minutes 9.5]
    python benchmarks/defaults_gpu.py show

pairs: GRPO on random weights, 128 prompts x 8, responses of 512 tokens (ignore_eos): the plan's own choices
and BEST, one after the other, the other way round in each second round, so that the first job on a machine is
not always the same; the first two steps of a job (with three steps or fewer: the first) are not counted.

draws: jobs of two steps on shapes of batch, length and model that are drawn from their number alone: does any
run out of memory? None has a key of speed or memory, but for every second one (with --quick: each), in which
compiled layers and CUDA graphs are off, as they take most of a start; those that the plan finds fullest come
first, and no draw begins after so many minutes.

Both add to the same file after every step, and do what is not there yet, so that a call may be cut at any
moment and the next one goes on. show: what is there, against the bars: at most 1.10 times the best keys'
step, below 95% of the device, no draw out of memory.

--small: two layers and responses of 16 tokens, to try the script, also on a CPU. --arm NAME=KEY,KEY adds an
arm to pairs: the plan's own choices with these keys.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml
from grpo_gpu import COMMON, SHAPES, SMALL, machine, make_data, make_model
from report_file import Rows, commit, end_by_signals, following, host, run_job, write

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
WARM_UP_STEPS = 2
SLOWEST, FULLEST, DRAWS = 1.10, 0.95, 20
MODELS = {"0.6B": SHAPES["B"], "1.7B": SHAPES["A"]}
POLICY = "actor_rollout_ref"
BEST = (
    f"{POLICY}.model.enable_gradient_checkpointing=False",
    f"{POLICY}.model.compile_layers=True",
    f"{POLICY}.actor.use_dynamic_bsz=True",
    f"{POLICY}.actor.ppo_max_token_len_per_gpu=33792",
    f"{POLICY}.rollout.log_prob_use_dynamic_bsz=True",
    f"{POLICY}.rollout.log_prob_max_token_len_per_gpu=67584",
    f"{POLICY}.rollout.enforce_eager=False",
    f"{POLICY}.rollout.max_num_seqs=1024",
    f"{POLICY}.rollout.max_num_batched_tokens=16384",
    f"{POLICY}.rollout.gpu_memory_utilization=0.6",
)
"""What was found by hand (docs/evidence/gpu.md); FlashAttention 4 where it is installed."""
QUICK = (f"{POLICY}.model.compile_layers=False", f"{POLICY}.rollout.enforce_eager=True")
FLASH = f"{POLICY}.model.attention_kernels=flash_attn_4"


class Shape(dict[str, Any]):
    """Sizes of the model, and prompts, samples, prompt and response (tokens) of a step."""

    def keys_of_run(self, folder: Path) -> list[str]:
        """README's keys and those of the workload, none of speed or memory."""
        return [
            "algorithm.adv_estimator=grpo",
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/train.parquet",
            f"data.train_batch_size={self['prompts']}",
            f"data.max_prompt_length={self['prompt']}",
            f"data.max_response_length={self['response']}",
            f"{POLICY}.model.path={model_folder(self)}",
            f"{POLICY}.rollout.name={self['engine']}",
            f"{POLICY}.rollout.n={self['samples']}",
            f"{POLICY}.rollout.ignore_eos=True",
            f"custom_reward_function.path={HERE}/grpo_gpu_reward.py",
            "trainer.n_gpus_per_node=1",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.export_hf=False",
            "trainer.logger=[console]",
            f"trainer.output_dir={folder}/out",
        ]


def drawn(number: int, engine: str, small: bool) -> Shape:
    """The shape of a draw: the same wherever it is drawn."""
    draw = random.Random(f"defaults {number}")
    layers, hidden = draw.choice([4, 8, 16]), draw.choice([1024, 2048, 4096])
    prompts, samples = draw.choice([4, 16, 64, 128]), draw.choice([4, 8, 16])
    prompt, response = draw.choice([64, 256, 1024, 3000]), draw.choice([64, 256, 1024, 4096])
    while prompts > 2 and prompts * samples * (prompt + response) > 1 << 19:  # a step is to end in seconds
        prompts //= 2
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    if small:
        sizes, prompts = {name: size for name, size in SMALL.items() if name != "prompts"}, 4
        prompt, response = min(prompt, 64), 16
    rows = {"prompts": prompts, "samples": samples, "prompt": prompt, "response": response}
    return Shape(sizes | rows | {"engine": engine})


def fullness(shape: Shape) -> int:
    """By which draws are ordered: optimizer states, and the tokens of the longest rows."""
    states = 16 * 12 * shape.get("num_hidden_layers", 2) * shape["hidden_size"] ** 2
    return states + shape["prompts"] * shape["samples"] * (shape["prompt"] + shape["response"]) * 65536


def fixed(name: str, engine: str, small: bool) -> Shape:
    """The workload of the pairs."""
    sizes = {key: size for key, size in (MODELS[name] | (SMALL if small else {})).items() if key != "prompts"}
    rows = {"prompts": 128, "samples": 8, "prompt": 512, "response": 512}
    return Shape(sizes | rows | ({"prompts": 4, "response": 16} if small else {}) | {"engine": engine})


class Results(dict[str, Any]):
    """The file that all calls add to."""

    def __init__(self, path: Path):
        told = {"commit": commit(), "host": host(), "machine": machine(), "pairs": {}, "draws": {}}
        super().__init__(told | (json.loads(path.read_text()) if path.exists() else {}))
        self.path = path

    def put(self, kind: str, name: str, run: dict[str, Any]) -> None:
        """What is known of a run. Writes the file."""
        self[kind][name] = run
        write(self.path, json.dumps(self, indent=1) + "\n")


class MemoryWatch(threading.Thread):
    """The most memory of the first GPU in use, in GiB, while it runs; 0 without one."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_gib, self.total_gib = 0.0, 0.0
        query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
        query += ["--id=0", "--loop-ms=500"]  # one process: each start of it takes the driver's locks
        found = shutil.which("nvidia-smi")
        self._told = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if found else None

    def run(self) -> None:
        for line in (self._told and self._told.stdout) or ():
            used, self.total_gib = (float(part) / 1024 for part in line.split(","))
            self.peak_gib = max(self.peak_gib, used)

    def end(self) -> None:
        if self._told is not None:
            self._told.terminate()
            self._told.wait()
        self.join()


def model_folder(shape: Shape) -> Path:
    """The same for each job of a shape: what vLLM has compiled is known by its model's path."""
    sizes = "-".join(
        str(shape[name])
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        if name in shape
    )
    return Path(tempfile.gettempdir()) / f"siirl-defaults-{sizes}"


def run(results: Results, kind: str, name: str, shape: Shape, steps: int, more: tuple[str, ...]) -> None:
    """One job; what it does is in the file after every step."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sizes = {key: size for key, size in shape.items() if key in {*COMMON, *SHAPES["A"]} - {"prompts"}}
        if not (model := model_folder(shape)).exists():
            make_model(model, sizes)
        words = sizes.get("vocab_size", COMMON["vocab_size"])
        make_data(folder / "train.parquet", shape["prompts"] * steps, shape["prompt"], words)
        keys = [*shape.keys_of_run(folder), f"trainer.total_training_steps={steps}", *more]
        begin_s, watch = time.perf_counter(), MemoryWatch()
        told: dict[str, Any] = {"shape": shape, "keys": list(more), "asked_steps": steps, "ended": "cut"}

        def counted(rows: Rows) -> None:
            told.update(
                seconds=time.perf_counter() - begin_s,
                steps=[row["time/step_s"] for row in rows if "time/step_s" in row],
                parts={
                    part: [row[part] for row in rows if part in row]
                    for part in sorted({part for row in rows for part in row if part.startswith("time/")})
                },
                peak_gib=watch.peak_gib,
                device_gib=watch.total_gib,
                chosen=chosen_in(folder / "out"),
            )
            results.put(kind, name, told)

        env = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
        log = folder / "log.txt"
        watch.start()
        try:
            with log.open("w") as out:
                seen = following(folder / "out" / "metrics.jsonl", counted)
                command = [sys.executable, "-m", "siirl.main_dag", *keys]
                status = run_job(command, seen, cwd=REPOSITORY, env=env, stdout=out, stderr=subprocess.STDOUT)
        finally:
            watch.end()
        text = log.read_text(errors="replace")
        lacked = "out of memory" if "out of memory" in text.lower() else "failed"
        told |= {"ended": lacked if status else "well", "peak_gib": watch.peak_gib}
        told |= {"device_gib": watch.total_gib, "chosen": chosen_in(folder / "out")}
        told |= {"seconds": time.perf_counter() - begin_s}
        if status:
            told["log"] = text[-3000:]
        results.put(kind, name, told)
        job = f"{told['seconds']:.0f} s, steps {texts(told.get('steps', []))}, {watch.peak_gib:.1f} GiB"
        print(f"{kind} {name}: {told['ended']}, {job}, {dict(shape)}", flush=True)


def chosen_in(output: Path) -> list[str]:
    """What the run's record says was chosen."""
    record = output / "run.yaml"
    starts = list(yaml.safe_load_all(record.read_text())) if record.exists() else []
    chosen = (starts[-1].get("chosen") or {}).get("choices", []) if starts else []
    return [f"{one['model']} {key}={value}" for one in chosen for key, value in one["keys"].items()]


def is_done(results: Results, kind: str, name: str) -> bool:
    return results[kind].get(name, {}).get("ended", "cut") != "cut"


def counted_steps(told: dict[str, Any]) -> list[float]:
    steps = told.get("steps", [])
    return steps[min(WARM_UP_STEPS, max(1, told["asked_steps"] - 2)) :]


def show(results: Results) -> int:
    """Print what is there; 1 if a bar is missed."""
    missed = []
    for shape in MODELS:
        medians: dict[str, float] = {}
        for what in dict.fromkeys(name.split()[1] for name in results["pairs"] if name.startswith(shape)):
            runs = [told for name, told in results["pairs"].items() if name.startswith(f"{shape} {what} ")]
            full = max(
                (told["peak_gib"] / told["device_gib"] for told in runs if told.get("device_gib")), default=0
            )
            for told in runs:
                rollouts = told.get("parts", {}).get("time/rollout_actor_s", [])
                print(f"{shape} {what}, a job: {texts(told.get('steps', []))} s, rollout {texts(rollouts)} s")
            if counted := [step for told in runs for step in counted_steps(told)]:
                medians[what] = statistics.median(counted)
                spread = f"{min(counted):.2f} to {max(counted):.2f} in {len(counted)} steps"
                print(f"{shape} {what}: {medians[what]:.2f} s a step ({spread}), peak {100 * full:.0f}%")
            if what == "chosen" and full >= FULLEST:
                missed.append(f"{shape}: peak {100 * full:.0f}% of the device")
        for what in medians.keys() - {"best"} if "best" in medians else ():
            ratio = medians[what] / medians["best"]
            print(f"{shape}: {what} takes {ratio:.3f} times the best keys' step")
            if what == "chosen" and ratio > SLOWEST:
                missed.append(f"{shape}: {ratio:.3f} times the best keys' step")
    ends = {name: told["ended"] for name, told in results["draws"].items()}
    print(f"draws: {len(ends)} of {DRAWS}: {ends}")
    missed += [f"draw {name}: {end}" for name, end in ends.items() if end not in ("well", "cut")]
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


def texts(numbers: list[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def main() -> int:
    end_by_signals()
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=("pairs", "draws", "show"))
    parser.add_argument("--shape", choices=MODELS, default="0.6B")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=KEY,KEY")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "defaults_gpu.json")
    args = parser.parse_args()
    results = Results(args.out)
    if args.what == "pairs":
        shape = fixed(args.shape, args.engine, args.small)
        for number in range(args.rounds):
            for what, keys in arms(args.arm, args.small)[:: -1 if number % 2 else 1]:
                name = f"{args.shape} {what} {number}"
                if not is_done(results, "pairs", name):
                    run(results, "pairs", name, shape, args.steps, keys)
    elif args.what == "draws":
        until_s = time.monotonic() + 60 * args.minutes
        shapes = {number: drawn(number, args.engine, args.small) for number in range(args.draws)}
        for number in sorted(shapes, key=lambda number: fullness(shapes[number]), reverse=True):
            if not is_done(results, "draws", str(number)) and time.monotonic() < until_s:
                keys = QUICK if args.quick or number % 2 else ()
                run(results, "draws", str(number), shapes[number], 2, keys)
                shutil.rmtree(model_folder(shapes[number]))
    return show(results)


def arms(more: list[str], small: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Names and keys of what is compared."""
    best = () if small else (*BEST, FLASH) if flash_is_installed() else BEST
    own = [(name, tuple(keys.split(","))) for name, _, keys in (arm.partition("=") for arm in more)]
    return [("chosen", ()), ("best", best), *own]


def flash_is_installed() -> bool:
    from siirl.launch.devices import installed

    return "flash-attn-4" in installed()[0]


if __name__ == "__main__":
    sys.exit(main())
