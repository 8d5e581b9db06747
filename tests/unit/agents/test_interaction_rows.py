"""Episodes of scripted policies give exactly the expected tokens, masks, turns, groups and row ids."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from fixtures_tiny import make_tiny_tokenizer
from plan_cases import add_agent, config
from transformers import AutoTokenizer

from siirl.agents.contexts import Limits
from siirl.agents.environments import load_environment
from siirl.agents.episode import Episode
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Game, Speaker, run_all, turn_seed
from siirl.compiler.compile import compile_plan
from siirl.dag.spec import DagBuilder
from siirl.data.completions import Completion, SamplingParams
from siirl.data.rows import make_rows, objects
from siirl.errors import RolloutError
from siirl.nodes.interaction_rows import rows_of
from siirl.types import FINISH_LENGTH, FINISH_STOP
from siirl.user_code.load_object import load_object

EOS, USER, ASSISTANT = 1, 4, 5
LIMITS = Limits(prompt=64, response=64)

CODE = '''
def stop_at_two(episode):
    return episode.turns >= 2

def to_last(episode):
    return "rollout_2" if episode.last_turn().content == "1" else None

def backwards(episode):
    return "rollout_0"

class Counter:
    """Adds up what is said; 3 ends it. Agent 0 sees the sum, agent 1 gets nothing to see."""
    async def reset(self, task, seed):
        self.sum = 0
        return "go"
    async def step(self, actions):
        for text in actions.values():
            if text == "9":
                raise ValueError("nine")
            self.sum += int(text)
        return {0: str(self.sum)}, {a: float(t) for a, t in actions.items()}, self.sum >= 3
'''

PROCESS = """
def pre_process(messages, episode):
    return [messages[0], messages[-1]]

def post_process(text, episode, suffix):
    return text + suffix
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def code(tmp_path) -> Path:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "process.py").write_text(PROCESS)
    return tmp_path / "code.py"


@dataclass
class Script:
    """Says the next of its texts in each episode (known by its seed), and keeps what it was asked."""

    tokenizer: object
    texts: tuple[str, ...]
    cut: bool = False  # turns end by length, without an end token
    delay_s: float = 0.0

    def __post_init__(self):
        self.asked, self.said = [], {}

    async def generate(self, prompt, params, seed, seen=None):
        await asyncio.sleep(self.delay_s * (len(self.asked) % 3))
        self.asked.append((tuple(prompt), seed, params.max_tokens))
        first = prompt[1]
        position = self.said[first] = self.said.get(first, -1) + 1
        tokens = self.tokenizer.encode(self.texts[position]) + ([] if self.cut else [EOS])
        log_probs = [-float(index + 1) for index in range(len(tokens))]
        return Completion(tokens, log_probs, "length" if self.cut else "stop", 7 + position)


def chain(num_agents: int, **options) -> DagBuilder:
    """Agents that speak one after another; options: agent -> options of its rollout node."""
    dag, ids = DagBuilder("chain"), None
    for agent in range(num_agents):
        more = options.get(f"agent_{agent}", {})
        ids = add_agent(dag, agent, **({"dependencies": [ids["rollout"]]} if ids else {}), **more)
    return dag


def game_of(dag: DagBuilder, scripts, tokenizer, limits=LIMITS, make_env=None) -> Game:
    interactions = compile_plan(dag.build(), config(), 1)[0].interactions
    (plan,) = interactions.values()
    speakers, functions = {}, {}
    for stage in plan.stages:
        functions |= {ref: load_object(ref, "test") for ref in (stage.until, stage.route) if ref}
    for stage in plan.speaking:
        renderer = ChatRenderer(tokenizer, {})
        speakers[stage.node] = Speaker(scripts[stage.policy], SamplingParams(16), renderer, limits)
    return Game(plan, speakers, functions, make_env, 5.0)


def episodes(n: int, tasks: str = "q") -> list[Episode]:
    """n samples of each task; the text of a task is one character."""
    made = []
    for group, text in enumerate(tasks):
        for sample in range(n):
            task = {
                "raw_prompt": [{"role": "user", "content": text}],
                "data_source": "s",
                "ground_truth": text,
                "extra_info": {"index": group},
            }
            made.append(Episode(group * n + sample, group, sample, 1000 + group * n + sample, task))
    return made


def play(game: Game, made: list[Episode], tokenizer):
    prompts = [[USER, *tokenizer.encode(one.task["ground_truth"]), EOS, ASSISTANT] for one in made]
    return run_all(game, made, prompts)


def prompts_of(tasks: int):
    return make_rows({"group_id": list(range(tasks)), "sample_index": [10 + i for i in range(tasks)]})


def test_three_agents_in_two_rounds_give_exactly_these_rows(tokenizer):
    scripts = {agent: Script(tokenizer, (str(agent + 1), str(agent + 4))) for agent in range(3)}
    game = game_of(chain(3, agent_2={"loop": {"max_turns": 2}}), scripts, tokenizer)
    made = play(game, episodes(1, "qr"), tokenizer)
    said = {character: tokenizer.encode(character)[0] for character in "qr123456"}

    def user(character):
        return [USER, said[character], EOS]

    before = {0: "", 1: "1", 2: "12"}
    between = {0: "23", 1: "34", 2: "45"}
    for agent in range(3):
        rows = rows_of(game.plan, agent, made, prompts_of(2), 1)
        assert rows["row_id"].tolist() == [0, 6] and game.plan.most_turns == 6
        assert rows["group_id"].tolist() == rows["episode_id"].tolist() == [0, 1]
        assert rows["sample_index"].tolist() == [10, 11]
        assert rows["speaker"].tolist() == [agent, agent]
        assert rows["weight_version"].tolist() == [[7] * 2 + [-1] * 7 + [8] * 2] * 2
        own = [said[str(agent + 1)], EOS], [said[str(agent + 4)], EOS]
        read = [token for character in between[agent] for token in user(character)] + [ASSISTANT]
        for row, task in enumerate("qr"):
            prompt = user(task) + [t for c in before[agent] for t in user(c)] + [ASSISTANT]
            assert rows["prompt_ids"][row].tolist() == prompt
            assert rows["response_ids"][row].tolist() == own[0] + read + own[1]
        assert rows["response_mask"].tolist() == [[True] * 2 + [False] * 7 + [True] * 2] * 2
        assert rows["turn_id"].tolist() == [[agent] * 2 + [-1] * 7 + [agent + 3] * 2] * 2
        assert rows["rollout_log_prob"].tolist() == [[-1, -2] + [0] * 7 + [-1, -2]] * 2
        assert rows["response_length"].tolist() == [11, 11]
        assert rows["finish_reason"].tolist() == [FINISH_STOP, FINISH_STOP]
    conversation = objects(rows, "conversation")[0]
    assert [(m["agent"], m["turn"], m["content"]) for m in conversation] == [
        (None, None, "q"),
        *[(turn % 3, turn, str(turn + 1)) for turn in range(6)],
    ]
    assert objects(rows, "extra_info")[1] == {
        "index": 1,
        "agent": 2,
        "episode_id": 1,
        "conversation": objects(rows, "conversation")[1],
        "ended": "rollout_2 has run loop.max_turns=2 times",
    }


def test_a_turn_depends_on_its_seed_alone_not_on_when_it_is_generated(tokenizer):
    def asked(delay_s):
        scripts = {agent: Script(tokenizer, ("1", "2"), delay_s=delay_s) for agent in range(2)}
        game = game_of(chain(2, agent_1={"loop": {"max_turns": 2}}), scripts, tokenizer)
        play(game, episodes(1, "qrs"), tokenizer)
        return [sorted(script.asked) for script in scripts.values()]

    assert asked(0.0) == asked(0.01)
    seeds = {seed for script in asked(0.0) for _, seed, _ in script}
    assert seeds == {turn_seed(1000 + e, turn % 2, turn) for e in range(3) for turn in range(4)}


def test_a_turn_cut_by_length_is_ended_by_tokens_that_are_not_trained_on(tokenizer):
    scripts = {agent: Script(tokenizer, ("1", "2"), cut=True) for agent in range(2)}
    game = game_of(chain(2, agent_1={"loop": {"max_turns": 2}}), scripts, tokenizer)
    rows = rows_of(game.plan, 0, play(game, episodes(1), tokenizer), prompts_of(1), 1)
    one, two = tokenizer.encode("1")[0], tokenizer.encode("2")[0]
    assert rows["response_ids"][0].tolist() == [one, EOS, USER, one, EOS, ASSISTANT, two]
    assert rows["turn_id"][0].tolist() == [0, -1, -1, -1, -1, -1, 2]
    assert rows["finish_reason"].tolist() == [FINISH_LENGTH]


def test_a_rewritten_context_starts_a_new_row_and_others_read_what_was_post_processed(tokenizer, code):
    scripts = {agent: Script(tokenizer, ("1", "2")) for agent in range(2)}
    game = game_of(chain(2, agent_1={"loop": {"max_turns": 2}}), scripts, tokenizer)
    own = load_object(f"{code.parent / 'process.py'}:pre_process", "test")
    game.speakers["rollout_1"] = replace(
        game.speakers["rollout_1"], pre_process=own, post_process=lambda text, episode: text + "!"
    )
    made = play(game, episodes(1), tokenizer)
    rows = rows_of(game.plan, 1, made, prompts_of(1), 1)
    assert rows["row_id"].tolist() == [0, 1]
    assert rows["turn_id"].tolist() == [[1, 1], [3, 3]]
    assert [[m["content"] for m in prompt] for prompt in objects(rows, "raw_prompt")] == [
        ["q", "1"],
        ["q", "2"],
    ]
    assert [m.content for m in made[0].episode.messages] == ["q", "1", "1!", "2", "2!"]
    other = rows_of(game.plan, 0, made, prompts_of(1), 1)
    assert len(other) == 1 and tokenizer.decode(other["response_ids"][0]).count("1!") == 1


def test_a_shared_policy_has_the_rows_of_both_agents_told_apart_by_speaker(tokenizer):
    dag = DagBuilder("debate")
    ids = add_agent(dag, 0)
    dag.node(
        "rollout_1",
        "MODEL_INFERENCE",
        "ROLLOUT",
        agent_group=1,
        dependencies=[ids["rollout"]],
        config={"rollout.agent.share_instance": 0},
        loop={"max_turns": 2},
    )
    game = game_of(dag, {0: Script(tokenizer, ("1", "2", "3", "4") * 2)}, tokenizer)
    rows = rows_of(game.plan, 0, play(game, episodes(2, "qr"), tokenizer), prompts_of(2), 2)
    assert rows["speaker"].tolist() == [0, 1] * 4
    assert rows["row_id"].tolist() == [4 * number for number in range(8)] and game.plan.most_turns == 4
    assert rows["episode_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rows["group_id"].tolist() == [0] * 4 + [1] * 4
    assert rows["sample_index"].tolist() == [10] * 4 + [11] * 4
    assert [(x["agent"], x["episode_id"]) for x in objects(rows, "extra_info")] == [
        (agent, episode) for episode in range(4) for agent in (0, 1)
    ]
    assert [sorted(set(turns)) for turns in rows["turn_id"].tolist()] == [[-1, 0, 2], [-1, 1, 3]] * 4


def test_until_ends_a_loop_and_a_route_skips_agents(tokenizer, code):
    def script(*texts):
        return Script(tokenizer, texts)

    loop = {"max_turns": 9, "until": f"{code}:stop_at_two"}
    game = game_of(chain(2, agent_1={"loop": loop}), {0: script("1"), 1: script("2")}, tokenizer)
    assert play(game, episodes(1), tokenizer)[0].episode.turns == 2

    dag = chain(3, agent_0={"agent_options": {"route": f"{code}:to_last"}})
    game = game_of(dag, {0: script("1"), 1: script("5"), 2: script("6")}, tokenizer)
    assert play(game, episodes(1), tokenizer)[0].episode.visits == {"rollout_0": 1, "rollout_2": 1}

    dag = chain(2, agent_1={"agent_options": {"route": f"{code}:backwards"}})
    game = game_of(dag, {0: script("1"), 1: script("5")}, tokenizer)
    with pytest.raises(RolloutError, match=r"'rollout_1'.*comes before it.*loop"):
        play(game, episodes(1), tokenizer)


def counting(code: Path, max_turns: int = 5) -> DagBuilder:
    dag = DagBuilder("counting")
    first = add_agent(dag, 0)
    second = add_agent(dag, 1, dependencies=[first["rollout"]])
    env = {"env_path": f"{code}:Counter"}
    dag.node(
        "count", "ENV_INTERACT", dependencies=[second["rollout"]], config=env, loop={"max_turns": max_turns}
    )
    return dag


def test_an_environment_rewards_each_agent_at_its_last_token_and_ends_the_episode(tokenizer, code):
    make = load_environment(f"{code}:Counter", "test")
    scripts = {0: Script(tokenizer, ("1", "1")), 1: Script(tokenizer, ("0", "1"))}
    game = game_of(counting(code), scripts, tokenizer, make_env=make)
    made = play(game, episodes(1), tokenizer)
    assert made[0].episode.done and made[0].episode.turns == 4
    first = rows_of(game.plan, 0, made, prompts_of(1), 1)
    width = first["response_ids"].shape[1]
    expected = torch.zeros(width)
    expected[1], expected[width - 1] = 1.0, 1.0
    assert first["env_reward"][0].tolist() == expected.tolist()
    assert tokenizer.decode(first["prompt_ids"][0], skip_special_tokens=True) == "qgo"
    assert tokenizer.decode(first["response_ids"][0], skip_special_tokens=True) == "1" + "01" + "1"
    second = rows_of(game.plan, 1, made, prompts_of(1), 1)
    assert second["env_reward"][0].sum() == 1.0 and second["env_reward"][0, -1] == 1.0
    rewards = [m["reward"] for m in objects(second, "conversation")[0] if m["agent"] is not None]
    assert rewards == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("shows", "pays"), [(True, True), (False, True), (True, False)])
def test_the_flat_keys_of_an_environment_say_what_agents_get_of_it(tokenizer, code, shows, pays):
    flat = {"env_path": [f"{code}:Counter"], "obs_with_env": shows, "rewards_with_env": pays}
    config = {f"rollout.agent.{key}": value for key, value in flat.items()}
    scripts = {0: Script(tokenizer, ("1", "1")), 1: Script(tokenizer, ("0", "1"))}
    make = load_environment(f"{code}:Counter", "test")
    dag = chain(2, agent_1={"config": config, "loop": {"max_turns": 5}})
    game = game_of(dag, scripts, tokenizer, make_env=make)
    assert [stage.node for stage in game.plan.stages] == ["rollout_0", "rollout_1", "rollout_1_env"]
    assert game.plan.stages[-1].back_to == ("rollout_0",) and game.plan.stages[-1].max_turns == 5
    (one,) = play(game, episodes(1), tokenizer)
    assert one.episode.done and one.episode.turns == 4
    assert [m.reward for m in one.episode.messages if m.agent is not None] == [
        float(pays and reward) for reward in (1, 0, 1, 1)
    ]
    assert any(m.content == "go" for m in one.episode.messages) == shows


def test_where_an_episode_goes_is_decided_when_the_environment_of_the_flat_keys_has_answered(tokenizer, code):
    config = {"rollout.agent.env_path": [f"{code}:Counter"], "rollout.agent.obs_with_env": True}
    dag = chain(3, agent_0={"config": config, "agent_options": {"route": f"{code}:to_last"}})
    scripts = {0: Script(tokenizer, ("1",)), 2: Script(tokenizer, ("2",))}
    make = load_environment(f"{code}:Counter", "test")
    (one,) = play(game_of(dag, scripts | {1: scripts[0]}, tokenizer, make_env=make), episodes(1), tokenizer)
    assert one.episode.visits == {"rollout_0": 1, "rollout_0_env": 1, "rollout_2": 1}


def test_an_environment_that_raises_costs_its_episode_alone(tokenizer, code):
    make = load_environment(f"{code}:Counter", "test")
    scripts = {0: Script(tokenizer, ("3",)), 1: Script(tokenizer, ("9",))}
    game = game_of(counting(code), scripts, tokenizer, make_env=make)
    scripts[1].texts = ("0",)
    made = play(game, episodes(1, "qr"), tokenizer)
    assert [one.kind for one in made] == [None, None]
    bad = {0: Script(tokenizer, ("3",)), 1: Script(tokenizer, ("9",))}
    (failed,) = play(game_of(counting(code), bad, tokenizer, make_env=make), episodes(1), tokenizer)
    assert failed.kind == "env_raised" and "nine" in failed.episode.error


@pytest.mark.parametrize(("policy", "prompts"), [("end", 1), ("truncate", 2)])
def test_a_message_that_does_not_fit_ends_the_episode_or_is_cut(tokenizer, policy, prompts):
    scripts = {0: Script(tokenizer, ("12345678",)), 1: Script(tokenizer, ("9",))}
    limits = Limits(prompt=10, response=12, long_context=policy)
    game = game_of(chain(2), scripts, tokenizer, limits)
    (one,) = play(game, episodes(1), tokenizer)
    assert one.full == (policy == "end") and one.kind is None
    rows = [rows_of(game.plan, agent, [one], prompts_of(1), 1) for agent in (0, 1)]
    assert [len(table) for table in rows] == ([1, 0] if policy == "end" else [1, 1])
    if policy == "truncate":
        assert tokenizer.decode(rows[1]["prompt_ids"][0], skip_special_tokens=True) == "q1234"
        assert one.contexts[1].num_truncated == 1


def test_a_full_response_goes_on_in_a_new_row(tokenizer):
    scripts = {0: Script(tokenizer, ("123", "456")), 1: Script(tokenizer, ("7", "8"))}
    limits = Limits(prompt=32, response=8)
    game = game_of(chain(2, agent_1={"loop": {"max_turns": 2}}), scripts, tokenizer, limits)
    rows = rows_of(game.plan, 0, play(game, episodes(1), tokenizer), prompts_of(1), 1)
    assert rows["turn_id"].tolist() == [[0] * 4, [2] * 4]
    assert tokenizer.decode(rows["prompt_ids"][1], skip_special_tokens=True) == "q1237"
