"""reward_model.reward_manager, as the scorer of a rank carries it out."""

import json
import textwrap
import time

import pytest
from fixtures_tiny import make_tiny_tokenizer
from http_harness import serving
from transformers import AutoTokenizer

from siirl import http_service
from siirl.config import load_config
from siirl.data.rows import make_rows, objects
from siirl.errors import ConfigError, EndpointError, RewardError
from siirl.rewards.scorer import RewardScorer
from siirl.rewards.user_function import check_user_function

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=110))


@pytest.fixture
def scorer_of(tmp_path, tokenizer):
    scorers = []

    def make(*overrides, code=None):
        if code is not None:
            (tmp_path / "reward.py").write_text(textwrap.dedent(code))
            overrides = (*overrides, f"custom_reward_function.path={tmp_path / 'reward.py'}")
        overrides = ("trainer.n_gpus_per_node=1", "reward_model.num_workers=2", *overrides)
        scorers.append(RewardScorer(load_config(list(overrides)), tokenizer))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def rows_of(tokenizer, responses, sources="my/data", truths="42"):
    ids = [[*tokenizer(text)["input_ids"], 1] for text in responses]
    spread = lambda value: value if isinstance(value, list) else [value] * len(ids)  # noqa: E731
    return make_rows(
        {
            "response_ids": ids,
            "response_length": [len(row) for row in ids],
            "data_source": spread(sources),
            "ground_truth": spread(truths),
            "extra_info": [{"index": index} for index in range(len(ids))],
            "sample_index": [100 + index for index in range(len(ids))],
        }
    )


BATCH = """
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
        best = max(map(int, solution_strs))
        return [
            {"score": scale * int(text) / best, "rows": len(data_sources), "source": source, **info}
            for source, text, info in zip(data_sources, solution_strs, extra_infos)
        ]
"""


def test_the_batch_manager_calls_the_function_once_for_all_rows(scorer_of, tokenizer):
    scorer = scorer_of(
        "reward_model.reward_manager=batch", "+custom_reward_function.reward_kwargs.scale=2", code=BATCH
    )
    scored = scorer.submit(rows_of(tokenizer, ["1", "2", "4"] * 30)).result()
    assert scored["score"].tolist() == [0.5, 1.0, 2.0] * 30
    info = objects(scored, "reward_info")
    assert info[7] == {"rows": 90, "index": 7, "source": "my/data"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0] * 4", r"it returned 4 scores for 5 responses"),
        ("return 1.0", r"it returned 1.0 instead of a list of 5 scores"),
        ("return [1.0, 1.0, float('nan'), 1.0, 1.0]", r"sample_index 102 .*it returned nan"),
        ("raise KeyError('speed')", r"KeyError: 'speed'"),
        ("import time; time.sleep(60)", r"no score after 0.5 s"),
        ("import os; os._exit(3)", r"exit code 3"),
    ],
)
def test_a_failing_batch_stops_the_run(scorer_of, tokenizer, body, message):
    scorer = scorer_of(
        "reward_model.reward_manager=batch",
        "custom_reward_function.timeout_s=0.5",
        code=f"def compute_score(**given):\n    {body}\n",
    )
    with pytest.raises(RewardError, match=message):
        scorer.submit(rows_of(tokenizer, list("12345"))).result()


def test_a_failing_batch_counts_as_zero_if_the_user_asks_so(scorer_of, tokenizer):
    code = """
        import time

        def compute_score(solution_strs, **given):
            if "9" in solution_strs:
                time.sleep(60)
            return [1.0] * len(solution_strs)
    """
    scorer = scorer_of(
        "reward_model.reward_manager=batch",
        "custom_reward_function.timeout_s=0.5",
        "custom_reward_function.on_error=zero",
        code=code,
    )
    assert scorer.submit(rows_of(tokenizer, list("129"))).result()["score"].tolist() == [0, 0, 0]
    assert scorer.submit(rows_of(tokenizer, list("123"))).result()["score"].tolist() == [1, 1, 1]
    assert scorer.drain_metrics().values()["reward/timeout"] == 3


def test_a_function_for_single_rows_is_refused_as_a_batch_function(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...")
    keys = [f"custom_reward_function.path={file}", "reward_model.reward_manager=batch"]
    with pytest.raises(ConfigError, match="it does not take data_sources"):
        check_user_function(load_config(keys))


def test_a_hanging_sample_of_the_parallel_manager_delays_only_itself(scorer_of, tokenizer):
    code = """
        def compute_score(solution_str, **given):
            while solution_str == "9":
                pass
            return 1.0
    """
    scorer = scorer_of(
        "reward_model.reward_manager=parallel",
        "custom_reward_function.timeout_s=1",
        "custom_reward_function.on_error=zero",
        code=code,
    )
    start = time.monotonic()
    scored = scorer.submit(rows_of(tokenizer, ["9", *"1" * 40])).result()
    assert scored["score"].tolist() == [0.0] + [1.0] * 40
    assert time.monotonic() - start < 30  # of the 41 that each of its time would take


def test_the_dapo_manager_notes_whether_the_answer_is_right(scorer_of, tokenizer):
    scorer = scorer_of("reward_model.reward_manager=dapo")
    scored = scorer.submit(rows_of(tokenizer, ["42", "43"], "arithmetic")).result()
    assert [info["acc"] for info in objects(scored, "reward_info")] == [1.0, 0.0]


def test_a_service_scores_the_rows(scorer_of, tokenizer, monkeypatch):
    def answer(message):
        time.sleep(0.02)
        return 200, {"score": int(message["solution_str"]) / 10, "seen": message["extra_info"]["index"]}

    with serving(answer) as service:
        scorer = scorer_of(
            "reward_model.reward_manager=remote",
            f"reward_model.remote.url={service.url}",
            "reward_model.remote.max_concurrent=4",
            "+reward_model.reward_kwargs.functions={b:{remote:0.5,exact_match:0.5}}",
        )
        sources = ["a"] * 20 + ["b"]
        scored = scorer.submit(rows_of(tokenizer, ["7"] * 20 + ["42"], sources)).result()
    assert scored["score"].tolist() == pytest.approx([0.7] * 20 + [0.5 * 4.2 + 0.5])
    info = objects(scored, "reward_info")
    assert [entry["seen"] for entry in info[:20]] == list(range(20))
    assert info[20] == {"remote": 4.2, "remote/seen": 20, "exact_match": 1.0}
    assert service.most_at_once == 4
    assert service.messages[0].keys() == {"data_source", "solution_str", "ground_truth", "extra_info"}


def test_an_unreachable_service_stops_the_run_even_where_failures_count_as_zero(
    scorer_of, tokenizer, monkeypatch
):
    monkeypatch.setattr(http_service, "FIRST_WAIT_S", 0.01)
    with serving(lambda message: (200, 1)) as service:
        pass
    scorer = scorer_of(
        "reward_model.reward_manager=remote",
        f"reward_model.remote.url={service.url}",
        "reward_model.remote.max_tries=2",
    )
    with pytest.raises(RewardError, match=rf"sample_index 10\d .*{service.url} .*after 2 tries"):
        scorer.submit(rows_of(tokenizer, list("123"))).result()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"NaN", "it returned nan"),
        ({"points": 1}, 'without "score"'),
        ("high", "it returned 'high' instead of a number"),
    ],
)
def test_a_service_that_answers_no_number_stops_the_run(scorer_of, tokenizer, reply, message):
    with serving(lambda given: (200, reply)) as service:
        scorer = scorer_of("reward_model.reward_manager=remote", f"reward_model.remote.url={service.url}")
        with pytest.raises(RewardError, match=rf"function remote failed on sample_index 100 .*{message}"):
            scorer.submit(rows_of(tokenizer, ["1"])).result()


def test_scores_are_counted_by_domain(scorer_of, tokenizer):
    scorer = scorer_of("+reward_model.reward_kwargs.functions={b:{exact_match:0.5,think_format:0.5}}")
    rows = rows_of(tokenizer, ["42", "43", "42"], ["arithmetic", "arithmetic", "b"])
    scorer.submit(rows, by_domain=True).result()
    values = scorer.drain_metrics().values()
    assert values["reward/arithmetic/mean"] == 0.5
    assert values["reward/b/mean"] == 0.5
    assert (values["reward/b/exact_match/mean"], values["reward/b/think_format/mean"]) == (1.0, 0.0)
    scorer.submit(rows).result()
    assert "reward/b/mean" not in scorer.drain_metrics().values()


def test_programs_are_scored_in_the_sandbox_by_the_workers(scorer_of, tokenizer):
    truth = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "2"]})
    scored = scorer_of().submit(rows_of(tokenizer, ["print(1)", "print(input())"], "taco", truth)).result()
    assert scored["score"].tolist() == [0.0, 1.0]
    assert objects(scored, "reward_info")[0] == {"passed": 1, "tests": 2, "verdict": "wrong answer"}


def test_tests_that_are_none_stop_the_run(scorer_of, tokenizer):
    with pytest.raises(RewardError, match=r"function code failed on sample_index 100 .*0 inputs"):
        scorer_of().submit(rows_of(tokenizer, ["1"], "taco", '{"inputs": [], "outputs": []}')).result()


def test_a_remote_sandbox_is_asked_by_many_rows_at_once(scorer_of, tokenizer):
    def answer(message):
        time.sleep(0.05)
        out = {"status": "Finished", "return_code": 0, "stdout": message["stdin"], "stderr": ""}
        return 200, {"status": "Success", "run_result": out}

    with serving(answer) as service:
        scorer = scorer_of(
            f"+reward_model.sandbox_fusion.url={service.url}", "+reward_model.sandbox_fusion.max_concurrent=5"
        )
        truth = {"inputs": ["7"], "outputs": ["7"]}
        scored = scorer.submit(rows_of(tokenizer, ["1"] * 20, "taco", json.dumps(truth))).result()
    assert scored["score"].sum() == 20
    assert service.most_at_once == 5
    assert not scorer._pool._workers


def test_a_broken_remote_sandbox_stops_the_run(scorer_of, tokenizer, monkeypatch):
    monkeypatch.setattr(http_service, "FIRST_WAIT_S", 0.01)
    with serving(lambda message: (404, {})) as service:
        scorer = scorer_of(f"+reward_model.sandbox_fusion.url={service.url}")
        with pytest.raises(RewardError, match="HTTP 404"):
            scorer.submit(rows_of(tokenizer, ["1"], "taco", '{"inputs": ["1"], "outputs": ["1"]}')).result()
    assert issubclass(EndpointError, RewardError)
