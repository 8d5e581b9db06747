"""What every process of a run does for the first time, done once before forks: seconds of each are caches.

Kernels that are set up at their first call, patterns that transformers compiles, the preset that hydra
composes, fonts of the reward curve. Random numbers are as before, and there is no thread.
"""

import json
import tempfile
import warnings
from pathlib import Path

PROMPT = [2, 3, 4, 5, 6, 7, 8, 9]


def use_everything_once() -> None:
    """Train a tiny model for a step, sample of it, read a configuration, draw a curve."""
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        _train_and_sample(Path(folder))
        _read_and_draw(Path(folder))


def _train_and_sample(folder: Path) -> None:
    import torch
    from fixtures_tiny import make_tiny_model_dir
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    from siirl.engines.weights.target import tensor_names

    disable_progress_bar()  # they are drawn by a thread
    with torch.random.fork_rng(devices=[]):
        path = str(make_tiny_model_dir(folder / "model"))
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False)
        model = AutoModelForCausalLM.from_pretrained(path)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for rows in (1, 4):
            ids = torch.tensor([PROMPT] * rows)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        tensor_names(model)
        with torch.no_grad():
            read = model(input_ids=ids, use_cache=True)
            model(input_ids=ids[:, -1:], past_key_values=read.past_key_values)
            torch.multinomial(read.logits[:, -1].softmax(-1), 1)
    enable_progress_bar()


def _read_and_draw(folder: Path) -> None:
    from siirl.config.load import load_config
    from siirl.config.tree import print_config
    from siirl.launch.run_record import packages
    from siirl.observe.curve import reward_curve_png

    print_config(load_config([]))
    packages()
    steps = [{"step": step, "reward/total": float(step), "val/reward": 0.5} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert reward_curve_png(folder / "metrics.jsonl", folder / "curve.png") is not None
