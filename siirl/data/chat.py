"""Tokenizers and prompts: chat messages or plain text to token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from siirl.config import Config
from siirl.dialect.template import ChatTemplate, TemplateRefused, chosen_template
from siirl.errors import DataError
from siirl.model_files.directory import check_tokenizer_files
from siirl.observe.printable import encodable

Messages = list[dict[str, Any]]
Prompt = str | Messages


def load_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of data.tokenizer, or else of actor_rollout_ref.model.path. Any rank; no communication.

    DataError if there is none. A tokenizer without a pad token pads with its end-of-sequence token.
    """
    model = cfg.actor_rollout_ref.model
    keys, name = "Check actor_rollout_ref.model.path, or set data.tokenizer", cfg.data.tokenizer or model.path
    tokenizer = read_tokenizer(str(name), model.trust_remote_code, keys, cfg.data.tokenizer_kwargs)
    tokenizer.chat_template = chosen_template(tokenizer.chat_template, cfg, str(name))
    return tokenizer


def read_tokenizer(
    name: str, trust_remote_code: bool, fix: str, options: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or of a name on the hub. DataError, which ends in `fix`, without one.

    options: further arguments with which it is loaded.
    """
    source = Path(name).expanduser()
    if source.is_dir():
        name = str(source)
        check_tokenizer_files(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        where = "" if source.is_dir() else "it is no directory here, and as a name on a hub: "
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if not (source / "tokenizer.json").is_file() and (source / "tokenizer.model").is_file():
            why += (
                "; it is a tokenizer.model alone, which transformers reads with sentencepiece and protobuf: "
                "install them, or save a tokenizer.json where they are"
            )
        raise DataError(f"no tokenizer can be loaded from {name}: {where}{why}. {fix}.") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def as_messages(prompt: Prompt) -> Messages:
    """The prompt as chat messages; plain text is one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[int]]:
    """Token ids of each prompt, in one batched call.

    Chat messages go through the tokenizer's chat template, up to where the model goes on: behind the
    generation prompt, or behind a last message of the assistant, which it continues. template_kwargs are
    handed to it (e.g. enable_thinking), and tools that the model may call. A plain string is a text to
    continue: no template is applied to it, and the tokenizer adds the special tokens that it adds to the
    beginning of any text, unless it begins with them. DataError for messages without a template, or that it
    refuses.
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
        template = ChatTemplate(tokenizer, template_kwargs)
        try:
            rendered = [template.prompt(prompts[index], tools) for index in chats]  # type: ignore[arg-type]
        except TemplateRefused as error:
            kinds = {tuple(message["role"] for message in prompts[i]) for i in chats}  # type: ignore[index]
            roles = "; ".join(", ".join(kind) for kind in sorted(kinds)[:5])
            raise DataError(
                f"the chat template of {tokenizer.name_or_path} refuses a prompt: {error}. The prompts have "
                f"the roles {roles}. Write them with roles that it takes, or give the tokenizer another one."
            ) from error
        # the template has written the special tokens itself
        texts_of = [encodable(text) for text in rendered]
        _place(ids, chats, tokenizer(texts_of, add_special_tokens=False)["input_ids"])
    if texts:
        whole = tokenizer([encodable(str(prompts[i])) for i in texts])["input_ids"]
        _place(ids, texts, [to_continue(tokenizer, prompts[i], x) for i, x in zip(texts, whole, strict=True)])
    return ids


def to_continue(tokenizer: Any, text: Any, ids: list[int]) -> list[int]:
    """The tokens of a text to continue: one beginning of text, and no end that is not its own."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:  # a chat that was rendered already
        ids = ids[1:]
    ended = text.rstrip().endswith(str(tokenizer.eos_token))
    if eos is not None and ids[-1:] == [eos] and (not ended or ids[-2:] == [eos, eos]):
        ids = ids[:-1]
    return ids


def _place(out: list[list[int]], where: list[int], values: list[list[int]]) -> None:
    for index, value in zip(where, values, strict=True):
        out[index] = value
