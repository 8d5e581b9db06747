"""A stand-in for a server of a teacher: vLLM's answers, computed by a model of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKEN_ID = "token_id:"


class ServedTeacher:
    """Answers messages as vLLM's /v1/completions and /detokenize do.

    style: "prompt_logprobs", "echo" (of a server that has none of these), or "texts" (by echo, tokens by
    their texts).
    """

    def __init__(self, folder: Path, style: str = "prompt_logprobs", words: Path | None = None):
        """words: the folder of another tokenizer; none: that of the model."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer, self.style = AutoTokenizer.from_pretrained(words or folder), style

    def __call__(self, message: dict[str, Any]) -> tuple[int, Any]:
        if "tokens" in message:
            if self.style != "prompt_logprobs":
                return 404, {"detail": "Not Found"}
            return 200, {"prompt": self.tokenizer.decode(message["tokens"])}
        row = message["prompt"]
        with torch.no_grad():
            log_prob_TV = self.model(torch.tensor([row])).logits[0].double().log_softmax(-1)
        if message.get("echo"):
            return 200, {
                "choices": [{"text": "", "logprobs": self._echoed(row, log_prob_TV, message["logprobs"])}]
            }
        choice: dict[str, Any] = {"text": "", "finish_reason": "length"}
        if self.style == "prompt_logprobs":
            count = message["prompt_logprobs"]
            choice["prompt_logprobs"] = [None, *map(self._said, row[1:], log_prob_TV, [count] * len(row))]
        return 200, {"choices": [choice]}

    def _said(self, token: int, log_prob_V: torch.Tensor, count: int) -> dict[str, Any]:
        """The token that is there first, then the likeliest, as vLLM has it."""
        ids = dict.fromkeys([token, *log_prob_V.topk(count).indices.tolist()])
        rank = {one: at for at, one in enumerate(log_prob_V.argsort(descending=True).tolist(), 1)}
        return {
            str(one): {
                "logprob": log_prob_V[one].item(),
                "rank": rank[one],
                "decoded_token": self.tokenizer.decode([one]),
            }
            for one in ids
        }

    def _echoed(self, row: list[int], log_prob_TV: torch.Tensor, count: int) -> dict[str, Any]:
        """With one token that was sampled behind the row."""
        sampled = [*row, log_prob_TV[-1].argmax().item()]
        own = [log_prob_V[token].item() for token, log_prob_V in zip(sampled[1:], log_prob_TV, strict=True)]
        named = [
            {self._name(one): log_prob_V[one].item() for one in log_prob_V.topk(count).indices.tolist()}
            for log_prob_V in log_prob_TV
        ]
        return {
            "tokens": [self._name(token) for token in sampled],
            "token_logprobs": [None, *own],
            "top_logprobs": [None, *named],
        }

    def _name(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.style == "texts" else f"{TOKEN_ID}{token}"
