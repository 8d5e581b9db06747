"""What of a vLLM rollout is refused before the launch: sizes that its model or machine cannot hold."""

import pytest
from fixtures_tiny import make_tiny_model_dir

from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import load_config
from siirl.errors import PlacementError


def plan(model_dir, world, *overrides):
    keys = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=2",
        f"actor_rollout_ref.model.path={model_dir}",
        f"trainer.n_gpus_per_node={world}",
        *overrides,
    ]
    cfg = load_config(keys)
    return compile_plan(load_dag(cfg), cfg, world)[0]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model_dir(tmp_path_factory.mktemp("model"), heads=12, kv_heads=4, tokenizer=False)


@pytest.mark.parametrize(
    ("tp", "world", "more", "words"),
    [
        (8, 8, [], ["tensor_model_parallel_size=8", "12 attention heads", "1 or 2 or 4"]),
        (3, 6, [], ["4 key-value heads", "1 or 2"]),
        (4, 8, ["trainer.nnodes=4", "trainer.n_gpus_per_node=2"], ["n_gpus_per_node=2", "one machine"]),
    ],
)
def test_a_tensor_parallel_size_that_cannot_be_is_refused(model_dir, tp, world, more, words):
    size = f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}"
    with pytest.raises(PlacementError) as caught:
        plan(model_dir, world, size, *more)
    assert all(word in str(caught.value) for word in ["rollout_actor", *words]), str(caught.value)


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_sizes_that_cut_between_heads_are_planned_with_a_group_for_each_engine(model_dir, tp):
    size = f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp}"
    made = plan(model_dir, 12, size)
    engines = [tuple(range(first, first + tp)) for first in range(0, 12, tp)]
    assert set(engines) <= set(made.groups) or tp == 1
    layout = made.layouts[made.run_of("rollout_actor").target]
    assert layout.num_shards == 12 // tp
