"""What rollout engines should draw: plain forwards of the whole row, float64, token by token."""

import itertools
import math

import torch

from siirl.engines.rollout.sampling import uniforms


def next_token_log_probs(model, prompt, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([prompt], device=model.device)).logits[0, -1].double()
    return (logits / temperature).log_softmax(-1)


def truncated(log_probs, top_k, top_p):
    """Exact probabilities after top-k, then top-p: a reference that goes token by token."""
    probs = log_probs.exp().tolist()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    ranked = ranked[:top_k] if top_k > 0 else ranked
    total, mass, kept = sum(probs[token] for token in ranked), 0.0, []
    for token in ranked:
        kept.append(token)
        mass += probs[token] / total
        if mass >= top_p:
            break
    total = sum(probs[token] for token in kept)
    return {token: probs[token] / total for token in kept}


def possible_cuts(log_probs, top_k, noise):
    """Exact probabilities after top-k, of each set that may be the k likeliest of log-probs `noise` away."""
    exact = log_probs.tolist()
    ranked = sorted(range(len(exact)), key=lambda token: -exact[token])
    if not 0 < top_k < len(ranked):
        top_k = len(ranked)
    last, next_one = exact[ranked[top_k - 1]], exact[ranked[min(top_k, len(ranked) - 1)]]
    sure = [token for token in ranked[:top_k] if exact[token] - next_one > 2 * noise]
    maybe = [token for token in ranked if token not in sure and last - exact[token] <= 2 * noise]
    for others in itertools.combinations(maybe, top_k - len(sure)):
        kept = [*sure, *others]
        total = sum(math.exp(exact[token]) for token in kept)
        yield {token: math.exp(exact[token]) / total for token in kept}


def drawn_tokens(model, prompt, seed, max_tokens, temperature=1.0, top_k=-1):
    """The response that a seed gives: at each position the first token whose cumulative probability is above
    the number of that position."""
    said = []
    for (uniform,) in uniforms([seed], max_tokens):
        probs = truncated(next_token_log_probs(model, prompt + said, temperature), top_k, 1.0)
        tokens = sorted(probs)
        below = itertools.accumulate(probs[token] for token in tokens)
        said.append(next(token for token, total in zip(tokens, below, strict=True) if total > uniform))
    return said
