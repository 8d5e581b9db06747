"""Environments of verifiers before 0.4, for tests: of one turn, of several, and with a tool.

Run as a script, in an interpreter that has the package, it scores conversations by their rubrics alone.
"""

import asyncio
import json
import re
import sys
import time

import verifiers as vf
from datasets import Dataset

PRICES = {"pea": 3, "lime": 5, "corn": 8}


def last_number(completion):
    found = re.findall(r"\d+", completion[-1]["content"] or "")
    return int(found[-1]) if found else None


async def right(completion, answer):
    return 1.0 if str(last_number(completion)) == answer else 0.25


def brief(completion):
    return 1 / (1 + len(completion[-1]["content"] or ""))


def many_calls(completion):
    return sum(message["role"] == "tool" for message in completion) / 4


def price(item: str) -> str:
    """What something costs.

    Args:
        item: its name
    """
    return str(PRICES[item])


class Guess(vf.MultiTurnEnv):
    """A number below 10, by hints."""

    @vf.stop
    async def is_right(self, state, **kwargs):
        said = [dict(m) for m in (state.get("completion") or [])]
        steps = [dict(m) for step in state["trajectory"] for m in step["completion"]] or said
        return bool(steps) and str(last_number(steps)) == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        said = last_number([dict(message) for message in messages])
        hint = "?" if said is None else "higher" if said < int(state["answer"]) else "lower"
        return [{"role": "user", "content": hint}]


def tries(completion):
    return -0.125 * len(completion)


def load_environment(kind="sum", num=64, hang=None):
    def of(texts_answers):
        rows = [{"prompt": [{"role": "user", "content": t}], "answer": a} for t, a in texts_answers]
        return Dataset.from_list(rows)

    if hang == "load":
        raise RuntimeError("no such world")
    if kind == "sum":

        async def slow(completion):
            while hang == "score":  # holds up the whole process
                time.sleep(0.05)
            return 0.0

        data = of([(f"{i}+1", str(i + 1)) for i in range(num)])
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric([right, brief, slow], weights=[1.0, 0.5, 1.0]))
    if kind == "guess":
        data = of([("guess", str(i % 10)) for i in range(num)])
        return Guess(dataset=data, rubric=vf.Rubric([right, tries]), max_turns=4)
    items = list(PRICES)
    data = of([(items[i % 3], str(PRICES[items[i % 3]])) for i in range(num)])
    return vf.ToolEnv(
        dataset=data, tools=[price], rubric=vf.Rubric([right, many_calls], weights=[1.0, 0.5]), max_turns=4
    )


async def scores(kind, conversations):
    env, found = load_environment(kind), []
    client = vf.ClientConfig(api_base_url="http://127.0.0.1:1/v1")
    for row, completion in conversations:
        state = await env.init_state(row, client, "m", {})
        state["completion"] = completion
        await env.rubric.score_rollout(state)
        found.append(state["reward"])
    return found


if __name__ == "__main__":
    json.dump(asyncio.run(scores(sys.argv[1], json.load(sys.stdin))), sys.stdout)
