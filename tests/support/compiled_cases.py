"""Counts of the graphs that torch's compiler made of layers."""

import torch._dynamo
import train_engine_cases as cases
from train_engine_cases import NUM_ROWS, Scenario

STEPS = 14
"""More than the compiler makes of one function before it leaves it as it is."""
SETTLED = 4
"""The step by which a rank has seen rows with and without a prompt in common; there is a graph of each."""


def graphs_after_each_step(
    rank: int, world: int, path: str, overrides: tuple[str, ...], device: str = "cpu"
) -> list[int]:
    """In steps whose rows have other lengths, and share 1, 2, 3 ... prompts."""
    scenario = Scenario("", world, overrides=overrides, device=device)
    engine, _ = cases.build_engine(scenario, path)
    found = []
    for step in range(STEPS):
        cases.SAME_PROMPT = tuple(row % (1 + step % NUM_ROWS) for row in range(NUM_ROWS))
        engine.compute(cases.sample_rows(step), ("log_prob", "entropy"), cases.TEMPERATURE)
        cases.train_steps(engine, scenario, range(step, step + 1))
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found
