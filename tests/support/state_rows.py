"""Rows for layers with states: packed, and each by itself as transformers computes it."""

import torch
from tensordict import TensorDict
from torch import Tensor

from siirl.engines.train.packed.packing import pack_rows

ROWS = {
    "rows alone": ([0, 1, 2, 3], [7, 2, 1, 70], [9, 66, 130, 1]),
    "shared prompts": (
        [0, 0, 0, 1, 1, 2, 3, 3, 4],
        [70, 70, 70, 2, 2, 9, 1, 1, 5],
        [9, 66, 130, 3, 1, 12, 2, 4, 0],
    ),
    "short rows": ([0, 0, 1, 1, 2], [6, 6, 2, 2, 1], [4, 9, 3, 1, 2]),
}
"""Prompt number, prompt and response tokens of each row: shorter than a convolution, longer than a chunk."""


def rows_of(numbers: list[int], prompts: list[int], responses: list[int]) -> TensorDict:
    draw = torch.Generator().manual_seed(3)
    of_number = {number: torch.randint(3, 64, (max(prompts),), generator=draw) for number in numbers}
    return TensorDict(
        {
            "prompt_ids": torch.stack([of_number[number] for number in numbers]),
            "response_ids": torch.randint(3, 64, (len(numbers), max(responses)), generator=draw),
            "prompt_length": torch.tensor(prompts),
            "response_length": torch.tensor(responses),
            "prompt_index": torch.tensor(numbers),
            "group_id": torch.tensor(numbers),
        },
        batch_size=[len(numbers)],
    )


def alone(model: torch.nn.Module, rows: TensorDict) -> Tensor:
    """Log-probs of the response tokens, a row at a time."""
    found = []
    for row in range(len(rows)):
        prompt, response = int(rows["prompt_length"][row]), int(rows["response_length"][row])
        if response:
            ids = torch.cat([rows["prompt_ids"][row][-prompt:], rows["response_ids"][row][:response]])
            logits = model(ids.unsqueeze(0).to(model.device), use_cache=False).logits[0, prompt - 1 : -1]
            target = ids[prompt:, None].to(logits.device)
            found.append(logits.log_softmax(-1).gather(1, target)[:, 0])
    return torch.cat(found)


def packed(model: torch.nn.Module, rows: TensorDict, share: bool) -> Tensor:
    at = pack_rows(rows, model.device, share_prompts=share)
    hidden = model.model(
        input_ids=at.input_ids, position_ids=at.position_ids, use_cache=False, sequence_bounds=at.bounds
    ).last_hidden_state[0]
    logits = model.lm_head(hidden[at.predict_index]) / getattr(model.config, "logits_scaling", 1.0)
    return logits.log_softmax(-1).gather(1, at.target[:, None])[:, 0]


def gradients(model: torch.nn.Module, log_prob_M: Tensor) -> dict[str, Tensor]:
    weight_M = torch.randn(log_prob_M.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (log_prob_M * weight_M.to(log_prob_M.device)).sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}
