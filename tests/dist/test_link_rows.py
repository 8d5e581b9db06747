"""Ranks of an FSDP2 trainer send their rows: what arrives is what they export, gathered nowhere."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_engine_cases as cases
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir
from train_engine_cases import Scenario

from siirl.compiler.plan import LinkPlan, sender_groups
from siirl.engines.weights import link as links
from siirl.engines.weights.link import make_link
from siirl.parallel.process_groups import ProcessGroupManager

LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
CASES = {
    "qwen3, odd rows": ({"family": "qwen3", "vocab": 97}, (), ()),
    "qwen3_moe, fused experts": ({"family": "qwen3_moe"}, (), ()),
    "qwen3_moe, experts dealt": ({"family": "qwen3_moe"}, (), (("ep", 2),)),
    "llama, adapters": ({"family": "llama"}, LORA, ()),
}
"""Sizes of a model, keys, sizes of the trainer."""


class Keeps:
    """A target that keeps what it is given."""

    takes, reads_live, weight_version = "merged", False, -1

    def weight_specs(self):
        return {"all": ((1,), torch.bfloat16)}

    def expect_weights(self):
        pass

    def load_weights(self, weights, version):
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.weight_version = version


def sent_both_ways(rank, world_size, path, overrides, dims):
    """Whether two syncs by rows bring what those of one rank do, and who gathers in them."""
    links.BUCKET_BYTES = 3000
    scenario = Scenario("", 2, overrides=overrides, sizes=dims)
    trainers, receivers, everyone = (0, 1), (2, 3), (0, 1, 2, 3)
    _, wanted = cases.dims_of(scenario, trainers)
    wanted = [*wanted, everyone, *sender_groups(trainers, receivers)]
    groups = ProcessGroupManager(list(dict.fromkeys(wanted)), "gloo", 60)
    trainer = cases.make_engine(scenario, path, groups, trainers) if rank in trainers else None
    target, gathered, same, gather = None if trainer else Keeps(), [], [], dist.all_gather_into_tensor
    made = {}
    for kind in ("broadcast", "spread"):
        plan = LinkPlan(kind, "actor", "rollout", everyone, kind)
        made[kind] = make_link(plan, trainer, target, groups, Path("never"))
    for version in range(2):
        found = []
        for kind, link in made.items():
            if trainer:
                trainer.version = 2 * version + len(found)
                dist.all_gather_into_tensor = lambda *x, kind=kind, **y: (
                    gathered.append(kind),
                    gather(*x, **y),
                )
            link.push()
            dist.all_gather_into_tensor = gather
            found.append(target and target.weights)
        same.append(
            trainer is not None
            or (
                found[0].keys() == found[1].keys()
                and all(torch.equal(found[0][name], found[1][name]) for name in found[0])
            )
        )
        if trainer:
            cases.train_steps(trainer, scenario, range(version, version + 1))
    return same, set(gathered), made["spread"]._rows is not None


def noting(kind, gathered, gather):
    def noted(*tensors, **options):
        gathered.append(kind)
        return gather(*tensors, **options)

    return noted


@pytest.mark.parametrize("kind", CASES)
def test_rows_that_each_rank_sends_are_the_tensors_that_are_exported(kind, tmp_path):
    sizes, overrides, dims = CASES[kind]
    path = make_tiny_model_dir(tmp_path, **sizes)
    out = run_workers(sent_both_ways, 4, str(path), overrides, dims, deadline_s=100)
    assert [same for same, _, _ in out] == [[True, True]] * 4
    assert [rows for _, _, rows in out] == [True] * 4
    assert [gathered for _, gathered, _ in out] == [{"broadcast"}] * 2 + [set()] * 2
