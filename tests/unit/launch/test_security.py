"""What `siirl check --security` says of a configuration, and that a run refuses to be open to strangers."""

import re

import pytest

from siirl.cli import main
from siirl.config.load import load_config
from siirl.errors import ConfigError
from siirl.launch import worker_entry
from siirl.sandbox.box import strongest_isolation

pytestmark = pytest.mark.heavy

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")
TOOL = """
tools:
  - builtin: calculator
  - mcp: {command: python server.py}
  - mcp: {url: http://tools.example/mcp}
  - function: tools.py:shout
    tool_schema: {type: function, function: {name: shout, parameters: {type: object}}}
"""


def lines_of(capsys, *overrides):
    """subject -> (whether it is open, the rest), of `siirl check --security`."""
    command = ["check", "--elsewhere", "--security", "actor_rollout_ref.model.path=nobody/model"]
    assert main([*command, "trainer.n_gpus_per_node=2", "trainer.device=cpu", *overrides]) == 0
    out = capsys.readouterr().out
    found = re.findall(r"^  (open|ok) +(.+?): +(.*)$", out, re.M)
    count = int(re.search(r"^(\d+) open: ", out, re.M)[1])
    assert count == sum(grade == "open" for grade, _, _ in found)
    return {what: (grade == "open", text) for grade, what, text in found}


def test_a_check_says_what_is_open_and_how_to_close_it(public_path, capsys, monkeypatch):
    reward = public_path / "reward.py"
    reward.write_text(REWARD)
    reward.chmod(0o666)
    (public_path / "out").mkdir(mode=0o755)
    said = lines_of(
        capsys,
        f"custom_reward_function.path={reward}",
        f"trainer.output_dir={public_path}/out",
        "trainer.logger=[prometheus]",
        "reward_model.reward_manager=naive",
        "reward_model.sandbox_fusion.url=http://boxes.example/run",
    )
    assert (
        said["torch's store"][0]
        and "127.0.0.1: users and programs of this machine" in said["torch's store"][1]
    )
    assert said["metrics"] == (
        True,
        "127.0.0.1:9464: users and programs of this machine; no token. Set trainer.prometheus_token_env.",
    )
    assert (
        said["reward_model.sandbox_fusion.url"][0] and "https" in said["reward_model.sandbox_fusion.url"][1]
    )
    assert said[str(reward)][0] and "in reward processes of each rank" in said[str(reward)][1]
    assert said["code"][0] and "others can write: all users may write to it" in said["code"][1]
    assert said["trainer.output_dir"][0] and "chmod 700" in said["trainer.output_dir"][1]
    sandbox = said["programs that a model writes (code rewards, the tool python)"]
    assert sandbox[0] == bool(strongest_isolation().gaps()) and strongest_isolation().mode in sandbox[1]

    (public_path / "out").chmod(0o773)
    said = lines_of(capsys, f"trainer.output_dir={public_path}/out")
    assert said["who can write trainer.output_dir"][0]

    reward.chmod(0o644)
    (public_path / "out").chmod(0o700)
    monkeypatch.setenv("METRICS_TOKEN", "secret")
    said = lines_of(
        capsys,
        f"custom_reward_function.path={reward}",
        f"trainer.output_dir={public_path}/out",
        "trainer.logger=[prometheus]",
        "trainer.prometheus_token_env=METRICS_TOKEN",
        "reward_model.sandbox_fusion.url=https://boxes.example/run",
    )
    closed = ("metrics", "reward_model.sandbox_fusion.url", "trainer.output_dir")
    assert (
        not any(said[what][0] for what in closed)
        and not {"code", "who can write trainer.output_dir"} & said.keys()
    )


def test_tools_environments_and_programs_are_named_with_where_they_run(tmp_path, capsys):
    (tmp_path / "tools.py").write_text("def shout(): return 'x'\n")
    (tmp_path / "tools.yaml").write_text(TOOL)
    (tmp_path / "env.py").write_text(
        "class World:\n    def reset(self, task, seed): ...\n    def step(self, actions): ...\n"
    )
    said = lines_of(
        capsys,
        *GRPO,
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        f"actor_rollout_ref.rollout.agent.env_path=[{tmp_path}/env.py:World]",
        "actor_rollout_ref.rollout.agent.obs_with_env=true",
        "actor_rollout_ref.rollout.agent.rewards_with_env=true",
    )
    assert "threads of the workers" in said[f"environment {tmp_path}/env.py:World"][1]
    assert f"{tmp_path}/env.py:World" not in said
    assert "a process beside each worker" in said["MCP server 'python server.py'"][1]
    assert said["MCP server http://tools.example/mcp"][0]
    assert "threads of the workers" in said[f"tool {tmp_path}/tools.py:shout"][1]
    said = lines_of(capsys, "actor_rollout_ref.serve.command=agent --fast", *GRPO)
    assert "a process for each episode" in said["program 'agent --fast'"][1]
    assert said["endpoint of programs"] == (
        False,
        "127.0.0.1: users and programs of this machine; asks for the token of an episode",
    )
    listens = ("actor_rollout_ref.serve.listen=true", *GRPO)
    is_open, text = lines_of(capsys, *listens)["endpoint of clients"]
    assert not is_open and text.endswith("asks for the token of the run, then of an episode")
    text = lines_of(capsys, *listens, "actor_rollout_ref.serve.address=0.0.0.0:8100")["endpoint of clients"][
        1
    ]
    assert "whoever reaches the machine" in text and "not encrypted" in text


def test_ray_and_several_machines_are_open_to_their_network(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    both = ("trainer.nnodes=2", "trainer.launcher=ray")
    assert lines_of(capsys, *both)["Ray"][0]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    said = lines_of(capsys, *both)
    assert not said["Ray"][0]
    assert "whoever reaches the machine" in said["gloo, of each rank"][1]


@pytest.mark.parametrize(
    ("host", "allowed", "refused"),
    [
        ("8.8.8.8", False, True),
        ("8.8.8.8", True, False),
        ("10.1.2.3", False, False),
        ("2600::1", False, True),
    ],
)
def test_workers_do_not_meet_on_an_address_of_the_internet(monkeypatch, host, allowed, refused):
    cfg = load_config([f"trainer.behind_firewall={allowed}"])
    monkeypatch.setattr(worker_entry, "own_host", lambda: host)
    if refused:
        with pytest.raises(ConfigError, match=rf"listen on {host}, .*trainer.behind_firewall=true"):
            worker_entry.refuse_public(cfg)
    else:
        worker_entry.refuse_public(cfg)


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "10.0.0.1:9464", "[::]:9464", "node7:9464"])
def test_metrics_for_other_machines_need_a_token(address, capsys, monkeypatch):
    overrides = ["trainer.logger=[prometheus]", f"trainer.prometheus_address={address}"]
    command = ["check", "--elsewhere", "actor_rollout_ref.model.path=nobody/model", *overrides]
    assert main(command) == 2
    assert "without a token" in capsys.readouterr().err
    assert main([*command, "trainer.prometheus_token_env=METRICS_TOKEN"]) == 0


def test_the_store_of_an_sglang_engine_is_open_and_vllm_has_none(capsys):
    said = lines_of(capsys, "actor_rollout_ref.rollout.name=sglang")
    assert said["SGLang"][0] and "all addresses" in said["SGLang"][1] and "vLLM" not in said
    said = lines_of(capsys, "actor_rollout_ref.rollout.name=vllm")
    assert not said["vLLM"][0] and "SGLang" not in said
