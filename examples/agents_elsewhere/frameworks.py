"""The quickstart's question, asked by three frameworks, each as its own documentation has it.

Each function plays an episode: it asks, and leaves the reward to the reward function. None knows anything of
siirl but the address, the key and the question. The tools are offered, and the model may leave them.
"""

import ssl
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from anthropic import Anthropic
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

OPENAI = OpenAI(base_url="http://127.0.0.1", api_key="none")
ANTHROPIC = Anthropic(base_url="http://127.0.0.1", api_key="none")
"""Their connections are shared by all episodes; each has an address and a key of its own."""
CERTIFICATES = ssl.create_default_context()
"""Reading them takes longer than an episode."""


@function_tool
def smaller(a: int, b: int) -> int:
    """The smaller one of two numbers."""
    return min(a, b)


def openai(session: Any) -> None:
    """The client of OpenAI, with a tool."""
    client = OPENAI.with_options(base_url=session.base_url, api_key=session.api_key)
    schema: Any = {
        "name": smaller.name,
        "description": smaller.description,
        "parameters": smaller.params_json_schema,
    }
    tools: Any = [{"type": "function", "function": schema}]
    client.chat.completions.create(model="any", messages=session.task["raw_prompt"], tools=tools)


def anthropic(session: Any) -> None:
    """The client of Anthropic."""
    client = ANTHROPIC.with_options(base_url=session.url, api_key=session.api_key)
    client.messages.create(model="any", max_tokens=8, messages=session.task["raw_prompt"])


async def openai_agents(session: Any) -> None:
    """An agent of openai-agents, with a tool, through chat completions."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http) as client:
        agent = Agent("reader", tools=[smaller], model=OpenAIChatCompletionsModel("any", client))
        await Runner.run(
            agent, session.task["raw_prompt"], max_turns=2, run_config=RunConfig(tracing_disabled=True)
        )
