"""Conversations as a reward model reads them: in its own tokens, by its own chat template."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.data.chat import Prompt, as_messages, read_tokenizer
from siirl.data.image_reader import ImageReader
from siirl.data.images import with_image_parts
from siirl.data.rows import make_rows, objects, prompt_images, seen_of
from siirl.data.said import raw_texts
from siirl.data.seen import NO_IMAGES, Seen
from siirl.dialect.dialect import Dialect, dialect_of
from siirl.errors import DataError
from siirl.model_files.directory import has_tokenizer_files, model_positions

FIX = "Set reward_model.model.rm_tokenizer to the directory of the reward model's tokenizer"


class ConversationEncoder:
    """Turns rows of prompts and responses into rows whose prompt is the whole conversation.

    Where policy and reward model have the same tokenizer and chat template, the tokens of the rows are taken
    as they are; otherwise prompt and response are rendered by the reward model's template and tokenised anew.
    Images have the tokens that the reward model's processor gives them.
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
        self._images = ImageReader.from_config(cfg, model)
        self._policy_images = ImageReader.from_config(cfg)
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
        conversations = self._rendered(rows) if self._own is not None else self._as_they_are(rows)
        limit = self._max_length
        num_cut = sum(limit is not None and len(ids) > limit for ids, _ in conversations)
        kept = [self._cut(*one) for one in conversations]
        ones = torch.ones(len(rows), 1, dtype=torch.int64)
        columns = {
            "prompt_ids": [ids for ids, _ in kept],
            "prompt_length": [len(ids) for ids, _ in kept],
            "response_ids": 0 * ones,
            "response_length": ones[:, 0],
            "response_mask": ones.bool(),
        }
        if self._images is not None:
            columns["images"] = [list(seen.images) for _, seen in kept]
            columns["image_starts"] = [list(seen.starts) for _, seen in kept]
        return make_rows(columns), num_cut

    def _as_they_are(self, rows: TensorDict) -> list[tuple[list[int], Seen]]:
        both = zip(_tokens_of(rows), seen_of(rows), strict=True)
        if self._images is None or self._policy_images is None:
            return list(both)
        return [self._images.resized(ids, seen, self._policy_images.num_tokens) for ids, seen in both]

    def _rendered(self, rows: TensorDict) -> list[tuple[list[int], Seen]]:
        assert self._own is not None
        lengths = rows["response_length"].tolist()
        ids = [row[:length] for row, length in zip(rows["response_ids"].tolist(), lengths, strict=True)]
        texts = raw_texts(self._dialect, self._policy, ids)
        prompts = objects(rows, "raw_prompt")
        if self._images is None:
            return [(of_row, NO_IMAGES) for of_row in render(self._own, prompts, texts)]
        seen, where = [of_row.images for of_row in seen_of(rows)], "a conversation for the reward model"
        if seen != prompt_images(rows):
            raise DataError(
                f"{where} has images between its turns, and that has another tokenizer or chat template than "
                "the policy: only images of prompts are rendered anew. Give one that has the policy's."
            )
        written = [
            with_image_parts(one, len(of_row), where) for one, of_row in zip(prompts, seen, strict=True)
        ]
        return [
            self._images.expand(of_row, images, where, said_behind=True)
            for of_row, images in zip(render(self._own, written, texts), seen, strict=True)
        ]

    def _cut(self, ids: list[int], seen: Seen) -> tuple[list[int], Seen]:
        """The last tokens of a conversation, without the rest of an image that is cut."""
        first = max(0, len(ids) - (self._max_length or len(ids)))
        for image, start in zip(seen.images, seen.starts, strict=True):
            end = start + self._images.num_tokens(image)
            first = min(end, len(ids) - 1) if start < first < end else first
        return ids[first:], seen.since(first)


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
