"""Recorded rollouts: the rows of a step as files, written behind any rollout and read back in its place.

DIR/agent_A/step_N/ holds a part for each shard that made rows: a safetensors file with the tensor columns
and, as metadata, what the rows depend on; beside it a JSON-lines file with the object columns (what a reward
needs), for readers and other programs. Padding is not stored: a column of T or P positions is the real tokens
of all rows, one after another; their lengths are a column too. No pickle.
"""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from siirl.data.recorded_rollouts import describe_steps
from siirl.data.rows import DTYPES, objects, widened
from siirl.errors import DataError, UserError
from siirl.types import FIELDS, PROMPT_FIELDS, ROLLOUT_FIELDS

FORMAT = "2"
LENGTH_OF = {"P": "prompt_length", "T": "response_length"}
NEEDED = tuple(dict.fromkeys(("row_id", "group_id", "prompt_ids", "prompt_length", *ROLLOUT_FIELDS)))
"""The columns of a part that are read."""
OBJECTS = tuple(name for name in PROMPT_FIELDS if FIELDS[name].dtype == "object")
SAME_TOKENIZER = "Token ids would mean other texts. Use the model directory of the run that recorded them."
FIXES = {
    "format": "Record them again with this version of siirl.",
    "n": "Set actor_rollout_ref.rollout.n to what they have.",
    "temperature": "Log-probs are taken at it. Set actor_rollout_ref.rollout.temperature to what they have.",
    "vocabulary": SAME_TOKENIZER,
    "tokenizer": SAME_TOKENIZER,
}
"""What rows and the run that trains on them must have in common -> what to do if they do not."""


def conditions(tokenizer: PreTrainedTokenizerBase, n: int, temperature: float) -> dict[str, str]:
    """What the rows of a run depend on, besides prompts and weights: the keys of FIXES."""
    return {
        "format": FORMAT,
        "n": str(n),
        "temperature": f"{temperature:g}",
        "vocabulary": f"{len(tokenizer)} tokens",
        "tokenizer": _fingerprint(tokenizer),
    }


def record(folder: Path, rows: TensorDict, made_under: dict[str, str]) -> None:
    """Write this rank's rows into a step's folder, complete or not at all.

    rows: PROMPT_FIELDS as far as the run carries them, and ROLLOUT_FIELDS, in whole groups. Ranks that hold
    the same rows write the same file. DataError if it cannot be written.
    """
    if not len(rows):
        return
    first, last = int(rows["group_id"].min()), int(rows["group_id"].max())
    part = folder / f"prompts_{first}_to_{last}.safetensors"
    aside = folder / f".{part.stem}.{os.uname().nodename}.{os.getpid()}"
    tensors = {name: _flat(rows, name) for name in rows.keys() if isinstance(rows.get(name), Tensor)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_text(_json_lines(rows), encoding="utf-8")
        os.replace(aside, part.with_suffix(".jsonl"))
        save_file(tensors, aside, made_under)
        os.replace(aside, part)
    except (OSError, SafetensorError) as error:
        raise DataError(f"trainer.dump_rollouts_dir: {part} cannot be written: {error}.") from error


def recorded_rows(folder: Path, prompts: TensorDict, n: int, expected: dict[str, str]) -> dict[str, Tensor]:
    """ROLLOUT_FIELDS of n rows for each of `prompts`, in their order, padded to the longest: [B, T] and [B].

    Any rank asks for its own prompts, however many ranks recorded them. DataError if a prompt was not
    recorded, is another one, or was recorded under other conditions than `expected`.
    """
    wanted = prompts["group_id"]
    tables = [table for part in _parts(folder) if (table := _read(part, wanted, expected)) is not None]
    if not len(wanted):
        return {name: _empty(name) for name in ROLLOUT_FIELDS}
    rows = _concatenated(tables) if tables else {"group_id": torch.empty(0, dtype=torch.int64)}
    counts = torch.bincount(rows["group_id"], minlength=int(wanted.max()) + 1)[wanted]
    if bool((counts != n).any()):
        group = int(wanted[counts != n][0])
        raise DataError(
            f"{folder} has {int(counts[counts != n][0])} rows of prompt {group} of its step, not {n}: it was "
            "recorded with another data.train_batch_size, parts of it are missing (does each machine have a "
            "folder of its own?), or two runs recorded into it. Use the folder of one whole run."
        )
    place = {group: position for position, group in enumerate(wanted.tolist())}
    position_B = [place[group] for group in rows["group_id"].tolist()]
    order = torch.from_numpy(np.lexsort((rows["row_id"].numpy(), position_B)))
    rows = {name: column[order] for name, column in rows.items()}
    _check_prompts(rows, prompts, n, folder)
    width = int(rows["response_length"].max())
    return {
        name: rows[name][:, :width] if FIELDS[name].dims else rows[name].to(DTYPES[FIELDS[name].dtype])
        for name in ROLLOUT_FIELDS
    }


def _parts(folder: Path) -> list[Path]:
    """The parts of a step; DataError if it has none."""
    parts = sorted(folder.glob("*.safetensors"))
    if not parts:
        agent = int(folder.parent.name.removeprefix("agent_"))
        there = describe_steps(folder.parent.parent, agent)
        raise DataError(
            f"{folder} has no recorded rollouts; there is {there}. Record more with "
            "trainer.dump_rollouts_dir, or set trainer.total_training_steps to what is there."
        )
    return parts


def _read(part: Path, wanted: Tensor, expected: dict[str, str]) -> dict[str, Tensor] | None:
    """The padded columns of a part's rows of the `wanted` groups; None if it has none of them."""
    try:
        with safe_open(part, "pt") as file:
            metadata = file.metadata() or {}
            for key, value in expected.items():
                if metadata.get(key) != value:
                    raise DataError(
                        f"{part} was recorded with {key} {metadata.get(key)}, this run has {value}. "
                        f"{FIXES[key]}"
                    )
            mine = torch.isin(_column(file, "group_id"), wanted)
            if not bool(mine.any()):
                return None
            columns = {name: _column(file, name) for name in NEEDED}
        return {name: _padded(columns, name)[mine] for name in columns}
    except UserError:
        raise
    except Exception as error:  # the edge to files: safetensors and torch raise what they trip over
        raise DataError(
            f"{part} cannot be read: {type(error).__name__}: {error}. Record the step again."
        ) from error


def _column(file: Any, name: str) -> Tensor:
    """A column of an open part; ValueError if it is of another kind than `record` writes."""
    column, dtype = file.get_tensor(name), DTYPES[FIELDS[name].dtype]
    if column.dim() != 1 or column.is_floating_point() != dtype.is_floating_point:
        raise ValueError(f"{name} is {column.dtype} of {column.dim()} dimensions")
    return column


def _check_prompts(rows: dict[str, Tensor], prompts: TensorDict, n: int, folder: Path) -> None:
    """DataError unless the rows, n for each prompt and in their order, hold the same prompt tokens."""
    length_B = prompts["prompt_length"].repeat_interleave(n)
    width = max(rows["prompt_ids"].shape[1], prompts["prompt_ids"].shape[1])
    recorded_BP, loaded_BP = (
        torch.nn.functional.pad(ids, (width - ids.shape[1], 0))
        for ids in (rows["prompt_ids"], prompts["prompt_ids"].repeat_interleave(n, 0))
    )
    real_BP = torch.arange(width) >= width - length_B[:, None]
    same_B = (rows["prompt_length"] == length_B) & ((recorded_BP == loaded_BP) | ~real_BP).all(1)
    if not bool(same_B.all()):
        row = int((~same_B).nonzero()[0, 0])
        raise DataError(
            f"{folder}: prompt {int(rows['group_id'][row])} of the step was recorded with "
            f"{int(rows['prompt_length'][row])} tokens, and this run loads another one there, of "
            f"{int(length_B[row])}: the rows belong to other prompts. Set the data.* keys (files, seed, "
            "batch size, chat template) as in the run that recorded them."
        )


def _concatenated(tables: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tables below each other; columns of unequal width are padded as FIELDS says."""
    out = {}
    for name in tables[0]:
        columns = [table[name] for table in tables]
        if columns[0].dim() == 2:
            width = max(column.shape[1] for column in columns)
            columns = [widened(column, name, width) for column in columns]
        out[name] = torch.cat(columns)
    return out


def _real(width: int, length_B: Tensor, left: bool) -> Tensor:
    """Which positions of padded rows are real, bool [B, width]."""
    position = torch.arange(width)
    return position >= width - length_B[:, None] if left else position < length_B[:, None]


def _flat(rows: TensorDict, name: str) -> Tensor:
    """A column as it is stored: token ids as int32, padded rows without their padding."""
    column, spec = rows[name].cpu(), FIELDS.get(name)
    if spec is not None and spec.dims:
        length_B = rows[LENGTH_OF[spec.dims[0]]].cpu()
        column = column[_real(column.shape[1], length_B, spec.pad_side == "left")]
        column = column.int() if spec.dtype == "int64" else column
    return column.contiguous()


def _padded(columns: dict[str, Tensor], name: str) -> Tensor:
    """The inverse of _flat: [B] or, padded to the longest, [B, width]."""
    spec = FIELDS.get(name)
    if spec is None or not spec.dims:
        return columns[name]
    length_B = columns[LENGTH_OF[spec.dims[0]]]
    if bool((length_B < 0).any()) or int(length_B.sum()) != len(columns[name]):
        raise ValueError(f"{LENGTH_OF[spec.dims[0]]} does not say how long the {name} are")
    real = _real(int(length_B.max()), length_B, spec.pad_side == "left")
    padded = torch.full(real.shape, spec.pad_value, dtype=DTYPES[spec.dtype])
    padded[real] = columns[name].to(padded.dtype)
    return padded


def _empty(name: str) -> Tensor:
    spec = FIELDS[name]
    return torch.empty((0, 0) if spec.dims else 0, dtype=DTYPES[spec.dtype])


def _json_lines(rows: TensorDict) -> str:
    """row_id and the object columns of each row, a JSON object a line."""
    names = [name for name in OBJECTS if name in rows.keys()]
    columns = [rows["row_id"].tolist(), *(objects(rows, name) for name in names)]
    lines = [dict(zip(("row_id", *names), values, strict=True)) for values in zip(*columns, strict=True)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


@lru_cache(maxsize=8)
def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers that give every token the same id."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()
