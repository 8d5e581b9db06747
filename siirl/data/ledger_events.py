"""What the ledger's files hold: kinds of events, and their columns. No torch, so that readers need none.

RUN/ledger/attempt_A.rank_R.N.arrow holds events (`EVENTS`): prompts that were loaded, rows that were sampled,
scored, credited with an advantage and trained, or dropped and why. The same row has the same `id` in all of
them, and each node says what it saw: `siirl audit` holds one against the other. tokens_A.rank_R.N.arrow has
the trained tokens of each row (`TOKENS`). The schema's metadata say what the attempt was (`HEADER`).
"""

import pyarrow as pa

FOLDER = "ledger"
HEADER = b"siirl"
KINDS = (
    *("step", "policy", "loaded", "sampled", "scored", "credited", "trained", "dropped", "drawn", "waiting"),
    "end",
)
"""What an event says; the column `kind` holds its place here."""
EVENTS = pa.schema(
    [
        ("kind", pa.int8()),
        ("step", pa.int32()),
        ("agent", pa.int16()),  # -1: none
        ("id", pa.int64()),  # of the row, in the whole run
        ("prompt", pa.int64()),  # sample_index
        ("group", pa.int64()),  # group_id, in its step
        ("episode", pa.int64()),
        ("speaker", pa.int16()),
        ("epoch", pa.int32()),
        ("digest", pa.int64()),  # of the trained tokens and their places
        ("tokens", pa.int32()),  # that are trained
        ("foreign", pa.int32()),  # of these, tokens that no engine of the agent sampled
        ("first_version", pa.int64()),  # of the weights that sampled the tokens; of a policy: before the step
        ("last_version", pa.int64()),
        ("update", pa.int32()),  # optimizer step, counted in the training step
        ("score", pa.float32()),
        ("reward", pa.float32()),  # sum over the row's tokens
        ("environment", pa.float32()),  # what the environment gave
        ("advantage", pa.float64()),  # mean over the trained tokens
        ("clipped", pa.float32()),  # share of the trained tokens
        ("weight", pa.float32()),  # of the loss, mean over the trained tokens
        ("count", pa.int32()),  # draws of a row; events of a step
        ("what", pa.string()),  # reason, or source
        ("failure", pa.string()),  # why a reward function gave nothing
    ]
)
TOKEN_NUMBERS = ("rollout_log_prob", "old_log_prob", "advantage", "ratio", "clip", "weight")
TOKENS = pa.schema(
    [("step", pa.int32()), ("agent", pa.int16()), ("id", pa.int64()), ("token", pa.list_(pa.int32()))]
    + [(name, pa.list_(pa.float32())) for name in TOKEN_NUMBERS]
)
STEP_BITS, ROUND_BITS = 43, 32
"""Of a row's id: above them its step; above these its round."""


def step_of(row: int) -> int:
    """The step in which a row left its rollout."""
    return row >> STEP_BITS
