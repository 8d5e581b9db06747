"""Tiny models, tokenizers and datasets made from scratch, so that no test needs a download."""

import json
import random
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = (
    "0123456789 +-*/=.,?:#\n()abcdefghijklmnopqrstuvwxyz$\\{}%!<>'_^[]|ABCDEFGHIJKLMNOPQRSTUVWXYZ&;\"@~`\t"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Family = Literal["qwen3", "qwen2", "llama", "qwen3_moe", "mixtral", "gpt_oss"]
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def make_tiny_tokenizer(path: str | Path, vocab: int = 64, chat_template: bool = True) -> Path:
    """Write a character-level tokenizer of exactly `vocab` ids to `path`; returns it.

    Ids 0 to 5 are SPECIAL_TOKENS (pad 0, eos 1, unk 2); then CHARACTERS, cut or filled up with "<xN>" tokens.
    The tokens of a one-turn chat prompt are <user> ... <eos> <assistant>.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert vocab >= len(SPECIAL_TOKENS) + 10, f"a vocabulary of {vocab} has no room for the digits"
    tokens = [*SPECIAL_TOKENS, *CHARACTERS][:vocab]
    tokens += [f"<x{index}>" for index in range(len(tokens), vocab)]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)
    if chat_template:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(path))
    return Path(path)


def make_tiny_model_dir(
    path: str | Path,
    family: Family = "qwen3",
    tie: bool = True,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    mlp: int = 64,
    experts: int = 4,
    max_positions: int = 512,
    init_std: float = 0.02,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: bool = True,
    weights: bool = True,
) -> Path:
    """Write a Hugging Face model directory with random weights and a tokenizer to `path`; returns it.

    Same arguments give the same bytes; the caller's RNG state is untouched. A larger init_std (say 0.2) makes
    log-probs less uniform, so that comparisons of two implementations see more. `weights` or `tokenizer`
    False leaves that part out, for tests of error messages.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "head_dim": head_dim or hidden // heads,
        "initializer_range": init_std,
        "dtype": dtype,
    }
    if family == "qwen3_moe":
        sizes |= {"num_experts": experts, "moe_intermediate_size": mlp // 2, "norm_topk_prob": True}
    if family in ("qwen3_moe", "mixtral"):
        sizes |= {"num_experts_per_tok": 2} | ({"num_local_experts": experts} if family == "mixtral" else {})
    if family == "gpt_oss":
        sizes |= {"num_experts_per_tok": 2, "num_local_experts": experts, "sliding_window": 8}
    config = AutoConfig.for_model(family, **sizes)
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(path)
    else:
        config.architectures = [ARCHITECTURES[family]]
        config.save_pretrained(path)
    if tokenizer:
        make_tiny_tokenizer(path, vocab)
    return path


def make_tiny_reward_model(path: str | Path, head_std: float = 0.5, **options: Any) -> Path:
    """Write a sequence classifier of one label with a tokenizer to `path`; returns it.

    options: those of make_tiny_model_dir; head_std: of the weights of its head.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    path = make_tiny_model_dir(path, **options)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.get("seed", 0))
        torch.nn.init.normal_(model.score.weight, std=head_std)
    model.save_pretrained(path)
    return path


def arithmetic_rows(
    n: int, seed: int = 0, task: Literal["max", "sum_mod10", "copy"] = "max", data_source: str = "arithmetic"
) -> list[dict[str, Any]]:
    """n rows in the verl/siiRL column layout: a question about two digits, answered by one digit."""
    draw = random.Random(f"{task}-{seed}")
    rows = []
    for index in range(n):
        a, b = draw.randrange(10), draw.randrange(10)
        question, answer = {
            "max": (f"max {a} {b}=", max(a, b)),
            "sum_mod10": (f"{a}+{b}=", (a + b) % 10),
            "copy": (f"{a}=", a),
        }[task]
        rows.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(answer)},
                "extra_info": {"split": "train", "index": index},
            }
        )
    return rows


def write_parquet(path: str | Path, rows: list[dict[str, Any]], row_group_size: int | None = None) -> Path:
    """Write rows to a parquet file; returns its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def make_arithmetic_parquet(
    path: str | Path,
    n: int,
    seed: int = 0,
    task: Literal["max", "sum_mod10", "copy"] = "max",
    data_source: str = "arithmetic",
) -> Path:
    """Write n arithmetic rows to `path` as parquet; returns it."""
    return write_parquet(path, arithmetic_rows(n, seed, task, data_source))


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model directory."""
    return json.loads((Path(path) / "config.json").read_text())
