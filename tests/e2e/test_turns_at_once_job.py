"""dag_templates/debate_rounds.yaml by the command: turns at once are as those one after another."""

import json
from pathlib import Path

import yaml
from job_harness import ROOT, Inputs, overrides, run_job

TEMPLATE = ROOT / "dag_templates" / "debate_rounds.yaml"
HIDES = '''
def pre_process(messages, episode):
    """What a debater of a chain would read if all of a round spoke at once: rounds before this one, its own
    statement of a round before the others'."""
    prompt = [one for one in messages if one["role"] == "user"][:1]
    own = [one for one in messages if one["role"] == "assistant"]
    said = [one for one in episode.messages if one.agent is not None]
    seen = prompt
    for round_ in range(len(own)):
        others = [one for one in said[3 * round_ : 3 * round_ + 3] if one.agent != episode.speaker]
        seen = [*seen, own[round_], *({"role": "user", "content": one.content} for one in others)]
    return seen
'''
KEYS = [
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.total_training_steps=2"),
    *("data.max_prompt_length=64", "data.max_response_length=160", "trainer.export_hf=False"),
    *("actor_rollout_ref.rollout.agent.max_turn_tokens=16", "actor_rollout_ref.rollout.n=2"),
    *("actor_rollout_ref.rollout.stop_token_ids=[5,6,7,8]", "data.train_batch_size=4"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
]


def one_after_another(folder: Path) -> list[str]:
    """The template as a chain, whose debaters are shown what they would read at once."""
    (folder / "hides.py").write_text(HIDES)
    dag = yaml.safe_load(TEMPLATE.read_text())
    for number, node in enumerate(dag["nodes"][:3]):
        node["agent_options"] = {"process_path": str(folder / "hides.py")}
        node["dependencies"] = [f"debater_{number - 1}"] if number else []
    dag["nodes"][2]["loop"]["to"] = "debater_0"
    (folder / "dag.yaml").write_text(yaml.safe_dump(dag))
    return [f"dag.workflow_path={folder / 'dag.yaml'}"]


def test_debaters_at_once_say_and_learn_what_they_would_one_after_another(tmp_path):
    inputs, found = Inputs.make(tmp_path / "inputs", rows=40), {}
    for name in ("chain", "at_once"):
        folder = tmp_path / name
        folder.mkdir()
        workflow = one_after_another(folder) if name == "chain" else [f"dag.workflow_path={TEMPLATE}"]
        keys = [*KEYS, *workflow, f"trainer.rollout_data_dir={folder / 'rows'}"]
        run = run_job(1, overrides(inputs, folder / "out", *keys), 200)
        lines = [line for file in sorted((folder / "rows").glob("*.jsonl")) for line in file.open()]
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 2 * 4 * 2 and len(rows[0]["messages"]) == 1 + 3 * 2
        said = sorted(json.dumps(row, sort_keys=True) for row in rows)
        turns = run.values("agent_0/interaction/turns")
        assert turns == [6, 6] and run.values("agent_0/interaction/agent_2/rows") == [1, 1]
        found[name] = said, {key: value.tolist() for key, value in run.weights("agent_0.actor").items()}
    assert found["chain"][0] == found["at_once"][0]
    assert found["chain"][1] == found["at_once"][1]
