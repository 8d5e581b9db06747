"""A policy that two agents share learns the sum of what each of them alone would teach it."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import train_engine_cases as engines
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from torch import Tensor
from train_engine_cases import NUM_ROWS, TEMPERATURE, Scenario

from siirl.config import load_config
from siirl.data.rows import take_rows
from siirl.nodes.actor_train import actor_train
from siirl.observe.metrics import Metrics

ACTOR = "actor_rollout_ref.actor"
STILL = (f"{ACTOR}.optim.lr=0", f"{ACTOR}.optim.betas=[0.0,0.999]", f"{ACTOR}.grad_clip=0")
CONFIG = (f"actor_rollout_ref.rollout.temperature={TEMPERATURE}", f"{ACTOR}.ppo_mini_batch_size=4")


def gradients(rank: int, world: int, path: str) -> dict[str, dict[str, Tensor]]:
    """Of a step on the rows of both agents, and of each: AdamW's first moment, which is the gradient.

    Agent 1 has rows in the second half of the episodes only, which lie on rank 1.
    """
    engine, _ = engines.build_engine(Scenario("fsdp", world, "model", strategy="fsdp", overrides=STILL), path)
    rows = engines.sample_rows(0).exclude("raw_prompt")
    rows["speaker"] = torch.arange(NUM_ROWS) % 2 * (torch.arange(NUM_ROWS) >= NUM_ROWS // 2)
    rows["episode_id"] = torch.arange(NUM_ROWS) // 2
    rows["turn_id"] = torch.where(rows["response_mask"], 0, -1)
    mine_B = (torch.arange(NUM_ROWS) >= NUM_ROWS // 2) == bool(rank)
    cfg, found = load_config([*CONFIG, "data.train_batch_size=4"]), {}
    for name, speakers in {"both": (0, 1), "agent_0": (0,), "agent_1": (1,)}.items():
        chosen_B = mine_B & torch.isin(rows["speaker"], torch.tensor(speakers))
        ctx = SimpleNamespace(
            trained=None,
            taken=None,
            cfg=cfg,
            options={},
            step=1,
            group=dist.group.WORLD,
            metrics=Metrics(),
            is_shard_leader=True,
        )
        actor_train(ctx, take_rows(rows, chosen_B), engine)
        state = engine.state_dict()["optimizer"].items()
        moments = {key: moment.clone() for key, moment in state if key.startswith("exp_avg.")}
        found[name] = engines.whole_tensors(moments)
        tokens = torch.isin(rows["speaker"], torch.tensor(speakers))[:, None] & rows["response_mask"]
        found[name] = {key: grad * tokens.sum() for key, grad in found[name].items()}
    return found


def test_the_gradient_of_a_shared_policy_is_the_sum_of_its_agents_gradients(tmp_path):
    """token-mean divides each by its own number of tokens, which is undone here."""
    path = str(make_tiny_model_dir(tmp_path / "model", tie=False, hidden=64, init_std=0.15))
    found = run_workers(gradients, 2, path)[0]
    largest = max(float(grad.abs().max()) for grad in found["both"].values())
    assert largest > 1e-2
    for name, grad in found["both"].items():
        alone = found["agent_0"][name] + found["agent_1"][name]
        assert (grad - alone).abs().max() < 1e-5 * largest, name
    assert any(float(grad.abs().max()) > 0.01 * largest for grad in found["agent_1"].values())
