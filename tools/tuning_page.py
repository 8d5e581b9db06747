"""The outputs that docs/tuning.md shows: of one job, by the commands that the page names.

`python tools/tuning_page.py` runs them, without a GPU, and writes the page.
"""

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from siirl.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "tuning.md"
MODEL = "actor_rollout_ref.model.path"
SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
"""Of Qwen3-1.7B: the commands read no more of a model."""
JOB = [
    *("algorithm.adv_estimator=grpo", "data.train_files=train.jsonl", "data.val_files=val.jsonl"),
    *("data.train_batch_size=128", "data.max_prompt_length=256", "data.max_response_length=1024"),
    *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=64"),
    *("trainer.n_gpus_per_node=4", "trainer.device=cuda", "trainer.device_memory_gib=139.8"),
]
MEGATRON = [
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
]
LAYOUTS = 2
"""So many of those that the search prints are shown."""


def chosen(printed: str) -> str:
    """The part of a plan that says what was chosen."""
    found = re.search(r"^chosen for .*?(?=\n\n|\nmemory per rank)", printed, re.MULTILINE | re.DOTALL)
    assert found, printed
    return found[0]


def first_layouts(printed: str) -> str:
    """The search's first lines, up to some layouts."""
    return re.split(rf"\n{LAYOUTS + 1}\. ", printed)[0] + "\n..."


OUTPUTS: dict[str, tuple[list[str], list[str], Callable[[str], str]]] = {
    "explain": (["plan", "--explain", "--device", "h200"], [], str),
    "chosen": (["plan"], [], chosen),
    "search": (["plan", "--search", "--device", "h200"], MEGATRON, first_layouts),
}
"""Name on the page -> the command, keys besides those of the job, and what is shown of its output."""


def run(command: list[str]) -> str:
    """What a command prints; AssertionError if it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(command)
    assert code == 0, (command, code, out.getvalue())
    return out.getvalue().strip("\n")


def with_outputs(text: str) -> str:
    """The page with what its commands print now."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        for name, (command, keys, shown) in OUTPUTS.items():
            output = shown(run([*command, f"{MODEL}={folder}", *JOB, *keys]))
            assert folder not in output
            told = " ".join(["$ siirl", *command, *keys, "..."])
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            head, found, rest = text.partition(begin)
            assert found and end in rest, f"{PAGE} has no {begin} and {end}"
            text = f"{head}{begin}\n\n```\n{told}\n{output}\n```\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_outputs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
