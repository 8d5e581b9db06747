"""What agents learn in a whole run is what plain Hugging Face and AdamW learn on each one's own segments.

Three agents speak twice: 0 has a policy, 1 another of its own family, tokenizer, chat template and learning
rate, and 2 speaks with the policy of 0.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import job_harness
import pytest
import torch
import train_engine_cases as engines
import yaml
from fixtures_tiny import make_tiny_model_dir
from job_harness import Finished, Inputs, overrides
from torch import Tensor

LR = {0: 1e-2, 1: 3e-3}
STEPS, MINI_BATCHES = 2, 2
TEAM = 0.5
CLIP, DUAL_CLIP, EPS = 0.2, 3.0, 1e-6
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Digits that the agent has said in both of its turns."""
    own = [m["content"] for m in extra_info["conversation"] if m["agent"] == extra_info["agent"]]
    assert len(own) == 2 and solution_str == own[-1]
    return sum(character.isdigit() for text in own for character in text) / 8
'''
MEGATRON = {
    "actor.strategy": "megatron",
    "actor.megatron.tensor_model_parallel_size": 2,
    "actor.megatron.param_dtype": "float32",
}


def dag_nodes(other: Path, of_agent_1: dict[str, Any]) -> list[dict[str, Any]]:
    """of_agent_1: keys of its actor, beside its own learning rate."""
    own = {"model.path": str(other), "actor.optim.lr": LR[1], **of_agent_1}
    talk = {"node_type": "MODEL_INFERENCE", "node_role": "ROLLOUT"}
    nodes = [
        {"node_id": "solver", **talk},
        {"node_id": "verifier", **talk, "agent_group": 1, "dependencies": ["solver"], "config": own},
        {
            "node_id": "editor",
            **talk,
            "agent_group": 2,
            "dependencies": ["verifier"],
            "config": {"rollout.agent.share_instance": 0},
            "loop": {"to": "solver", "max_turns": 2},
        },
    ]
    for agent, speaks in ((0, "solver"), (1, "verifier")):
        common = {"agent_group": agent}
        trains = {**common, "node_type": "MODEL_TRAIN", "node_role": "ACTOR", "config": own if agent else {}}
        nodes += [
            {
                "node_id": f"reward_{agent}",
                **common,
                "node_type": "COMPUTE",
                "node_role": "REWARD",
                "dependencies": ["editor"],
            },
            {"node_id": f"old_{agent}", **trains, "only_forward_compute": True, "dependencies": [speaks]},
        ]
        credit = {"credit.group_by": ["task", "agent"]} | ({} if agent else {"credit.team": TEAM})
        nodes += [
            {
                "node_id": f"advantage_{agent}",
                **common,
                "node_type": "COMPUTE",
                "node_role": "ADVANTAGE",
                "dependencies": ["reward_0", "reward_1"],
                "config": credit,
                **({} if agent else {"reads": ["agent_1.score"]}),
            },
            {"node_id": f"train_{agent}", **trains, "dependencies": [f"advantage_{agent}", f"old_{agent}"]},
        ]
    return nodes


def arguments_of(inputs: Inputs, other: Path, folder: Path, of_agent_1: dict[str, Any]) -> list[str]:
    folder.mkdir(parents=True)
    (folder / "dag.yaml").write_text(
        yaml.safe_dump({"dag_id": "three_agents", "nodes": dag_nodes(other, of_agent_1)})
    )
    (folder / "reward.py").write_text(REWARD)
    return overrides(
        inputs,
        folder / "out",
        f"dag.workflow_path={folder / 'dag.yaml'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.agent.max_turn_tokens=5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"actor_rollout_ref.actor.optim.lr={LR[0]}",
        f"+actor_rollout_ref.actor.optim.override_optimizer_config={{eps:{EPS}}}",
        f"trainer.total_training_steps={STEPS}",
    )


def recorded_work(rank: int, world_size: int, arguments: list[str], output: str) -> None:
    """One worker, which keeps the rows of every optimizer step and the gradients of the first."""
    from siirl.engines.train.fsdp.fsdp_engine import FSDPEngine
    from siirl.engines.train.megatron.engine import MegatronEngine

    Path(output).mkdir(exist_ok=True)
    names: dict[int, str] = {}
    for kind in (FSDPEngine, MegatronEngine):
        _record(kind, names, Path(output), rank)
    job_harness.work(rank, world_size, arguments, output)


def _record(kind: Any, names: dict[int, str], output: Path, rank: int) -> None:
    build, train = kind.__init__, kind.train_mini_batch
    calls: dict[str, int] = defaultdict(int)

    def built(engine: Any, plan: Any, *args: Any) -> None:
        build(engine, plan, *args)
        names[id(engine)] = plan.name

    def trained(engine: Any, rows: Any, *args: Any) -> Any:
        metrics = train(engine, rows, *args)
        name = names[id(engine)]
        kept = {"rows": {key: rows[key] for key in rows.keys() if isinstance(rows[key], Tensor)}}
        if not calls[name]:
            kept["gradients"] = engines.first_step_gradients(engine)
        torch.save(kept, output / f"{name}-{calls[name]}-{rank}.pt")
        calls[name] += 1
        return metrics

    kind.__init__, kind.train_mini_batch = built, trained


@dataclass(frozen=True)
class Row:
    """A row of an optimizer step, without padding."""

    tokens: list[int]
    num_prompt: int
    columns: dict[str, Any]

    def segments(self) -> list[tuple[int, range]]:
        """(turn, positions in the response) of what the agent said, in order."""
        turns = self.columns["turn_id"].tolist()
        return [
            (turn, range(turns.index(turn), len(turns) - turns[::-1].index(turn)))
            for turn in sorted(set(turns) - {-1})
        ]


def rows_of_step(output: Path, agent: int, call: int) -> list[Row]:
    """All rows of an optimizer step, whatever ranks had them."""
    found: dict[int, Row] = {}
    for path in sorted(output.glob(f"agent_{agent}.actor-{call}-*.pt")):
        columns = torch.load(path, weights_only=True)["rows"]
        for index, row_id in enumerate(columns["row_id"].tolist()):
            row = {name: column[index] for name, column in columns.items()}
            num_prompt, num_response = int(row["prompt_length"]), int(row["response_length"])
            prompt = row["prompt_ids"][len(row["prompt_ids"]) - num_prompt :].tolist()
            response = row["response_ids"][:num_response].tolist()
            found[row_id] = Row(prompt + response, num_prompt, row)
    return [found[row_id] for row_id in sorted(found)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of another family; its tokenizer has other ids and writes conversations in another way."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("other") / "model"
    make_tiny_model_dir(path, family="llama", tie=False, vocab=80, init_std=0.2, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def finished(inputs, other, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp") / "run"
    return run_recorded(arguments_of(inputs, other, folder, {}))


def run_recorded(arguments: list[str]) -> Finished:
    return job_harness.run_job(2, arguments, deadline_s=200, run=recorded_work)


def turn_log_probs(model: Any, row: Row, said: range) -> Tensor:
    """Log-probs of one segment after all that is before it; what comes later is not shown to the model."""
    first, end = row.num_prompt + said.start, row.num_prompt + said.stop
    logits = model(input_ids=torch.tensor([row.tokens[:end]])).logits[0, first - 1 : -1]
    words = torch.tensor(row.tokens[first:end])
    return torch.log_softmax(logits.float(), -1).gather(-1, words[:, None]).squeeze(-1)


def expected_advantages(
    rows: dict[int, list[Row]], tokenizers: dict[int, Any]
) -> tuple[dict[int, dict[int, float]], dict[int, dict[int, tuple[float, float]]]]:
    """agent -> row id -> advantage, and (own, team) share of its reward; from the texts alone, by the rules
    that the DAG file states.
    """
    scores: dict[tuple[int, int], float] = {}
    for agent, of_agent in rows.items():
        for row in of_agent:
            digits = 0
            for _, said in row.segments():
                first = row.num_prompt + said.start
                text = tokenizers[agent].decode(
                    row.tokens[first : row.num_prompt + said.stop], skip_special_tokens=True
                )
                digits += sum(character.isdigit() for character in text)
            scores[int(row.columns["episode_id"]), int(row.columns["speaker"])] = digits / 8
    found: dict[int, dict[int, float]] = {}
    shares: dict[int, dict[int, tuple[float, float]]] = {}
    for agent, of_agent in rows.items():
        outcome: dict[int, float] = {}
        shares[agent] = {}
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row in of_agent:
            episode, speaker = int(row.columns["episode_id"]), int(row.columns["speaker"])
            team = [scores[episode, one] for one in (0, 1, 2) if one != speaker]
            row_id = int(row.columns["row_id"])
            shares[agent][row_id] = (scores[episode, speaker], 0.0 if agent else TEAM * sum(team) / len(team))
            outcome[row_id] = sum(shares[agent][row_id])
            groups[episode // 4, speaker].append(row_id)
        found[agent] = {}
        for members in groups.values():
            values = [outcome[row_id] for row_id in members]
            mean = sum(values) / len(values)
            deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
            for row_id, value in zip(members, values, strict=True):
                found[agent][row_id] = (value - mean) / (deviation + 1e-6) if deviation else 0.0
    return found, shares


@dataclass
class Taught:
    """What plain Hugging Face and AdamW make of the rows of a policy."""

    by_speaker: dict[int, dict[str, Tensor]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    rollout_gap: float


def teach(model_dir: Path, output: Path, agent: int) -> Taught:
    """Train on the recorded segments, one at a time: clipped PPO, a mean over all tokens of a mini-batch.

    by_speaker and gradients: of the first optimizer step, the former before clipping by norm.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR[agent], eps=EPS, weight_decay=0.01)
    taught = Taught({}, {}, {}, 0.0)
    for step in range(STEPS):
        calls = [rows_of_step(output, agent, step * MINI_BATCHES + part) for part in range(MINI_BATCHES)]
        assert all(calls), "every optimizer step has rows"
        with torch.no_grad():
            old = {
                (int(row.columns["row_id"]), turn): turn_log_probs(model, row, said)
                for rows in calls
                for row in rows
                for turn, said in row.segments()
            }
        for call, rows in enumerate(calls):
            num_tokens = sum(len(said) for row in rows for _, said in row.segments())
            found = [(row, turn, said) for row in rows for turn, said in row.segments()]
            for speaker in sorted({int(row.columns["speaker"]) for row in rows}):
                before = gradients_of(model)
                for row, turn, said in found:
                    if int(row.columns["speaker"]) != speaker:
                        continue
                    log_prob = turn_log_probs(model, row, said)
                    gap = log_prob.detach() - row.columns["rollout_log_prob"][said.start : said.stop]
                    if call == 0:
                        taught.rollout_gap = max(taught.rollout_gap, float(gap.abs().max()))
                    ratio = (log_prob - old[int(row.columns["row_id"]), turn]).exp()
                    advantage = row.columns["advantage"][said.start]
                    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                    gain = torch.minimum(ratio * advantage, clipped * advantage)
                    if advantage < 0:
                        gain = gain.clamp(min=DUAL_CLIP * float(advantage))
                    (-gain.sum() / num_tokens).backward()
                if step == call == 0:
                    after = gradients_of(model)
                    taught.by_speaker[speaker] = {name: after[name] - before[name] for name in after}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == call == 0:
                taught.gradients = gradients_of(model)
            adamw.step()
            adamw.zero_grad(set_to_none=False)
    taught.weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return taught


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }


def largest_gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    assert ours.keys() == theirs.keys()
    return max((float((ours[name] - theirs[name]).abs().max()), name) for name in theirs)


def recorded_gradients(output: Path, agent: int) -> dict[str, Tensor]:
    return torch.load(output / f"agent_{agent}.actor-0-0.pt", weights_only=True)["gradients"]


@pytest.mark.parametrize("agent", [0, 1])
def test_each_policy_learns_what_its_own_segments_teach_it(finished, inputs, other, agent):
    taught = teach((inputs.model, other)[agent], finished.output, agent)
    assert taught.rollout_gap < 1e-4, "trained on the tokens that were sampled, in the context they had"
    norms = {
        speaker: math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        for speaker, grads in taught.by_speaker.items()
    }
    assert sorted(norms) == ([1] if agent else [0, 2]) and min(norms.values()) > 1e-3
    gap, name = largest_gap(recorded_gradients(finished.output, agent), taught.gradients)
    assert gap < 1e-6, name
    gap, name = largest_gap(finished.weights(f"agent_{agent}.actor"), taught.weights)
    assert gap < 1e-2 * LR[agent], name


def test_advantages_are_those_by_hand_from_the_texts_of_the_turns(finished, inputs, other):
    from transformers import AutoTokenizer

    tokenizers = {
        agent: AutoTokenizer.from_pretrained(path) for agent, path in ((0, inputs.model), (1, other))
    }
    for step in range(STEPS):
        parts = range(step * MINI_BATCHES, (step + 1) * MINI_BATCHES)
        rows = {
            agent: [row for part in parts for row in rows_of_step(finished.output, agent, part)]
            for agent in (0, 1)
        }
        assert {agent: len(of_agent) for agent, of_agent in rows.items()} == {0: 32, 1: 16}
        expected, _ = expected_advantages(rows, tokenizers)
        assert any(expected[0].values()) and any(expected[1].values())
        for agent, of_agent in rows.items():
            for row in of_agent:
                assert [turn % 3 for turn, _ in row.segments()] == [int(row.columns["speaker"])] * 2
                own = torch.zeros(row.columns["response_mask"].shape, dtype=torch.bool)
                for _, said in row.segments():
                    own[said.start : said.stop] = True
                    trained = row.columns["advantage"][said.start : said.stop]
                    wanted = expected[agent][int(row.columns["row_id"])]
                    torch.testing.assert_close(
                        trained, torch.full_like(trained, wanted), atol=1e-4, rtol=1e-4
                    )
                assert row.columns["response_mask"].equal(own)


def check_written_tokens(output: Path, inputs: Inputs, other: Path) -> None:
    """What a run writes of the tokens of its first step is by plain Hugging Face and the rules of credit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = {0: inputs.model, 1: other}
    tokenizers = {agent: AutoTokenizer.from_pretrained(path) for agent, path in paths.items()}
    models = {agent: AutoModelForCausalLM.from_pretrained(path) for agent, path in paths.items()}
    rows = {
        agent: [row for part in range(MINI_BATCHES) for row in rows_of_step(output, agent, part)]
        for agent in paths
    }
    advantages, shares = expected_advantages(rows, tokenizers)
    by_id = {(agent, int(row.columns["row_id"])): row for agent in paths for row in rows[agent]}
    first = {(agent, int(row.columns["row_id"])) for agent in paths for row in rows_of_step(output, agent, 0)}
    lines = (output / "rollouts" / "tokens" / "step_1.jsonl").read_text().splitlines()
    written = {(line["agent"], line["row_id"]): line for line in map(json.loads, lines)}
    samples = (output / "rollouts" / "train" / "step_1.jsonl").read_text().splitlines()
    episodes = {sample["episode"]["episode_id"] for sample in map(json.loads, samples)}
    assert len(written) == len(lines) == 3 * len(episodes) >= 24
    assert {line["episode_id"] for line in written.values()} == episodes
    assert {line["speaker"] for line in written.values()} == {0, 1, 2}
    for (agent, row_id), line in written.items():
        row, tokens = by_id[agent, row_id], line["tokens"]
        places = [place for _, said in row.segments() for place in said]
        with torch.no_grad():
            expected = torch.cat([turn_log_probs(models[agent], row, said) for _, said in row.segments()])
        assert tokens["id"] == [row.tokens[row.num_prompt + place] for place in places]
        assert tokens["turn"] == [turn for turn, said in row.segments() for _ in said]
        assert "".join(tokens["text"]) == tokenizers[agent].decode(tokens["id"])
        for name in ("rollout_log_prob", "old_log_prob"):
            torch.testing.assert_close(torch.tensor(tokens[name]), expected, atol=1e-4, rtol=1e-4)
        assert tokens["advantage"] == pytest.approx([advantages[agent][row_id]] * len(places), abs=1e-4)
        assert (set(tokens["ratio"]) == {1.0}) == ((agent, row_id) in first)
        clipped = [
            (ratio > 1 + CLIP and advantage > 0)
            or ((ratio < 1 - CLIP or ratio > DUAL_CLIP) and advantage < 0)
            for ratio, advantage in zip(tokens["ratio"], tokens["advantage"], strict=True)
        ]
        assert [bool(clip) for clip in tokens["clip"]] == clipped
        assert "weight" not in tokens, "there is no correction"
        nothing, all_of_it = (0.0, 0.0), shares[agent][row_id]
        for turn, share in zip(line["turns"], (nothing, all_of_it), strict=True):
            assert (turn["own"], turn["team"]) == pytest.approx(share, abs=1e-6)
            assert turn["env"] == turn["shaping"] == 0
            assert turn["tokens"] == tokens["turn"].count(turn["turn"])
            assert turn["advantage"] == pytest.approx(advantages[agent][row_id], abs=1e-4)
    assert any(clip for line in written.values() for clip in line["tokens"]["clip"]), "some are clipped"


def test_rewards_of_an_environment_are_no_part_where_there_is_none(finished):
    found = {name for line in finished.lines for name in line if "reward/" in name}
    assert any(name.endswith("reward/own") for name in found), found
    assert not any(name.endswith("reward/env") for name in found), found


def test_what_is_written_of_tokens_is_what_plain_hugging_face_says(finished, inputs, other):
    check_written_tokens(finished.output, inputs, other)


@pytest.mark.slow
def test_an_agent_on_megatron_beside_one_on_fsdp_learns_the_same(finished, inputs, other, tmp_path):
    mixed = run_recorded(arguments_of(inputs, other, tmp_path / "run", MEGATRON))
    for agent in (0, 1):
        for name in ("reward/score", "actor/loss", "actor/grad_norm"):
            values = mixed.values(f"agent_{agent}/{name}")
            assert values == pytest.approx(finished.values(f"agent_{agent}/{name}"), rel=1e-4, abs=2e-5), name
            assert len(values) == STEPS
        gap, name = largest_gap(
            recorded_gradients(mixed.output, agent), recorded_gradients(finished.output, agent)
        )
        assert gap < 1e-6, name
        model = f"agent_{agent}.actor"
        gap, name = largest_gap(mixed.weights(model), finished.weights(model))
        assert gap < 1e-4, name
    check_written_tokens(mixed.output, inputs, other)
