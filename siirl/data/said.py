"""What models said in rows: the last turn of each, taken apart."""

import json
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.data.rows import objects
from siirl.dialect.dialect import Dialect
from siirl.dialect.parts import Said, opens_reasoning, read_turn
from siirl.dialect.template import row_options


def said_in(rows: TensorDict, tokenizer: PreTrainedTokenizerBase, dialect: Dialect) -> list[Said]:
    """The response of each of [B] rows; of agents that talk, their last turn in it.

    Reads response_ids, response_length, and where there are such raw_prompt, turn_id and extra_info.
    """
    lengths = rows["response_length"].tolist()
    ids = [row[:length] for row, length in zip(rows["response_ids"].tolist(), lengths, strict=True)]
    prompts = objects(rows, "raw_prompt") if "raw_prompt" in rows.keys() else [None] * len(ids)
    dialects = _of_rows(dialect, rows)
    if "turn_id" in rows.keys():
        turn_ids = rows["turn_id"].tolist()
        prompts = [None if _turns(turns) > 1 else x for x, turns in zip(prompts, turn_ids, strict=True)]
        ids = [_last_turn(row, turns) for row, turns in zip(ids, turn_ids, strict=True)]
    texts = raw_texts(dialect, tokenizer, ids)
    columns = zip(dialects, texts, prompts, strict=True)
    return [read_turn(of_row, text, _opened(of_row, prompt)) for of_row, text, prompt in columns]


def _of_rows(dialect: Dialect, rows: TensorDict) -> list[Dialect]:
    """How the model speaks in each row, whose template may have arguments of its own."""
    infos = objects(rows, "extra_info") if "extra_info" in rows.keys() else [None] * len(rows)
    options = [row_options(info) for info in infos]
    keys = [json.dumps(one, sort_keys=True, default=str) for one in options]
    known = {key: dialect.of_row(one) for key, one in dict(zip(keys, options, strict=True)).items()}
    return [known[key] for key in keys]


def raw_texts(
    dialect: Dialect, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[list[int]]
) -> list[str]:
    """The text of each response with its special tokens, without the stop token that ended it."""
    ids = [row if dialect.unsaid_end(row) is None else row[:-1] for row in token_ids]
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        # in parallel and without the GIL; the tokenizer's own batch_decode does one row after another
        return tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)
    return tokenizer.batch_decode(ids, skip_special_tokens=False)


def _opened(dialect: Dialect, prompt: Any) -> bool | None:
    """Whether a prompt opens the reasoning: by its own text, if it ends in the answer, else by the template.
    None: perhaps."""
    if isinstance(prompt, str):
        return opens_reasoning(dialect, prompt)
    if not prompt or prompt[-1].get("role") != "assistant":
        return dialect.opens
    return opens_reasoning(dialect, str(prompt[-1].get("content") or "")) is not False


def _turns(turn_ids: list[int]) -> int:
    return len({turn for turn in turn_ids if turn >= 0})


def _last_turn(response_ids: list[int], turn_ids: list[int]) -> list[int]:
    """The tokens of the last turn, of response_ids without padding and turn_ids with or without."""
    last = max(turn_ids)
    return [token for token, turn in zip(response_ids, turn_ids, strict=False) if turn == last]
