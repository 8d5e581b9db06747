"""Episodes without models: a vocabulary of characters, policies that say their lines, stages of a game."""

from typing import Any

from siirl.agents.contexts import Limits
from siirl.agents.episode import Episode
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Played, Speaker, run_all
from siirl.compiler.plan import AgentStage, EnvStage, InteractionPlan, StagePlan
from siirl.data.completions import Completion, SamplingParams

END = 3  # the token that ends a turn


class Letters:
    """A vocabulary of characters; a turn in the template is ROLE:content and END."""

    eos_token_id, eos_token, bos_token_id = END, chr(END), None
    chat_template = "letters"
    name_or_path = "letters"

    def apply_chat_template(self, conversation, tools=(), **options):
        names = "".join(f"[{tool['function']['name']}]" for tool in tools)
        turns = "".join(f"{m['role'][0]}:{m['content']}{chr(END)}" for m in conversation)
        return f"{names}{turns}a:"

    def get_added_vocab(self):
        return {}

    def encode(self, text, **options):
        return [ord(char) for char in text]

    def decode(self, token_ids, **options):
        return "".join(chr(token) for token in token_ids if token != END)


def text_of(tokens) -> str:
    """Tokens of Letters, with a / at the end of turns."""
    return "".join(map(chr, tokens)).replace(chr(END), "/")


class Script:
    """A policy that says its lines one after another, and keeps what it read before each.

    A line that ends with "..." is cut by length there. seeds, most_tokens: what it was asked with.
    """

    def __init__(self, *lines):
        self.lines, self.read, self.seeds, self.most_tokens = list(lines), [], [], []

    async def generate(self, prompt, params, seed, seen=None):
        self.read.append(text_of(prompt))
        self.seeds.append(seed)
        self.most_tokens.append(params.max_tokens)
        line = self.lines.pop(0)
        cut = line.endswith("...")
        tokens = [ord(char) for char in line.removesuffix("...")] + ([] if cut else [END])
        return Completion(tokens, [-1.0] * len(tokens), "length" if cut else "stop", 5)


def stage(node: str, agent: int | None, **options: Any) -> StagePlan:
    """A node of an agent, or of an environment (None); options: fields of the plan; of one node its name."""
    common: dict[str, Any] = {"following": (), "back_to": (), "max_turns": 1, "until": None, "route": None}
    for name in ("following", "back_to"):
        if isinstance(one := options.get(name, ()), str | None):
            options[name] = () if one is None else (one,)
    if agent is not None:
        return AgentStage(node, agent, **{**common, "policy": agent, "rows": True, **options})
    return EnvStage(node, 0, **{**common, "obs_with_env": True, "rewards_with_env": True, **options})


def speaker(policy: Any, limits: Limits | None = None, tools: Any = None, **options: Any) -> Speaker:
    """Whoever speaks with a policy, of Letters and with room for all."""
    renderer = ChatRenderer(Letters(), {}, tools.toolbox.schemas if tools else ())
    return Speaker(
        policy, SamplingParams(max_tokens=1000), renderer, limits or Limits(500, 500), tools=tools, **options
    )


def play(
    stages: list[StagePlan],
    speakers: dict[str, Speaker],
    functions: dict[str, Any] | None = None,
    make_env: Any = None,
    num_episodes: int = 1,
    extra_info: dict[str, Any] | None = None,
) -> list[Played]:
    """Play episodes of the task "q", with seeds 100, 101, ..."""
    policies = tuple(one.model for one in stages if isinstance(one, AgentStage))
    plan = InteractionPlan(stages[0].node, tuple(stages), policies, 9)
    task = {"raw_prompt": [{"role": "user", "content": "q"}], "extra_info": extra_info}
    made = [Episode(number, 0, number, 100 + number, task) for number in range(num_episodes)]
    prompts = [Letters().encode(f"u:q{chr(END)}a:") for _ in made]
    return run_all(Game(plan, speakers, functions or {}, make_env, 5.0), made, prompts)
