"""One block of benchmarks/grpo_cpu.py on TRL: train, and write how long each step took and what it sampled.

Run as a process of its own: python benchmarks/grpo_cpu_trl.py settings.json result.json
"""

import itertools
import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from grpo_cpu_reward import compute_score
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Times at which steps ended, in seconds of one clock."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def grpo_config(settings: dict, out: str) -> GRPOConfig:
    """TRL's defaults where it has the same ones as siirl; what differs is set to what siirl runs."""
    rows = settings["prompts"] * settings["samples"]
    micro_rows = settings["trl_micro_rows"]
    return GRPOConfig(
        output_dir=out,
        use_cpu=True,
        bf16=False,
        torch_compile=settings["compiled"],
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=rows // micro_rows,
        num_generations=settings["samples"],
        max_completion_length=settings["response_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_steps=settings["steps"],
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    num_tokens: list[int] = []

    def reward(prompts, completions, completion_ids, data_source, ground_truth, extra_info, **_):
        num_tokens.append(sum(map(len, completion_ids)))
        texts = [messages[0]["content"] for messages in completions]
        columns = zip(data_source, texts, ground_truth, extra_info, strict=True)
        return [compute_score(*sample) for sample in columns]

    rows = Dataset.from_parquet(settings["train_file"])
    rows = rows.map(lambda row: {"ground_truth": row["reward_model"]["ground_truth"]})
    clock = Clock()
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=grpo_config(settings, settings["out"]),
        train_dataset=rows.remove_columns(["reward_model", "ability"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    result = {
        "step_s": [end - start for start, end in itertools.pairwise(clock.ends)],
        "tokens": num_tokens[1:],
        "reward": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry][1:],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
