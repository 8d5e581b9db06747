"""`siirl test` on conversations: tools, environments, several agents, and jobs that no machine holds."""

import pytest
from faults_page import not_listed
from fixtures_tiny import make_arithmetic_parquet, make_tiny_model_dir
from some_cases import some

from siirl.testing.assertions import judged, require
from siirl.testing.trial import play

LAST = "\n    return 1.0 if solution_str.strip() == str(ground_truth) else len(set(solution_str)) / 100\n"
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
TOOLS = """
tools:
  - function: tools.py:look_up
    tool_schema:
      type: function
      function:
        name: look_up
        description: the answer
        parameters: {type: object, properties: {key: {type: string}}, required: [key]}
"""
CALL = '<tool_call>{"name": "NAME", "arguments": {"ARG": "a"}}</tool_call>'
GAME = """
import random
from siirl.agents.environments import Observation, StepResult

class Game:
    def reset(self, task, seed):
        self.answer, self.tries = str(task["ground_truth"]), 0
        RESET
        return Observation("")

    def step(self, actions):
        ((agent, said),) = actions.items()
        self.tries += 1
        right = said.strip() == self.answer
        reward = 1.0 if right else len(set(said)) / 100
        STEP
        return StepResult("" if right else "no", {agent: reward}, right or self.tries == 2)
"""
GAME_DAG = """
dag_id: game
nodes:
  - {node_id: player, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: room, node_type: ENV_INTERACT, dependencies: [player], loop: {to: player, max_turns: 2},
     config: {env_path: "FOLDER/game.py:Game", rewards_with_env: REWARDS}}
  - {node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [room]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantage]}
"""
USED, DIFFER, COUNTS = (
    "tools and environments are used",
    "rewards are numbers that differ",
    "what an agent says counts",
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    models = [make_tiny_model_dir(folder / f"model_{seed}", vocab=106, seed=seed) for seed in (0, 1)]
    train = make_arithmetic_parquet(folder / "train.parquet", 32)
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={models[0]}",
        "actor_rollout_ref.rollout.n=4",
        f"data.train_files={train}",
        "data.max_prompt_length=256",
        "data.max_response_length=160",
    ], models


def failed(settings, folder, said, only=("alone",)):
    answers = folder / "answers.yaml"
    answers.write_text(said)
    verdicts = judged(play(settings, folder / "out", answers=str(answers) if said else None, only=only))
    return {name: one.evidence for name, one in verdicts.items() if one.status == "FAIL"}


def rewarded(folder, body):
    (folder / "reward.py").write_text(HEAD + body)
    return f"custom_reward_function.path={folder / 'reward.py'}"


TOOL_FAULTS = {
    "a sound one": ("'7'", CALL, None),
    "a tool that raises": ("1 / 0", CALL, "raised"),
    "a tool that hangs": ("__import__('time').sleep(9)", CALL, "hung"),
    "calls of another name": ("'7'", CALL.replace("NAME", "lookup"), "unknown"),
    "calls with other arguments": ("'7'", CALL.replace("ARG", "name"), "arguments"),
    "calls in another format": ("'7'", "look_up(key)", "calls look_up: that is not tested"),
}


@pytest.mark.parametrize("name", some(TOOL_FAULTS, "a tool that raises"))
def test_a_tool_that_does_not_answer_is_named(name, keys, tmp_path):
    value, call, told = TOOL_FAULTS[name]
    (tmp_path / "tools.py").write_text(f"def look_up(key):\n    return {value}\n")
    (tmp_path / "tools.yaml").write_text(TOOLS)
    call = call.replace("NAME", "look_up").replace("ARG", "key")
    multi = "actor_rollout_ref.rollout.multi_turn"
    settings = [
        *keys[0],
        rewarded(tmp_path, LAST),
        f"{multi}.enable=True",
        f"{multi}.tool_config_path={tmp_path / 'tools.yaml'}",
        f"{multi}.format=hermes",
        f"{multi}.max_assistant_turns=2",
        f"{multi}.tool_timeout_s=1",
    ]
    found = failed(
        settings, tmp_path, f"'*': [['{call}', '{{ground_truth}}'], ['{call}', 'no'], null, '8 or 9']"
    )
    assert list(found) == ([USED] if told else []), found
    assert told is None or told in found[USED]


GAME_FAULTS = {
    "a sound one": ("pass", "pass", "true", None),
    "an environment that fails for some rows": (
        "assert int(self.answer) % 2, 'no licence'",
        "pass",
        "true",
        USED,
    ),
    "an environment that gives the same for all": ("pass", "reward = 0.0", "true", DIFFER),
    "an environment whose rewards are not used": ("pass", "pass", "false", DIFFER),
    "an environment that draws without the seed": (
        "pass",
        "reward = random.SystemRandom().random()",
        "true",
        "one rank equals two",
    ),
    "an environment that gives no number": ("pass", "reward = 'one' if right else 0.0", "true", USED),
}


@pytest.mark.parametrize("name", some(GAME_FAULTS))
def test_an_environment_that_does_not_reward_is_named(name, keys, tmp_path):
    reset, step, rewards, assertion = GAME_FAULTS[name]
    (tmp_path / "game.py").write_text(GAME.replace("RESET", reset).replace("STEP", step))
    text = GAME_DAG.replace("FOLDER", str(tmp_path)).replace("REWARDS", rewards)
    (tmp_path / "game.yaml").write_text(text)
    settings = [*keys[0], f"dag.workflow_path={tmp_path / 'game.yaml'}"]
    only = ("alone", "two_ranks") if assertion == "one rank equals two" else ("alone",)
    found = failed(settings, tmp_path, "'*': ['{ground_truth}', 'no', '8 or 9', null]", only)
    if "number" in name:  # which takes rows from groups, too
        assert USED in found
    else:
        assert list(found) == ([assertion] if assertion else []), found


BESIDE = {
    "a reward of 0 beside a game that rewards": ("pass", None),
    "a reward of 0 beside a game that gives the same": ("reward = float(self.tries == 1)", DIFFER),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_a_reward_that_is_zero_needs_others_that_differ(name, keys, tmp_path):
    """Also where the estimator compares nothing, so that no sum of a group is looked at."""
    step, assertion = BESIDE[name]
    (tmp_path / "game.py").write_text(GAME.replace("RESET", "pass").replace("STEP", step))
    text = GAME_DAG.replace("FOLDER", str(tmp_path)).replace("REWARDS", "true")
    scored = "  - {node_id: score, node_type: COMPUTE, node_role: REWARD, dependencies: [room]}\n"
    place = text.index("  - {node_id: advantage")
    text = text[:place] + scored + text[place:].replace("[room]", "[score]")
    (tmp_path / "game.yaml").write_text(text)
    settings = [
        *keys[0],
        f"dag.workflow_path={tmp_path / 'game.yaml'}",
        "algorithm.adv_estimator=reinforce_plus_plus",
        rewarded(tmp_path, "    return 0.0\n"),
    ]
    found = failed(settings, tmp_path, "'*': ['{ground_truth}', 'no', '8 or 9', null]")
    assert list(found) == ([assertion] if assertion else []), found


OWN = """
    said = [one["content"] for one in extra_info["conversation"] if one["agent"] == extra_info["agent"]]
    return float(said[-1].strip() == str(ground_truth)) + len(said[-1]) / 100
"""
TALK_FAULTS = {
    "a sound one": (OWN, (), None),
    "a reward that reads the solver for both agents": (
        OWN.replace('== extra_info["agent"]', "== 0"),
        (),
        COUNTS,
    ),
    "a reward that reads the verifier for both agents": (
        OWN.replace('== extra_info["agent"]', "== 1"),
        (),
        COUNTS,
    ),
    "a reward that reads the last message for both agents": (
        OWN.replace('if one["agent"] == extra_info["agent"]', ""),
        (),
        COUNTS,
    ),
    "a turn that is cut": (
        OWN,
        ("dag.node_config.verifier.rollout.agent.max_turn_tokens=2",),
        "answers are whole",
    ),
}


@pytest.mark.parametrize("name", some(TALK_FAULTS, "a reward that reads the solver for both agents"))
def test_a_fault_of_two_agents_is_named(name, keys, tmp_path):
    body, more, assertion = TALK_FAULTS[name]
    settings = [
        "dag.workflow_path=dag_templates/solver_verifier.yaml",
        *keys[0],
        f"dag.node_config.verifier.model.path={keys[1][1]}",
        rewarded(tmp_path, body),
        *more,
    ]
    found = failed(settings, tmp_path, '"*": ["#### {ground_truth}", null]' if more else "")
    if more:  # what is cut earns the same, too
        assert assertion in found
    else:
        assert list(found) == ([assertion] if assertion else []), found


def test_the_page_lists_each_fault():
    faults = [(name, USED) for name, case in TOOL_FAULTS.items() if case[-1]]
    for table in (GAME_FAULTS, BESIDE, TALK_FAULTS):
        faults += [(name, case[-1]) for name, case in table.items() if case[-1]]
    faults += [("a template that writes earlier turns anew", "the template keeps what it wrote")]
    assert not not_listed([*faults, ("a model that no device holds", "the real job fits")])


@pytest.mark.slow
def test_a_template_that_writes_earlier_turns_anew_is_named_where_rows_go_on(keys, tmp_path):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(keys[1][0], model)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message['role'] }}>"
        "{% if message['role'] == 'assistant' and not loop.last %}({% endif %}"
        "{{ message['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "game.py").write_text(GAME.replace("RESET", "pass").replace("STEP", "pass"))
    text = GAME_DAG.replace("FOLDER", str(tmp_path)).replace("REWARDS", "true")
    (tmp_path / "game.yaml").write_text(text)
    settings = [
        *keys[0],
        f"dag.workflow_path={tmp_path / 'game.yaml'}",
        f"actor_rollout_ref.model.path={model}",
    ]
    found = failed(
        [*settings, "actor_rollout_ref.rollout.agent.history=grow"], tmp_path, "'*': ['{ground_truth}', no]"
    )
    assert list(found) == ["the template keeps what it wrote"], found


def test_a_job_that_no_device_holds_is_tested_and_told(keys, tmp_path):
    large = make_tiny_model_dir(
        tmp_path / "large", vocab=106, hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672, weights=False
    )
    settings = [
        *keys[0],
        rewarded(tmp_path, LAST),
        f"actor_rollout_ref.model.path={large}",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=1",
        "trainer.device_memory_gib=80",
    ]
    trial = play(settings, tmp_path / "out", only=("alone",))
    found = {name: one.evidence for name, one in judged(trial).items() if one.status == "FAIL"}
    assert list(found) == ["the real job fits"] and "80 GiB" in found["the real job fits"], found
    require(trial, ["credit adds up"])
    with pytest.raises(AssertionError, match=r"(?s)the real job fits: .*80 GiB"):
        require(trial)
