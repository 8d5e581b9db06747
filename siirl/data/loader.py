"""The prompts of each step: a seeded order, cut into global batches, of which a rank reads its shard only."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.config import Config
from siirl.config.batch import batch_of
from siirl.data.curriculum import Curriculum, make_curriculum
from siirl.data.dataset import PromptDataset
from siirl.data.mixture import Mixture, Share, parse_shares
from siirl.data.rows import make_rows
from siirl.errors import DataError
from siirl.types import IMAGE_FIELDS, LOADED_FIELDS, PROMPT_FIELDS


class PromptLoader:
    """Global batches of prompts, epoch after epoch without end; `next_batch` gives the rows of one shard.

    The global batch of a step depends on (dataset, batch_size, seed, shuffle, curriculum, mixture) alone.
    Shard s of S holds those with the places floor(s*N/S) to floor((s+1)*N/S) - 1 in the assignment_order, so
    N need not divide, and a shard may hold none: it has about as many of each mini-batch as any other. An
    incomplete last batch is left out when drop_last, else given as it is. Ranks that hold the same shard
    build equal loaders and get equal rows. No communication.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int | None,
        shard: int = 0,
        num_shards: int = 1,
        *,
        mini_batch_size: int | None = None,
        seed: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        curriculum: Curriculum | None = None,
        mixture: Sequence[Share] = (),
        fields: tuple[str, ...] = PROMPT_FIELDS,
    ):
        assert 0 <= shard < num_shards, f"shard {shard} of {num_shards}"
        self.dataset = dataset
        self.batch_size = batch_size or len(dataset)
        self.mini_batch_size = mini_batch_size or self.batch_size
        self.shard, self.num_shards = shard, num_shards
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.fields = fields
        full, rest = divmod(len(dataset), self.batch_size)
        self.steps_per_epoch = full if drop_last else full + bool(rest)
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the dataset has {len(dataset)} prompts (after filtering), data.train_batch_size is "
                f"{self.batch_size}: there is not one full batch. Lower the batch size or add data."
            )
        self._curriculum = curriculum
        self._mixture = None
        if mixture:
            self._mixture = Mixture(mixture, dataset.sources(), self.batch_size, seed, shuffle)
        self._epoch = 0
        self.epochs_given: list[int] = []
        """Of each batch of the last call the epoch, from 0."""
        self._position = 0  # prompts of this epoch that were given out, over all shards
        self._order = self._make_order()

    def next_batch(self, count: int = 1) -> TensorDict:
        """This shard's rows of the next global batch (`fields`; row_id counts over all shards).

        count: so many batches instead, maybe none; the row_id of the second go on after those of the first.
        """
        rows, ids = [], []
        self.epochs_given = []
        for number in range(count):
            batch = self._next()
            self.epochs_given.append(self._epoch)
            first, last = (len(batch) * s // self.num_shards for s in (self.shard, self.shard + 1))
            mine = np.sort(assignment_order(len(batch), self.mini_batch_size)[first:last])
            rows += self.dataset.rows(batch[mine])
            ids += (number * self.batch_size + mine).tolist()
        columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in self.fields}
        columns["row_id"] = columns["group_id"] = ids
        return make_rows(columns)

    def _next(self) -> np.ndarray:
        """The prompts of the next global batch."""
        left = len(self.dataset) - self._position
        if left == 0 or (self.drop_last and left < self.batch_size):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._make_order()
        if self._mixture is not None:
            batch = self._mixture.take(self.batch_size)
        else:
            batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in global prompts: fits any number of shards and any batch size."""
        state = {"epoch": self._epoch, "position": self._position, "num_prompts": len(self.dataset)}
        return state if self._mixture is None else state | {"mixture": self._mixture.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch before state_dict. DataError if the dataset has changed."""
        if state["num_prompts"] != len(self.dataset):
            raise DataError(
                f"the checkpoint was made with {state['num_prompts']} prompts, the dataset has "
                f"{len(self.dataset)}: the position in it has no meaning. Resume with the same data.* keys "
                "and files, or start over with trainer.resume_mode=disable."
            )
        self._epoch, self._position = state["epoch"], state["position"]
        if self._mixture is not None:
            self._mixture.load_state(state.get("mixture", {}))
        self._order = self._make_order()

    def _make_order(self) -> np.ndarray:
        if self._curriculum is not None:
            return self._curriculum.order(self.seed, self._epoch, self.batch_size)
        if not self.shuffle:
            return np.arange(len(self.dataset))
        return np.random.default_rng([self.seed, self._epoch]).permutation(len(self.dataset))


def assignment_order(num_prompts: int, mini_batch_size: int) -> np.ndarray:
    """Prompts of a batch in the order in which shards take them: the first of each mini-batch, the second ...

    So every shard has rows of each mini-batch, and none has to move for an optimizer step. Mini-batches are
    runs of the batch whatever the shards.
    """
    place = np.arange(num_prompts)
    return np.lexsort((place // mini_batch_size, place % mini_batch_size))


def loaded_fields(cfg: Config) -> tuple[str, ...]:
    """The fields that a run needs of its dataset."""
    needless = {
        "given_responses": not cfg.actor_rollout_ref.rollout.gives_data,
        **dict.fromkeys(IMAGE_FIELDS, not cfg.data.has_images),
    }
    return tuple(name for name in LOADED_FIELDS if not needless.get(name))


def make_loader(
    cfg: Config,
    split: Literal["train", "val"],
    tokenizer: PreTrainedTokenizerBase,
    shard: int = 0,
    num_shards: int = 1,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptLoader:
    """The loader of a run: training shuffles and drops an incomplete batch, validation does neither.

    tools: those that the prompts tell the model of.
    """
    dataset = PromptDataset.from_config(cfg, split, tokenizer, tools)
    if split == "val":
        return PromptLoader(
            *(dataset, cfg.data.val_batch_size, shard, num_shards),
            shuffle=False,
            drop_last=False,
            fields=loaded_fields(cfg),
        )
    batch = batch_of(cfg)
    return PromptLoader(
        dataset,
        batch.generated,
        shard,
        num_shards,
        mini_batch_size=None if batch.in_rounds else batch.mini_prompts,
        seed=cfg.data.seed,
        shuffle=cfg.data.shuffle,
        curriculum=make_curriculum(cfg.data, dataset.extra_infos),
        mixture=parse_shares(cfg.data.mixture),
        fields=loaded_fields(cfg),
    )
