"""Tokenizers and prompts: chat messages or plain text to token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from siirl.config import Config
from siirl.errors import DataError
from siirl.model_files.directory import check_tokenizer_files

Messages = list[dict[str, Any]]
Prompt = str | Messages


def load_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of data.tokenizer, or else of actor_rollout_ref.model.path. Any rank; no communication.

    DataError if there is none. A tokenizer without a pad token pads with its end-of-sequence token.
    """
    model = cfg.actor_rollout_ref.model
    keys = "Check actor_rollout_ref.model.path, or set data.tokenizer"
    return read_tokenizer(str(cfg.data.tokenizer or model.path), model.trust_remote_code, keys)


def read_tokenizer(name: str, trust_remote_code: bool, fix: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or of a name on the hub. DataError, which ends in `fix`, without one."""
    source = Path(name).expanduser()
    if source.is_dir():
        name = str(source)
        check_tokenizer_files(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        where = "" if source.is_dir() else "it is no directory here, and as a name on a hub: "
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise DataError(f"no tokenizer can be loaded from {name}: {where}{why}. {fix}.") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def as_messages(prompt: Prompt) -> Messages:
    """The prompt as chat messages; plain text is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], template_kwargs: dict[str, Any]
) -> list[list[int]]:
    """Token ids of each prompt, in one batched call.

    Chat messages go through the tokenizer's chat template, with the generation prompt added;
    template_kwargs are handed to it (e.g. enable_thinking). A plain string is a text to continue: no
    template is applied to it, and the tokenizer adds the special tokens that it adds to any text. DataError
    for messages without a template, or that it refuses.
    """
    chats = [index for index, prompt in enumerate(prompts) if not isinstance(prompt, str)]
    if chats and not tokenizer.chat_template:
        raise DataError(
            "the prompts are chat messages, but the tokenizer of "
            f"{tokenizer.name_or_path} has no chat template. "
            "Use a chat model's tokenizer (data.tokenizer), or write the prompts as plain strings."
        )
    ids: list[list[int]] = [[] for _ in prompts]
    texts = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
    if chats:
        try:
            rendered = tokenizer.apply_chat_template(
                [prompts[i] for i in chats], tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except (TemplateError, TypeError) as error:
            kinds = {tuple(message["role"] for message in prompts[i]) for i in chats}
            roles = "; ".join(", ".join(kind) for kind in sorted(kinds)[:5])
            raise DataError(
                f"the chat template of {tokenizer.name_or_path} refuses a prompt: {error}. The prompts have "
                f"the roles {roles}. Write them with roles that it takes, or give the tokenizer another one."
            ) from error
        # the template has written the special tokens itself
        _place(ids, chats, tokenizer(rendered, add_special_tokens=False)["input_ids"])
    if texts:
        _place(ids, texts, tokenizer([prompts[i] for i in texts])["input_ids"])
    return ids


def _place(out: list[list[int]], where: list[int], values: list[list[int]]) -> None:
    for index, value in zip(where, values, strict=True):
        out[index] = value
