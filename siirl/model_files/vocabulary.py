"""Whether two models mean the same by a token, and how many there are, by their files. No torch or
transformers."""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from siirl.config import Config
from siirl.config.roles import ROLES, role_model
from siirl.config.teacher import SAMPLED, WHOLE
from siirl.errors import ConfigError, DataError
from siirl.model_files.local_models import on_hub
from siirl.models.config_json import language_part
from siirl.spelling import GIB, gib_texts

LARGEST_GIB = 16
"""Of one teacher's distributions of a batch on a rank, in host memory."""


def check_same_words(cfg: Config, who: str, role: str = "teacher") -> None:
    """DataError unless a node's own model has the tokens of the policy; models that are not here pass.

    Embeddings may be padded differently, unless a teacher's distributions over all words are compared.
    """
    own, other = cfg.data.tokenizer or cfg.actor_rollout_ref.model.path, role_model(cfg, role).path
    teaches = ROLES[role].is_teacher
    if on_hub(own) or on_hub(other):
        return
    mine, its = _words(own), _words(other)
    if mine and its and mine != its:
        different = sorted(mine.items() ^ its.items())
        name, token = different[0]
        where = "the policy" if mine.get(name) == token else "the teacher" if teaches else "that model"
        raise DataError(
            f"model {who!r}: the tokenizer of {other} is not that of {own}: they have {len(its)} and "
            f"{len(mine)} tokens, and {len(different)} differ, e.g. {name!r} = {token} of {where}. "
            + (
                "A teacher says how likely the policy's tokens are"
                if teaches
                else "It reads the policy's tokens"
            )
            + ", so it needs the same ones. Choose one of its family"
            + (", or set teacher.tokenizer=own." if teaches else ".")
        )
    sizes = [_size(path) for path in (cfg.actor_rollout_ref.model.path, other)]
    if not teaches:
        if not (mine and its) and None not in sizes and sizes[1] < sizes[0]:
            raise DataError(
                f"model {who!r}: vocab_size is {sizes[1]} in {other} and {sizes[0]} in "
                f"{cfg.actor_rollout_ref.model.path}: it reads the policy's tokens, and does not have all of "
                "them. Choose a model of its family."
            )
        return
    compared = cfg.teacher.top_k != SAMPLED or not (mine and its)
    if compared and None not in sizes and sizes[0] != sizes[1]:
        raise DataError(
            f"model {who!r}: vocab_size is {sizes[1]} in {other} and {sizes[0]} in "
            f"{cfg.actor_rollout_ref.model.path}: with distill.top_k={cfg.teacher.top_k} teacher and policy "
            "are compared word by word. Resize one's embeddings, or choose another teacher; distill.top_k=0 "
            "needs the same tokenizer.json only."
        )


SLOW: dict[str, Any] = {"type": "none in tokenizer.json"}
"""The decoder of a tokenizer without one."""


def decoder_kinds(decoder: Mapping[str, Any] | None) -> set[str]:
    """What the decoder of a tokenizer.json does to tokens, but for joining them."""
    parts = [decoder, *decoder.get("decoders", ())] if decoder else []
    return {part["type"] for part in parts if part} - {"Sequence", "Fuse", "Strip"}


def why_no_pieces(kinds: Set[str]) -> str:
    """Why tokens are no parts of the text that they are decoded to, or an empty string."""
    if kinds == {"ByteLevel"} or kinds <= {"Replace", "ByteFallback", "Metaspace"}:
        return ""
    return (
        f"its tokens are no parts of a text ({', '.join(sorted(kinds))}), and teacher.tokenizer=own compares "
        "such parts. Byte-level BPE, SentencePiece's BPE and characters have them: take another model."
    )


def check_pieces(cfg: Config, who: str) -> None:
    """ConfigError unless the texts of the tokens of the policy, and of a teacher with another tokenizer, can
    be compared; models that are not here pass."""
    for path in (cfg.data.tokenizer or cfg.actor_rollout_ref.model.path, cfg.teacher.model.path):
        content = _read(Path(path).expanduser() / "tokenizer.json")
        kinds = decoder_kinds(content.get("decoder") if content or on_hub(path) else SLOW)
        if why := why_no_pieces(kinds):
            raise ConfigError(f"model {who!r}: the tokenizer of {path}: {why}")


def check_distributions(cfg: Config, who: str, rows: int) -> None:
    """ConfigError if a teacher's distributions over the whole vocabulary are too many numbers to be moved, or
    an engine is asked for more tokens than there are.

    rows: those of a batch that one rank has.
    """
    size, length = _size(cfg.teacher.model.path), cfg.actor_rollout_ref.rollout.response_length
    if size is not None and cfg.teacher.is_scored and cfg.teacher.top_k > size:
        raise ConfigError(
            f"model {who!r}: with distill.top_k={cfg.teacher.top_k} vLLM is asked for more tokens than the "
            f"{size} that there are. Set actor.distill.top_k={size} or less."
        )
    if cfg.teacher.top_k != WHOLE or size is None:
        return
    if cfg.teacher.is_aligned:
        size += _size(cfg.actor_rollout_ref.model.path) or 0
    whole, few = (rows * length * number / GIB for number in (4 * size, 12 * 64))
    if whole > LARGEST_GIB:
        takes, most = gib_texts(whole, LARGEST_GIB)
        raise ConfigError(
            f"model {who!r}: with distill.top_k=-1 its log-probs of all {size:,} words, at {length:,} tokens "
            f"of {rows:,} rows, are {takes} GiB on each rank, which wait in host memory and move to the "
            f"policy; {most} GiB are the most. Set actor.distill.top_k=64 ({few:.1f} GiB); or fewer, "
            "shorter responses (data.train_batch_size, rollout.n, data.max_response_length), or more ranks."
        )


def _words(path: str) -> dict[str, int]:
    """Token -> id of a tokenizer.json, those that were added included; empty without one."""
    content = _read(Path(path).expanduser() / "tokenizer.json")
    words = content.get("model", {}).get("vocab") or {}
    known = words if isinstance(words, dict) else {entry[0]: index for index, entry in enumerate(words)}
    return dict(known) | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _size(path: str) -> int | None:
    return language_part(_read(Path(path).expanduser() / "config.json")).get("vocab_size")


def _read(path: Path) -> dict[str, Any]:
    """A JSON file; empty where there is none: who reads the model says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
