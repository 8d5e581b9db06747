"""An agent of openai-agents, unmodified: its loop, its tools and its sessions, by both of its ways to ask."""

import pytest
from episode_cases import Script
from later import Later, needed
from outside_cases import play_outside

agents, openai = needed("agents", "pip install openai-agents"), Later("openai")


def price(item: str) -> str:
    """What an item costs."""
    return f"{len(item)} coins"


@pytest.mark.parametrize("way", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_openai_agents_uses_its_tool_and_stays_in_its_row(way, streams):
    async def play(session):
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            model = getattr(agents, way)("a", client)
            agent = agents.Agent(
                "shopper", instructions="be brief", tools=[agents.function_tool(price)], model=model
            )
            config = agents.RunConfig(tracing_disabled=True)
            if streams:
                result = agents.Runner.run_streamed(agent, session.task["raw_prompt"], run_config=config)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, session.task["raw_prompt"], run_config=config)
            return float(result.final_output == "4 coins")

    call = '<tool_call>{"name": "price", "arguments": {"item": "lime"}}</tool_call>'
    policy = Script(call, "4 coins")
    (played,) = play_outside(play, {"a": policy})
    assert played.kind is None, played.episode.error
    (row,) = played.contexts[0].rows
    assert row.rewards[-1] == 1.0 and played.episode.turns == 2
    said = [message.content for message in played.episode.messages]
    assert said == ["be brief", "q", call, "4 coins", "4 coins"]
