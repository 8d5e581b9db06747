"""Conversations as a reward model reads them: in its own tokens, by its own chat template."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.chat import Prompt, as_messages, read_tokenizer
from siirl.data.rows import make_rows, objects
from siirl.data.said import raw_texts
from siirl.dialect.dialect import Dialect, dialect_of
from siirl.errors import DataError
from siirl.model_files.directory import has_tokenizer_files, model_positions

FIX = "Set reward_model.model.rm_tokenizer to the directory of the reward model's tokenizer"


class ConversationEncoder:
    """Turns rows of prompts and responses into rows whose prompt is the whole conversation.

    Where policy and reward model have the same tokenizer and chat template, the tokens of the rows are taken
    as they are; otherwise prompt and response are rendered by the reward model's template and tokenised anew.
    reward_model.model.rm_tokenizer names another tokenizer than that of model.path, and always renders.
    DataError without a chat template to render by.
    """

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, dialect: Dialect | None = None):
        """dialect: of the policy whose rows are read, where it is known already."""
        model = cfg.reward_model.model
        self._policy, self._dialect = tokenizer, dialect or dialect_of(cfg, tokenizer)
        self._own: PreTrainedTokenizerBase | None = None
        if model.rm_tokenizer or has_tokenizer_files(model.path):
            own = reward_tokenizer(cfg)
            if model.rm_tokenizer or not same_tokens(own, tokenizer):
                self._own = own
        self._max_length = cfg.reward_model.max_length or model_positions(model)

    @property
    def renders(self) -> bool:
        """Whether conversations are rendered and tokenised anew."""
        return self._own is not None

    def encode(self, rows: TensorDict) -> tuple[TensorDict, int]:
        """(rows for the engine, number of conversations whose beginning was cut to reward_model.max_length).

        A row's prompt is the conversation, its response one token that nothing reads: what a score head says
        of the state before it is the score of the whole. No communication.
        """
        conversations = self._rendered(rows) if self._own is not None else _tokens_of(rows)
        limit = self._max_length
        num_cut = sum(limit is not None and len(ids) > limit for ids in conversations)
        kept = [ids[-limit:] if limit is not None else ids for ids in conversations]
        ones = torch.ones(len(rows), 1, dtype=torch.int64)
        encoded = make_rows(
            {
                "prompt_ids": kept,
                "prompt_length": [len(ids) for ids in kept],
                "response_ids": 0 * ones,
                "response_length": ones[:, 0],
                "response_mask": ones.bool(),
            }
        )
        return encoded, num_cut

    def _rendered(self, rows: TensorDict) -> list[list[int]]:
        assert self._own is not None
        lengths = rows["response_length"].tolist()
        ids = [row[:length] for row, length in zip(rows["response_ids"].tolist(), lengths, strict=True)]
        texts = raw_texts(self._dialect, self._policy, ids)
        return render(self._own, objects(rows, "raw_prompt"), texts)


def reward_tokenizer(cfg: Config) -> PreTrainedTokenizerBase:
    """The tokenizer of the reward model, or of the judge. DataError if there is none."""
    model = cfg.reward_model.model
    return read_tokenizer(model.rm_tokenizer or model.path, model.trust_remote_code, FIX)


def render(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], responses: Sequence[str]
) -> list[list[int]]:
    """Token ids of each conversation, its response the last message, in one batched call.

    A tokenizer without a chat template takes plain prompts, which the response continues. DataError for chat
    messages without a template.
    """
    if not prompts:
        return []
    if tokenizer.chat_template:
        chats = [
            [*as_messages(prompt), {"role": "assistant", "content": response}]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        texts = tokenizer.apply_chat_template(chats, tokenize=False)
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise DataError(
            f"the prompts are chat messages, but the reward model's tokenizer {tokenizer.name_or_path} has "
            f"no chat template to render them by. {FIX}, with a chat template."
        )
    return tokenizer([prompt + response for prompt, response in zip(prompts, responses, strict=True)])[
        "input_ids"
    ]


def same_tokens(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers make the same tokens of a conversation: equal vocabulary and chat template."""
    return one.get_vocab() == other.get_vocab() and one.chat_template == other.chat_template


def _tokens_of(rows: TensorDict) -> list[list[int]]:
    columns = (
        rows[name].tolist() for name in ("prompt_ids", "prompt_length", "response_ids", "response_length")
    )
    return [
        prompt[len(prompt) - num_prompt :] + response[:num]
        for prompt, num_prompt, response, num in zip(*columns, strict=True)
    ]
