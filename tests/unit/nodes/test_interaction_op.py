"""The ops of an interaction: what the configuration makes of it, which episodes it plays, what it reports."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from episode_cases import END, Letters, text_of
from plan_cases import add_agent, compiled, config

from siirl.config import with_overrides
from siirl.dag.spec import DagBuilder
from siirl.data.completions import Completion
from siirl.data.rows import make_rows, objects
from siirl.errors import DataError, EpisodeFailed, RolloutError, UserError
from siirl.nodes.interaction import build_interaction, interaction, turns
from siirl.observe.metrics import Metrics
from siirl.types import branching_turn


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Episodes that failed, and that were played, on other ranks; a test may change them."""
    counts = [0.0, 0.0]
    monkeypatch.setattr(
        "siirl.nodes.interaction.sum_over_ranks", lambda ctx, totals: totals + torch.tensor(counts)
    )
    return counts


CODE = """
import time

from siirl.agents.environments import StepResult

def pre_process(messages, episode, mark):
    return [*messages, {"role": "system", "content": mark}]

def post_process(text, episode, tail):
    return text + tail

def over(episode):
    return episode.visits["rollout_1"] == 2

class Game:
    def __init__(self, first, nap_s=0):
        self.first, self.nap_s = first, nap_s

    def reset(self, task, seed):
        return self.first

    def step(self, actions):
        time.sleep(self.nap_s)
        return StepResult("", {0: 0.5}, True)

class Alone(Game):
    others = 0

    def step(self, actions):
        Alone.others += 1
        time.sleep(0.05)
        Alone.others -= 1
        return StepResult("", {0: float(Alone.others)}, True)

class Dealer(Game):
    def reset(self, task, seed):
        return f"card {seed}"
"""
ROLLOUT = "actor_rollout_ref.rollout"


def room(prompt: int, response: int) -> tuple[str, ...]:
    """Overrides: most tokens of a row's prompt and response."""
    lengths = {"prompt": prompt, "response": response}
    return tuple(
        f"{key}={length}"
        for name, length in lengths.items()
        for key in (f"data.max_{name}_length", f"{ROLLOUT}.{name}_length")
    )


SMALL = (
    f"{ROLLOUT}.n=2",
    *room(60, 40),
    f"{ROLLOUT}.temperature=0.7",
    f"{ROLLOUT}.stop_token_ids=[9]",
    f"{ROLLOUT}.val_kwargs.n=3",
    f"{ROLLOUT}.val_kwargs.do_sample=true",
    f"{ROLLOUT}.val_kwargs.temperature=0.5",
)


class Says:
    """A policy that says its text to each prompt; what it was asked is in `asked`."""

    def __init__(self, text, fails=(), cut=None):
        self.text, self.fails, self.cut, self.asked = text, fails, cut, []

    async def generate(self, prompt, params, seed, seen=None):
        self.asked.append(SimpleNamespace(read=text_of(prompt), params=params, seed=seed))
        for word in self.fails:
            if word in text_of(prompt):
                raise EpisodeFailed(f"cannot say {word}", "endpoint")
        tokens = [*map(ord, self.text), END][: self.cut]
        return Completion(tokens, [-1.0] * len(tokens), "stop" if self.cut is None else "length", 4)


class OneRank:
    """Streams where each policy is at hand."""

    def __init__(self, policies):
        self.policies = policies

    def shares(self, policy):
        return (1,)

    @contextmanager
    def step(self):
        yield {}

    @contextmanager
    def open(self):
        yield {f"agent_{agent}.rollout": (policy,) for agent, policy in enumerate(self.policies)}


def drained():
    metrics = Metrics()
    metrics.sum("rollout/drained", 3)
    return metrics


def pair(first=None, second=None, env=None) -> DagBuilder:
    dag = DagBuilder("pair")
    above = add_agent(dag, 0, **(first or {}))["rollout"]
    add_agent(dag, 1, dependencies=[above], **(second or {}))
    if env is not None:
        dag.node("game", "ENV_INTERACT", dependencies=["rollout_1"], **env)
    return dag


class Played:
    """An interaction of two agents on one rank; a step of it gives the rows of each, and the metrics."""

    def __init__(self, dag, policies, *overrides, vocabulary=None, tokenizer=None):
        plan = compiled(dag.build(), 1, *SMALL, *overrides)
        self.cfgs = {
            f"rollout_{agent}": with_overrides(
                config(*SMALL, *overrides), plan.nodes[f"rollout_{agent}"].overrides
            )
            for agent in (0, 1)
        }
        engines = {
            f"agent_{agent}.rollout": SimpleNamespace(
                vocabulary=vocabulary if agent else None, drain_metrics=drained
            )
            for agent in (0, 1)
        }
        tokenizers = {node: tokenizer or Letters() for node in self.cfgs}
        self.shared = build_interaction(
            plan.interactions["rollout_0"], self.cfgs, tokenizers, engines, OneRank(policies)
        )

    def step(self, prompts="qr", step=1, validate=False, round=0, agents=(0, 1)):
        rows = make_rows(
            {
                "group_id": [6 - 2 * index for index in range(len(prompts))],
                "sample_index": [50 + index for index in range(len(prompts))],
                "prompt_ids": [[*map(ord, f"u:{text}"), END, *map(ord, "a:")] for text in prompts],
                "prompt_length": [6] * len(prompts),
                "raw_prompt": [[{"role": "user", "content": text}] for text in prompts],
                "data_source": ["s"] * len(prompts),
                "ground_truth": list(prompts),
                "extra_info": [None] * len(prompts),
            }
        )
        metrics, others = Metrics(), Metrics()
        found = []
        for agent in agents:
            ctx = SimpleNamespace(
                node_id=f"rollout_{agent}", agent=agent, cfg=self.cfgs[f"rollout_{agent}"], step=step,
                validate=validate, round=round, lost=[], metrics=metrics if agent == 0 else others,
            )  # fmt: skip
            called = ctx, rows, self.shared
            found.append(turns(*called) if agent else interaction(*called, in_flight=None))
        metrics.merge(others, "agent_1/")
        return found, metrics.values()


def test_each_prompt_has_its_samples_with_seeds_of_their_own_and_validations_others():
    policies = Says("one"), Says("two")
    played = Played(pair(), policies)
    rows, values = played.step()
    for agent, of_agent in enumerate(rows):
        assert of_agent["group_id"].tolist() == [6, 6, 4, 4]
        assert of_agent["episode_id"].tolist() == [12, 13, 8, 9]
        assert of_agent["sample_index"].tolist() == [50, 50, 51, 51]
        assert of_agent["speaker"].tolist() == [agent] * 4
        assert objects(of_agent, "ground_truth") == ["q", "q", "r", "r"]
    assert [one.read for one in policies[0].asked] == ["u:q/a:", "u:q/a:", "u:r/a:", "u:r/a:"]
    params = policies[0].asked[0].params
    assert (params.n, params.max_tokens, params.temperature, params.stop_token_ids) == (1, 40, 0.7, (END, 9))
    assert values["interaction/episodes"] == 4 and values["rollout/drained"] == 6

    def seeds():
        return [one.seed for policy in policies for one in policy.asked]

    first = seeds()
    assert len(set(first)) == 8
    for again in ({"step": 2}, {"validate": True}, {"round": 2}, {}):
        for policy in policies:
            policy.asked.clear()
        rows, values = played.step(**again)
        assert set(seeds()).isdisjoint(first) == bool(again), again
        if "validate" in again:
            assert rows[1]["episode_id"].tolist() == [18, 19, 20, 12, 13, 14]
            assert policies[0].asked[0].params.temperature == 0.5
            assert values["val/interaction/episodes"] == 6 and "interaction/episodes" not in values


def test_each_agent_has_the_code_and_the_limits_of_its_own_node(tmp_path):
    code = tmp_path / "code.py"
    code.write_text(CODE)
    options = {
        "process_path": str(code),
        "pre_process_kwargs": {"mark": "be brief"},
        "post_process_kwargs": {"tail": "?"},
    }
    second = {
        "agent_options": options,
        "loop": {"max_turns": 5, "until": f"{code}:over"},
        "config": {"rollout.agent.max_turn_tokens": 8, "rollout.temperature": 0.3},
    }
    policies = Says("one"), Says("two")
    Played(pair(second=second), policies).step("q")
    assert {one.read for one in policies[0].asked} == {"u:q/a:", "u:q/a:one/u:two?/a:"}
    assert {one.read for one in policies[1].asked} == {
        "u:q/u:one/s:be brief/a:",
        "u:q/u:one/a:two/u:one/s:be brief/a:",
    }
    assert {(one.params.max_tokens, one.params.temperature) for one in policies[1].asked} == {(8, 0.3)}
    assert policies[0].asked[0].params.max_tokens == 40


def test_an_environment_has_the_arguments_and_the_deadline_of_its_node(tmp_path):
    code = tmp_path / "code.py"
    code.write_text(CODE)
    env = {"config": {"env_path": f"{code}:Game", "env_kwargs": {"first": "go"}}}
    policies = Says("one"), Says("two")
    rows, values = Played(pair(env=env), policies).step()
    assert {one.read for one in policies[0].asked} == {"u:q/u:go/a:", "u:r/u:go/a:"}
    assert rows[0]["env_reward"].sum(-1).tolist() == [0.5] * 4 and not rows[1]["env_reward"].any()
    assert values["interaction/env_done"] == 1 and values["interaction/turn_0/env_reward"] == 0.5
    env["config"] |= {"env_kwargs": {"first": "go", "nap_s": 5}, "deadline_s": 0.1}
    with pytest.raises(RolloutError, match=r"4 of 4 episodes failed.*step: no answer within 0\.1 s"):
        Played(pair(env=env), policies).step()


def test_as_many_environments_run_at_once_as_their_node_says(tmp_path):
    code = tmp_path / "code.py"
    code.write_text(CODE)
    env = {"config": {"env_path": f"{code}:Alone", "env_kwargs": {"first": ""}, "max_concurrent": 1}}
    rows, _ = Played(pair(env=env), (Says("one"), Says("two"))).step()
    assert rows[0]["env_reward"].sum(-1).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("env_seed", "in_training", "in_validation"), [("sample", 4, 6), ("prompt", 2, 2), (None, 4, 6)]
)
def test_environments_draw_by_sample_or_by_prompt_and_validations_draw_the_same_again(
    tmp_path, env_seed, in_training, in_validation
):
    code = tmp_path / "code.py"
    code.write_text(CODE)
    env = {"config": {"env_path": f"{code}:Dealer", "env_kwargs": {"first": ""}}}
    env["config"] |= {"env_seed": env_seed} if env_seed else {}
    policies = Says("one"), Says("two")
    played = Played(pair(env=env), policies)

    def cards(**which):
        """What the first agent was shown, of which prompt."""
        policies[0].asked.clear()
        played.step(**which)
        return {one.read for one in policies[0].asked}

    first, second = cards(step=1), cards(step=2)
    assert len(first) == len(second) == in_training and first.isdisjoint(second)
    assert len({text.split("card ")[1] for text in first}) == in_training, "two prompts have one seed"
    validated = cards(step=1, validate=True)
    assert len(validated) == in_validation and validated.isdisjoint(first)
    assert cards(step=9, validate=True) == validated


def test_failed_episodes_are_counted_and_dropped_unless_all_of_them_fail(caplog, elsewhere):
    played = Played(pair(), (Says("one"), Says("two", fails="r")))
    with caplog.at_level("WARNING"):
        rows, values = played.step()
    assert [of_agent["episode_id"].tolist() for of_agent in rows] == [[12, 13], [12, 13]]
    assert values["interaction/failed"] == 0.5 and values["interaction/failed/endpoint"] == 2
    assert values["interaction/episodes"] == 4 and values["interaction/rollout_0/turns"] == 1
    text = "2 of 4 episodes failed in step 1, the first (s, row 51) at node 'rollout_1': cannot say r"
    assert text in caplog.text
    with pytest.raises(RolloutError, match=r"2 of 2 .*'rollout_1': cannot say r\. Nothing is left"):
        played.step("r")
    elsewhere[:] = 1, 3
    with caplog.at_level("WARNING"):
        rows, values = played.step("r")
    assert [len(of_agent) for of_agent in rows] == [0, 0] and values["interaction/failed"] == 1
    assert "2 of 2 episodes of this rank failed" in caplog.text
    elsewhere[:] = 3, 3
    with pytest.raises(RolloutError, match="2 of 2 episodes of this rank failed"):
        played.step("r")


@pytest.mark.parametrize(
    ("step", "when"), [(0, "the validation before training"), (3, "the validation after step 3")]
)
def test_an_environment_that_fails_every_episode_is_the_users_error_and_named(tmp_path, step, when):
    code = tmp_path / "code.py"
    code.write_text(CODE.replace("return self.first", 'return self.first[task["floor"]]'))
    env = {"config": {"env_path": f"{code}:Game", "env_kwargs": {"first": "go"}}}
    played = Played(pair(env=env), (Says("one"), Says("two")))
    with pytest.raises(UserError) as caught:
        played.step(validate=True, step=step)
    assert str(caught.value) == (
        f"6 of 6 episodes failed in {when}, the first (s, row 50) at node 'game': Game.reset raised "
        f"KeyError: 'floor' ({code}, line 20). Nothing is left to score."
    )


@pytest.mark.parametrize("policy", ["end", "truncate"])
def test_what_does_not_fit_ends_the_episode_or_is_cut_as_the_node_says_and_is_counted(policy, caplog):
    keys = (f"{ROLLOUT}.agent.long_context={policy}", *room(12, 40))
    played = Played(pair(), (Says("a long sentence"), Says("two")), *keys)
    rows, values = played.step()
    cut = policy == "truncate"
    assert [len(of_agent) for of_agent in rows] == [4, 4 if cut else 0]
    assert values["interaction/context_full"] == float(not cut) and values["interaction/failed"] == 0
    assert values["interaction/agent_1/cut_messages"] == float(cut)
    assert values["interaction/agent_1/rows"] == values["interaction/rollout_1/turns"] == float(cut)
    why = "" if cut else "what rollout_1 reads (24 tokens) does not fit data.max_prompt_length=12"
    assert {extra["ended"] for extra in objects(rows[0], "extra_info")} == {why}
    assert played.step()[1]["interaction/context_full"] == float(not cut)
    said = [record.getMessage() for record in caplog.records]  # in the first of two steps
    assert ["4 of 4 episodes in step 1" in text and why in text for text in said] == ([] if cut else [True])


def test_what_is_reported_of_turns_agents_and_their_length():
    loop = {"loop": {"max_turns": 2}}
    _, values = Played(pair(second=loop), (Says("one"), Says("three"))).step("q")
    lengths = {name: value for name, value in values.items() if name.endswith("/length")}
    assert lengths == {
        "interaction/rollout_0/length": 4,
        "interaction/rollout_1/length": 6,
        "interaction/turn_0/length": 4,
        "interaction/turn_1/length": 6,
        "interaction/turn_2/length": 4,
        "interaction/turn_3/length": 6,
    }
    assert values["interaction/turns"] == values["interaction/turns_max"] == 4
    assert values["interaction/rollout_1/turns"] == 2 and values["interaction/agent_1/rows"] == 1
    assert values["interaction/turn_3/finished"] == 1 and values["interaction/env_done"] == 0


def test_rows_are_truncated_where_the_response_is_full_not_where_a_turn_is_cut():
    def truncated(length, limit):
        played = Played(pair(), (Says("one"), Says("two", cut=limit)), *room(60, length))
        metrics = played.step("q")[1]
        return metrics["agent_1/rollout/truncated"], metrics["interaction/rollout_1/finished"]

    assert truncated(40, None) == (0, 1)
    assert truncated(40, 2) == (0, 0)
    assert truncated(2, 2) == (1, 0)


def test_calls_of_tools_and_what_went_wrong_with_them_are_counted_at_their_node():
    tools = {"config": {"rollout.multi_turn.enable": True, "rollout.multi_turn.max_assistant_turns": 2}}
    calls = '<tool_call>{"name": "search"}</tool_call><tool_call>'
    _, values = Played(pair(second=tools), (Says("one"), Says(calls)), *room(400, 400)).step("q")
    for where in ("interaction", "interaction/rollout_1"):
        assert (values[f"{where}/tool_calls"], values[f"{where}/tool_errors"]) == (4, 4)
    assert values["interaction/tool_errors/unknown"] == values["interaction/tool_errors/malformed"] == 2
    assert "interaction/rollout_0/tool_calls" not in values


def test_an_agent_whose_engine_has_a_vocabulary_of_its_own_reads_and_has_room_by_that():
    class Upper(Letters):
        def encode(self, text, **options):
            return [ord(char) for char in text.upper()]

    policies = Says("one"), Says("two")
    Played(pair(), policies, *room(8, 40), vocabulary=Upper()).step("q")
    assert {one.read for one in policies[1].asked} == {"U:Q/U:ONE/A:"}  # 12 tokens


def test_an_agent_that_shares_a_policy_speaks_with_its_owners_and_its_rows_are_the_owners():
    dag = DagBuilder("debate")
    above = add_agent(dag, 0)["rollout"]
    shares = {"rollout.agent.share_instance": 0}
    dag.node("rollout_1", "MODEL_INFERENCE", "ROLLOUT", agent_group=1, dependencies=[above], config=shares)
    policy = Says("one")
    (rows,), _ = Played(dag, (policy,)).step("q", agents=(0,))
    assert rows["speaker"].tolist() == [0, 1, 0, 1]
    assert sorted(one.read for one in policy.asked) == ["u:q/a:"] * 2 + ["u:q/u:one/a:"] * 2


def test_a_tokenizer_without_a_chat_template_is_refused():
    class Bare(Letters):
        chat_template = None

    with pytest.raises(DataError, match=r"'rollout_0'.*letters has no chat template"):
        Played(pair(), (Says("one"), Says("two")), tokenizer=Bare())


class ByRead(Says):
    """Says a letter by what it read and its seed."""

    async def generate(self, prompt, params, seed, seen=None):
        self.text = "xyz"[(seed + len(prompt)) % 3]
        return await super().generate(prompt, params, seed, seen)


def test_rows_of_branches_have_ids_and_groups_of_their_own_and_validations_none():
    branch = {"rollout.agent.branch": {"candidates": 3, "visits": [0], "go_on": "all"}}
    policies = ByRead(""), ByRead("")
    played = Played(pair(first={"config": branch}), policies)
    rows, values = played.step()
    for of_agent in rows:
        assert of_agent["episode_id"].tolist() == [*range(36, 42), *range(24, 30)]  # (group * 2 + sample) * 3
        assert len(set(of_agent["row_id"].tolist())) == 12
        branches = [set(row) for row in of_agent["branch_id"].tolist()]
        assert all(of_agent["turn_id"].ge(0).eq(of_agent["branch_id"].ge(0)).flatten().tolist())
        groups = [branching_turn(max(found)) for found in branches]
        assert groups == [(first, 0) for first in (36, 39, 24, 27) for _ in range(3)]
    assert len(policies[0].asked) == len({one.seed for one in policies[0].asked}) == 12
    assert values["interaction/branches"] == 8 and values["interaction/episodes"] == 12
    rows, values = played.step(validate=True)
    assert len(rows[0]) == 6 and set(rows[0]["branch_id"].flatten().tolist()) == {-1}
