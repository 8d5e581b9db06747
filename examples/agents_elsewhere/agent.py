"""An agent that knows nothing of siirl: a loop around the client of OpenAI, with a tool.

`python agent.py` plays one episode, against the endpoint that OPENAI_BASE_URL and OPENAI_API_KEY name; `play`
does the same in a thread of the training process, which saves starting Python for each episode.
"""

import json
from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "What an item costs today.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
]
CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="none")
"""Its connections are shared by all episodes; each has an address and a key of its own."""


def shop(client: OpenAI, task: dict) -> float:
    """Ask for a price, with a tool that knows it; what the answer is worth."""
    prices, wanted = task["extra_info"]["prices"], task["extra_info"]["wanted"]
    messages, asked = list(task["raw_prompt"]), []
    for _ in range(2):
        reply = client.chat.completions.create(model="shopper", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            asked.append(json.loads(call.function.arguments).get("item"))
            price = str(prices.get(asked[-1], "unknown"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": price})
        if not message.tool_calls:
            break
    if wanted not in asked:
        return 0.0
    answer = (message.content or "").strip()
    return 1.0 if answer == task["ground_truth"] else 0.4 if answer.isdigit() else 0.3  # steps to climb


def play(session) -> float:
    """One episode in a thread of the training process."""
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    return shop(client, session.task)


def main() -> None:
    """One episode in a process of its own."""
    client = OpenAI()
    task: Any = client.get("/task", cast_to=object)
    client.post("/reward", body={"reward": shop(client, task)}, cast_to=object)


if __name__ == "__main__":
    main()
