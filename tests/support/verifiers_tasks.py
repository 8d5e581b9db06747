"""A taskset of verifiers.v1, for tests, and a harness that asks until it is told `right`, four times at most.

Run as a script, in an interpreter that has the package, it scores conversations as the tasks do.
"""

import asyncio
import json
import sys

import httpx
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode

__all__ = ["Asking", "Numbers"]


class Number(vf.TaskData):
    answer: str


def hint(said, answer):
    if not said.isdigit():
        return "?"
    return "right" if said == answer else "higher" if int(said) < int(answer) else "lower"


class GuessIt(vf.Task[Number]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=-0.125)
    async def tries(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class Numbers(vf.Taskset[GuessIt]):
    def load(self):
        return [GuessIt(Number(prompt="guess", answer=str(i % 10)), self.config.task) for i in range(64)]


class Asking(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as client:
            for _ in range(4):
                asked = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint.rstrip('/')}/chat/completions", json=asked)
                reply.raise_for_status()
                said = reply.json()["choices"][0]["message"]["content"]
                told = hint(said, data.answer)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
                if told == "right":
                    break
        return vf.ProgramResult(0, "", "")


async def scores(conversations):
    """Rewards that the tasks give, by what was said."""
    found = []
    for data, said in conversations:
        task = GuessIt(Number.model_validate(data))
        replies = [message["content"] for message in said if message["role"] == "assistant"]
        nodes = [
            MessageNode(
                parent=number - 1 if number else None,
                message={"role": "assistant", "content": text},
                sampled=True,
            )
            for number, text in enumerate(replies)
        ]
        agent = {"config": vf.AgentConfig()}
        trace = vf.Trace(task=vf.TraceTask(type="GuessIt", data=task.data), agent=agent, nodes=nodes)
        await task.score(trace)
        found.append(trace.reward)
    return found


if __name__ == "__main__":
    json.dump(asyncio.run(scores(json.load(sys.stdin))), sys.stdout)
