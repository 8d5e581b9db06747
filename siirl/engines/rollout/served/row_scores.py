"""What a teacher in vLLM says of rows: how likely their tokens are. See RolloutEngine.score."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from siirl.data.completions import SamplingParams
from siirl.errors import RolloutError

ONE_TOKEN = SamplingParams(max_tokens=1)
"""What vLLM samples after a row that it scores."""


def checked_scores(
    scored: Iterable[tuple[bytes, bytes]],
    rows: Sequence[Sequence[int]],
    starts: Sequence[int],
    top_k: int,
    engine: str,
    dtype: str,
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and log-probs of each row, [T, 1 + K], of what the engine's process sent (RowScores).

    RolloutError unless each row's own tokens were scored, by numbers.
    """
    found = []
    for index, (row, start, (token_ids, log_probs)) in enumerate(zip(rows, starts, scored, strict=True)):
        shape = (-1, 1 + top_k)
        ids_TK = torch.frombuffer(bytearray(token_ids), dtype=torch.int32).to(torch.int64).view(shape)
        log_prob_TK = torch.frombuffer(bytearray(log_probs), dtype=torch.float32).view(shape)
        if ids_TK[:, 0].tolist() != list(row[start:]):
            raise RolloutError(f"rollout engine {engine!r} scored other tokens than those of row {index}.")
        if not bool(log_prob_TK.isfinite().all()):
            raise RolloutError(
                f"row {index} has log-probs by {engine!r} that are not finite: its weights overflow in "
                f"{dtype}, or hold NaN. Set actor_rollout_ref.rollout.dtype=float32 at its node, or give "
                "another model."
            )
        found.append((ids_TK, log_prob_TK))
    return found
