"""Which tokenizer a node of a worker reads with."""

from fixtures_tiny import make_tiny_tokenizer

from siirl.config import load_config
from siirl.dag_worker.worker import DAGWorker


def test_agents_of_one_model_and_tokenizers_of_their_own_read_by_their_own(tmp_path):
    model, other = (
        str(make_tiny_tokenizer(tmp_path / name, vocab)) for name, vocab in (("a", 64), ("b", 80))
    )
    worker = DAGWorker.__new__(DAGWorker)
    worker._tokenizers = {}
    path = f"actor_rollout_ref.model.path={model}"
    plain, told, again = ([path], [path, f"data.tokenizer={other}"], [path, f"data.tokenizer={model}"])
    first, second, third = (worker._tokenizer(load_config(keys)) for keys in (plain, told, again))
    assert (len(first), len(second)) == (64, 80)
    assert third is first, "one directory is read once"
