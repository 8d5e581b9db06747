"""An engine whose share of a device does not hold its weights is refused, with a fix that works."""

import json
import re
from pathlib import Path

import pytest

from siirl.cli import main

QWEN_32B = {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
}
QWEN_72B = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_405B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "vocab_size": 128256,
}
ROLLOUT = "actor_rollout_ref.rollout"


def command(folder: Path, sizes: dict, gpus: int, gib: float | None, *keys: str) -> list[str]:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
    common = {"num_key_value_heads": 8, "tie_word_embeddings": False, "max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(qwen | common | sizes))
    return [
        "check",
        "--elsewhere",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        "data.train_files=train.parquet",
        "data.val_files=val.parquet",
        "data.train_batch_size=1024",
        f"{ROLLOUT}.n=8",
        "trainer.device=cuda",
        f"trainer.nnodes={max(1, gpus // 8)}",
        f"trainer.n_gpus_per_node={min(gpus, 8)}",
        *([] if gib is None else [f"trainer.device_memory_gib={gib}"]),
        *keys,
    ]


@pytest.mark.parametrize(
    ("sizes", "gpus", "gib", "tensor", "weights"),
    [(QWEN_32B, 32, 80, 1, 61), (QWEN_72B, 64, 80, 1, 135), (LLAMA_405B, 256, 141, 8, 94)],
    ids=["32B", "72B", "405B"],
)
def test_weights_beyond_the_share_are_refused_and_the_advice_is_accepted(
    sizes, gpus, gib, tensor, weights, tmp_path, capsys
):
    keys = [f"{ROLLOUT}.tensor_model_parallel_size={tensor}", f"{ROLLOUT}.gpu_memory_utilization=0.6"]
    assert main(command(tmp_path, sizes, gpus, gib, *keys)) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "does not start" in text]
    taken = re.search(r"takes ([\d.]+) for its weights", line)
    assert taken and float(taken[1]) == pytest.approx(weights, rel=0.03)
    advice = re.findall(r"actor_rollout_ref\S+=\S+", line.rpartition("Set ")[2].rstrip("."))
    changed = [key for key in keys if key.partition("=")[0] not in {one.partition("=")[0] for one in advice}]
    assert main(command(tmp_path, sizes, gpus, gib, *changed, *advice)) == 0, capsys.readouterr().err


def test_where_no_engine_of_a_machine_holds_the_weights_no_key_is_advised(tmp_path, capsys):
    keys = [f"{ROLLOUT}.tensor_model_parallel_size=8", f"{ROLLOUT}.gpu_memory_utilization=0.6"]
    assert main(command(tmp_path, LLAMA_405B, 256, 80, *keys)) == 2
    text = capsys.readouterr().err
    assert "does not start" in text and "No engine on the GPUs of one machine holds it" in text


@pytest.mark.parametrize(("strategy", "engine"), [("fsdp", "hf"), ("fsdp", "vllm"), ("megatron", "vllm")])
def test_a_model_on_devices_that_cannot_train_it_is_refused_with_numbers_and_keys(
    tmp_path, capsys, strategy, engine
):
    for gib in (80, None):  # None: on a device that nobody told the size of
        own = [
            f"{ROLLOUT}.name={engine}",
            f"actor_rollout_ref.actor.strategy={strategy}",
            "data.train_batch_size=512",
        ]
        asked = command(tmp_path, QWEN_72B, 1, gib, *own)
        assert main(asked) == 2
        told = re.search(r"does not fit (80|288) GiB: \d{4} GiB in \w+(.*)", capsys.readouterr().err)
        assert told
        keys = re.findall(r"[\w.]+=[\w.]+\b", told[2].rpartition("With ")[2])
        assert any(key.startswith("trainer.n_gpus_per_node=") for key in keys), told[2]
        names = {key.partition("=")[0] for key in keys}
        asked = [key for key in asked if key.partition("=")[0] not in names]
        code = main([*asked, *keys, *re.findall(r"[\w.]+=[\w.]+\b", told[2].partition("Even with ")[2])])
        assert "does not fit" not in capsys.readouterr().err and code == 0, keys


def test_the_plan_says_how_many_rows_the_cache_of_an_engine_holds(tmp_path, capsys):
    keys = [f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.tensor_model_parallel_size=4"]
    asked = command(tmp_path, QWEN_32B, 32, 80, *keys)
    assert main(["plan", *asked[2:]]) == 0
    (line,) = [
        text for text in capsys.readouterr().out.splitlines() if "KV cache" in text and "rows of" in text
    ]
    rows = re.search(r"weights ([\d.]+), KV cache ([\d.]+) for (\d+) rows of (\d+) tokens", line)
    assert rows, line
    weights, cache, count, tokens = map(float, rows.groups())
    each = 64 * 2 * 2 * 128 * tokens * 2 / 2**30  # layers, keys and values, 2 of 8 heads a rank, bf16
    assert weights == pytest.approx(15.3, rel=0.02)
    assert count == pytest.approx(cache / each, abs=2)
