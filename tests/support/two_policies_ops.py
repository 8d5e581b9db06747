"""Custom ops of tests/e2e/two_policies.yaml."""

from tensordict import TensorDict

from siirl.nodes.advantage import advantage


def length_bonus(ctx, rows):
    """A bonus for short responses."""
    bonus = ctx.options["weight"] * (8 - rows["response_length"]).float()
    return TensorDict({"bonus": bonus}, batch_size=rows.batch_size)


def advantage_with_bonus(ctx, rows):
    """The built-in advantage of score + bonus."""
    rows = rows.clone(recurse=False)
    rows["score"] = rows["score"] + rows["bonus"]
    return advantage(ctx, rows)
