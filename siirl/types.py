"""The nouns of siirl: fields of a batch, keys that name them, layouts that place their rows. No torch.

Legend for shapes, used everywhere: B rows on this rank, P prompt tokens, T response tokens, V vocabulary,
N packed tokens, D hidden size, K words at a token,
W experts that compute a token, of all layers. A batch is a TensorDict of batch size [B]; `object`
fields are NonTensorStacks of JSON.
"""

from dataclasses import dataclass
from typing import Literal

PadSide = Literal["left", "right"]
Dtype = Literal["int64", "int16", "int8", "float32", "bool", "object"]


@dataclass(frozen=True)
class FieldSpec:
    """A named column of a batch."""

    name: str
    dims: tuple[str, ...]
    """Trailing ones, beyond B."""
    dtype: Dtype
    doc: str
    """What it holds."""
    unit: str = ""
    pad_side: PadSide = "right"
    """Where rows are filled up."""
    pad_value: float = 0


def _fields(*specs: FieldSpec) -> dict[str, FieldSpec]:
    return {spec.name: spec for spec in specs}


FIELDS: dict[str, FieldSpec] = _fields(
    FieldSpec("row_id", (), "int64", "position of the row in the step's global batch, before any filtering"),
    FieldSpec(
        "group_id", (), "int64", "position of the prompt in the step's global batch; samples of it share it"
    ),
    FieldSpec("sample_index", (), "int64", "index of the prompt in the dataset, for messages"),
    FieldSpec("prompt_ids", ("P",), "int64", "prompt tokens, after the chat template", "token", "left"),
    FieldSpec("prompt_length", (), "int64", "number of real tokens in prompt_ids", "token"),
    FieldSpec("raw_prompt", (), "object", "the prompt as chat messages: [{role, content}, ...]"),
    FieldSpec("data_source", (), "object", "name of the dataset that the row came from"),
    FieldSpec("ground_truth", (), "object", "reward_model.ground_truth of the dataset row"),
    FieldSpec("extra_info", (), "object", "extra_info of the dataset row"),
    FieldSpec(
        "given_responses",
        (),
        "object",
        "responses that the dataset gives, as data.response_keys lists their columns: [[token, ...], ...]",
    ),
    FieldSpec(
        "images",
        (),
        "object",
        "images of the row, in the order of their places: the bytes of each file in base64; none: []",
    ),
    FieldSpec(
        "image_starts",
        (),
        "object",
        "where the tokens of each image begin, counted from the first token of the prompt",
    ),
    FieldSpec("response_ids", ("T",), "int64", "response tokens, end-of-sequence token included", "token"),
    FieldSpec("response_length", (), "int64", "number of real tokens in response_ids", "token"),
    FieldSpec("response_mask", ("T",), "bool", "tokens that the policy produced and is trained on"),
    FieldSpec("finish_reason", (), "int8", "FINISH_STOP or FINISH_LENGTH"),
    FieldSpec(
        "weight_version",
        ("T",),
        "int64",
        "version of the weights that sampled each token; -1: no engine of the agent did",
        pad_value=-1,
    ),
    FieldSpec(
        "rollout_log_prob", ("T",), "float32", "log-prob of each sampled token by the rollout engine", "nat"
    ),
    FieldSpec(
        "prompt_experts",
        ("P", "W"),
        "int16",
        "experts that each prompt token is computed by, layer by layer (int8 where a layer has no more than "
        "128); -1: the router chooses",
        pad_side="left",
        pad_value=-1,
    ),
    FieldSpec(
        "response_experts",
        ("T", "W"),
        "int16",
        "the same of each response token; none of the last, which nothing reads",
        pad_value=-1,
    ),
    FieldSpec("old_log_prob", ("T",), "float32", "log-prob by the trainer's weights before this step", "nat"),
    FieldSpec("old_entropy", ("T",), "float32", "entropy of the trainer's policy before this step", "nat"),
    FieldSpec(
        "old_prob_square",
        ("T",),
        "float32",
        "sum of the squared probabilities of all words by the trainer's weights before this step",
    ),
    FieldSpec("ref_log_prob", ("T",), "float32", "log-prob by the reference model", "nat"),
    FieldSpec(
        "ref_hidden",
        ("T", "D"),
        "float32",
        "last hidden state of the reference before each token (D numbers, of the type it computes in); for "
        "the KL over the whole vocabulary",
    ),
    FieldSpec(
        "teacher_log_prob", ("T",), "float32", "log-prob of each sampled token by the row's teachers", "nat"
    ),
    FieldSpec(
        "teacher_span",
        ("T",),
        "int64",
        "1 + the last token of the span that the token is compared in, with a teacher of another tokenizer; "
        "teacher_log_prob is that of the span, there, teacher_top_log_prob at its first; 0: it is in none",
    ),
    FieldSpec("top_ids", ("T", "K"), "int64", "the K tokens that the row's teacher finds likeliest", "token"),
    FieldSpec(
        "teacher_top_log_prob",
        ("T", "K"),
        "float32",
        "log-probs of these by the row's teacher; or, of all tokens, by the row's teachers; of another "
        "tokenizer: see algorithms/distillation.py, span_divergence",
        "nat",
    ),
    FieldSpec("score", (), "float32", "outcome reward of the row, as the reward function gave it"),
    FieldSpec(
        "reward", ("T",), "float32", "reward per token: the score at the last response token, less penalties"
    ),
    FieldSpec(
        "reward_info",
        (),
        "object",
        "further values that the reward function returned: {name: number or text}",
    ),
    FieldSpec(
        "baseline_response_ids", ("T",), "int64", "tokens of the prompt's greedy response (remax)", "token"
    ),
    FieldSpec("baseline_response_length", (), "int64", "real tokens in baseline_response_ids", "token"),
    FieldSpec("baseline_score", (), "float32", "outcome reward of the prompt's greedy response (remax)"),
    FieldSpec("value", ("T",), "float32", "the critic's estimate of the return at each token"),
    FieldSpec("advantage", ("T",), "float32", "advantage of each response token"),
    FieldSpec("return_", ("T",), "float32", "target of the value function"),
    FieldSpec(
        "ledger_id", (), "int64", "number of the row in the whole run, which it keeps (trainer.ledger)"
    ),
    FieldSpec("episode_id", (), "int64", "group_id * n + sample: the same for all agents of an episode"),
    FieldSpec("speaker", (), "int64", "agent that spoke in the row; several share one policy's rows"),
    FieldSpec(
        "turn_id",
        ("T",),
        "int64",
        "turn of the episode that each token was spoken in, counted over all agents; -1: not of the speaker",
        pad_value=-1,
    ),
    FieldSpec(
        "branch_id",
        ("T",),
        "int64",
        "the candidates of a turn that the token's turn is one of, or follows one of: branch_id() of the "
        "episode and the turn where it branches; -1: of none",
        pad_value=-1,
    ),
    FieldSpec(
        "env_reward",
        ("T",),
        "float32",
        "what the environment gave the speaker, at the last token of the turn",
    ),
    FieldSpec(
        "conversation",
        (),
        "object",
        "the whole episode: [{role, content, agent, node, turn, reward, weight_version, ...}, ...]",
    ),
)

FINISH_STOP, FINISH_LENGTH = 0, 1

PROMPT_FIELDS = (
    "row_id",
    "group_id",
    "sample_index",
    "prompt_ids",
    "prompt_length",
    "raw_prompt",
    "data_source",
    "ground_truth",
    "extra_info",
)
"""What a loader puts into the batch: one row per prompt."""

IMAGE_FIELDS = ("images", "image_starts")
"""What a model that sees images reads besides tokens."""

LOADED_FIELDS = (*PROMPT_FIELDS, "given_responses", *IMAGE_FIELDS)
"""These, and what it puts there for a rollout that gives the responses of the dataset, and for a model that
sees images."""

ROLLOUT_FIELDS = (
    "response_ids",
    "response_length",
    "response_mask",
    "finish_reason",
    "weight_version",
    "rollout_log_prob",
)
"""What a rollout adds: one row per sampled response."""

EXPERT_FIELDS = ("prompt_experts", "response_experts")
"""What router replay adds, to the rows of a rollout or of a pass of old log-probs."""

INTERACTION_FIELDS = ("episode_id", "speaker", "turn_id", "env_reward", "conversation")
"""What a rollout in an interaction adds to these: one row per token context of an (episode, agent)."""

BRANCH_FIELDS = ("branch_id",)
"""What it adds besides where episodes branch."""

_MOST_TURNS = 1 << 20


def branch_id(episode_id: int, turn: int) -> int:
    """The id of the candidates of a turn, by the episode that branches there."""
    return episode_id * _MOST_TURNS + turn


def branching_turn(branch: int) -> tuple[int, int]:
    """The episode and the turn of a branch_id."""
    return divmod(branch, _MOST_TURNS)


@dataclass(frozen=True, order=True)
class FieldKey:
    """A field of one agent. Two agents of one run have fields of the same name and never share them."""

    agent: int
    name: str

    def __str__(self) -> str:
        return f"agent_{self.agent}.{self.name}"


@dataclass(frozen=True, order=True)
class Layout:
    """How the rows of a batch are split over ranks."""

    ranks: tuple[int, ...]
    """World ranks that hold rows."""
    shards: tuple[int, ...]
    """The data-parallel shard that each of them holds (same length); ranks with equal shard hold identical
    rows (tensor-parallel peers)."""
    rowset: str
    """Which set of rows this is; an op that changes the row count (a rollout, a filter) starts a new one,
    e.g. "agent_0.samples" after "agent_0.prompts"."""
    split: Literal["group", "cost", "prompt_cost"] = "group"
    """"group" keeps the samples of a prompt on one shard, in global order; "cost" balances the compute cost
    of rows over shards within each mini-batch; "prompt_cost" likewise, where a prompt costs each shard that
    has samples of it once."""
    mini_batch_rows: int = 0
    """Rows of a mini-batch; 0: the whole batch is one."""

    @property
    def num_shards(self) -> int:
        return max(self.shards) + 1

    def shard_of(self, rank: int) -> int:
        """The shard that `rank` holds. KeyError if the rank holds none."""
        try:
            return self.shards[self.ranks.index(rank)]
        except ValueError:
            raise KeyError(f"rank {rank} holds no rows of {self}") from None

    def is_shard_leader(self, rank: int) -> bool:
        """Whether `rank` is the first of those that hold its rows: the one that counts them."""
        return self.ranks[self.shards.index(self.shard_of(rank))] == rank
