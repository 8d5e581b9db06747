"""These tests start reward workers: real processes, a second or two each."""

import os
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from fixtures_tiny import make_tiny_tokenizer
from scored_rows import rows_of
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.rows import make_rows, objects
from siirl.dialect.dialect import derive
from siirl.dialect.template import ChatTemplate
from siirl.errors import ConfigError, RewardError
from siirl.rewards.scorer import RewardScorer
from tests.unit.dialect.test_dialect import tokenizer_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=110))


@pytest.fixture
def scorer_of(tmp_path, tokenizer):
    """Make scorers, of a user function when its code is given, and close them in the end."""
    scorers = []

    def make(code=None, **settings):
        overrides = ["trainer.n_gpus_per_node=1", "reward_model.num_workers=2"]
        if code is not None:
            file = tmp_path / "reward.py"
            file.write_text(textwrap.dedent(code))
            overrides += [f"custom_reward_function.path={file}"]
        overrides += [f"custom_reward_function.{key}={value}" for key, value in settings.items()]
        scorers.append(RewardScorer(load_config(overrides), tokenizer))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def test_built_in_rules_score_in_this_process(scorer_of, tokenizer):
    scorer = scorer_of()
    scored = scorer.submit(rows_of(tokenizer, ["42", "43", " 42 "])).result()
    assert scored["score"].tolist() == [1, 0, 1]
    assert objects(scored, "reward_info") == [{}, {}, {}]
    assert not scorer._pool._workers


def test_only_the_real_tokens_of_a_response_are_decoded(scorer_of, tokenizer):
    rows = rows_of(tokenizer, ["42", "42 is the answer"])
    rows["response_ids"][0, 3:] = 9  # beyond its length
    rows["response_length"][1] = 2
    assert scorer_of().submit(rows).result()["score"].tolist() == [1, 1]


THINKS = (  # [THINK], [/THINK] and the end of turn are special tokens
    "{% for m in messages %}<|im_start|>{% if m.reasoning_content %}"
    "[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SCORED = [
    ("a", "[THINK]5[/THINK]4<|im_end|>", "4", 1),
    ("a", "[THINK]5[/THINK]4<|im_end|>", "54", 0),
    ("a", "[THINK]4", "4", 0),
    ("t", "[THINK]5[/THINK]4<|im_end|>", "", 1),
    ("t", "54<|im_end|>", "", 0),
    ("b", r"[THINK]5[/THINK]\boxed{4}<|im_end|>", "", 1),
    ("b", r"[THINK]\boxed{4}[/THINK]4<|im_end|>", "", 0),
    ("b", r"[THINK]\boxed{4}", "", 0),
]


READ = {
    "auto": [score for *_, score in SCORED],
    "answer": [1, 0, 0, 1, 0, 1, 0, 0],
    "whole": [0, 0, 0, 1, 0, 1, 1, 1],
}
"""reward_model.scored_text -> the scores. think_format has the parts of the response beside the text."""


@pytest.mark.parametrize("read", READ)
def test_a_response_is_scored_by_its_answer_and_not_over_tokens_that_were_skipped(read):
    marked = tokenizer_of(THINKS, added=("<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"))
    sources, texts, truths, _ = zip(*SCORED, strict=True)
    ids = [marked.encode(text) for text in texts]
    columns = {"response_ids": ids, "response_length": [len(row) for row in ids]}
    columns |= {"data_source": list(sources), "ground_truth": list(truths)}
    columns |= {"extra_info": [{}] * len(ids), "sample_index": [*range(len(ids))]}
    functions = "{a:exact_match,t:think_format,b:boxed_format}"
    keys = ["trainer.n_gpus_per_node=1", f"reward_model.scored_text={read}"]
    cfg = load_config([*keys, f"+reward_model.reward_kwargs.functions={functions}"])
    scorer = RewardScorer(cfg, marked, derive(marked, ChatTemplate(marked, {}), {}))
    assert scorer.submit(make_rows(columns)).result()["score"].tolist() == READ[read]
    scorer.close()


def test_zero_rows_are_scored(scorer_of, tokenizer):
    scored = scorer_of().submit(rows_of(tokenizer, [])).result()
    assert scored.batch_size == (0,)
    assert scored["score"].shape == (0,)


def test_math_is_scored_in_worker_processes_in_order(scorer_of, tokenizer):
    scorer = scorer_of()
    answers = [r"\boxed{\frac{84}{2}}", r"\boxed{41}", "the answer is 42.0", r"\boxed{6*7}", "no"] * 8
    scored = scorer.submit(rows_of(tokenizer, answers, source="aime24")).result()
    assert scored["score"].tolist() == [1, 0, 1, 1, 0] * 8
    assert len(scorer._pool._workers) == 2


def test_mixed_data_sources_are_scored_each_by_its_function(scorer_of, tokenizer):
    rows = make_rows(
        {
            **{
                name: rows_of(tokenizer, ["42", "#### 42", "#### 42"]).get(name)
                for name in ("response_ids", "response_length", "ground_truth", "extra_info", "sample_index")
            },
            "data_source": ["arithmetic", "openai/gsm8k", "arithmetic"],
        }
    )
    assert scorer_of().submit(rows).result()["score"].tolist() == [1, 1, 0]


USER = """
    import sys

    def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
        print("printing is harmless")
        return {
            "score": scale * (solution_str == ground_truth),
            "source": data_source,
            "index": extra_info["index"],
            "torch": "torch" in sys.modules,
        }
"""


@pytest.mark.real_starts
def test_the_users_function_scores_in_a_process_without_torch(scorer_of, tokenizer):
    scorer = scorer_of(USER, **{"reward_kwargs.scale": 2.0})
    scored = scorer.submit(rows_of(tokenizer, ["42"] * 200 + ["43"], source="any")).result()
    assert scored["score"].tolist() == [2.0] * 200 + [0.0]
    info = objects(scored, "reward_info")
    assert [entry["index"] for entry in info] == list(range(201))
    assert info[0] == {"source": "any", "index": 0, "torch": False}


SEVERAL = """
    def right(data_source, solution_str, ground_truth, extra_info):
        return {"score": solution_str == "42", "length": len(solution_str)}

    def form(data_source, solution_str, ground_truth, extra_info):
        return -1.0 if len(solution_str) < 2 else 1.0
"""


def test_several_functions_of_the_user_are_added_up_by_weights_each_with_a_curve_of_its_own(
    scorer_of, tokenizer
):
    scorer = scorer_of(SEVERAL, weights="{right:2.0,form:{weight:0.5,low:-1,high:1}}")
    scored = scorer.submit(rows_of(tokenizer, ["42", "7"], source="any"), by_domain=True).result()
    assert scored["score"].tolist() == [2.0 + 0.5, 0.0]
    assert objects(scored, "reward_info")[0] == {"right": 1.0, "right/length": 2, "form": 1.0}
    curves = scorer.drain_metrics().values()
    assert curves["reward/any/right/mean"] == 0.5 and curves["reward/any/form/mean"] == 0.0
    assert curves["reward/any/mean"] == 1.25
    with pytest.raises(ConfigError, match=r"weights=rihgt: .* Did you mean 'right'"):
        scorer_of(SEVERAL, weights="{rihgt:1.0,form:1.0}")
    with pytest.raises(RewardError, match=r"right of .*reward\.py failed on sample_index 100"):
        broken = SEVERAL.replace("solution_str ==", "None +")
        scorer_of(broken, weights="{right:1.0}").submit(rows_of(tokenizer, ["42"], source="any")).result()


FRAGILE = """
    import os, sys, time

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        match solution_str:
            case "1":
                raise KeyError("speed")
            case "2":
                return float("nan")
            case "3":
                return "high"
            case "4":
                time.sleep(60)
            case "5":
                os._exit(3)
            case "6":
                os.kill(os.getpid(), 11)
            case "7":
                sys.exit("enough")
        return 1.0
"""

FAILURES = {
    "1": r"KeyError: 'speed' \(at .*reward\.py:7\)",
    "2": "it returned nan: a score must be finite",
    "3": r"\(data_source 'my/data'\): it returned 'high' instead of a number \(it is a str\)\. Correct",
    "4": "no score after 0.5 s",
    "5": "the process that scored it ended: exit code 3",
    "6": "the process that scored it ended: SIGSEGV",
    "7": "SystemExit: enough",
}


@pytest.mark.parametrize("digit", FAILURES)
def test_a_failing_sample_stops_the_run_by_name(scorer_of, tokenizer, digit):
    scorer = scorer_of(FRAGILE, timeout_s=0.5)
    rows = rows_of(tokenizer, ["0"] * 5 + [digit] + ["0"] * 5, source="my/data")
    with pytest.raises(RewardError, match=FAILURES[digit]) as caught:
        scorer.submit(rows).result()
    assert "compute_score of" in str(caught.value)
    assert "sample_index 105 (data_source 'my/data')" in str(caught.value)
    assert "on_error=zero" in str(caught.value)


def test_failing_samples_count_as_zero_if_the_user_asks_so(scorer_of, tokenizer):
    scorer = scorer_of(FRAGILE, timeout_s=0.5, on_error="zero")
    responses = list("0102030405060708")
    start = time.monotonic()
    for _ in range(2):
        scored = scorer.submit(rows_of(tokenizer, responses)).result()
        assert scored["score"].tolist() == [float(digit in "08") for digit in responses]
        for digit, info in zip(responses, objects(scored, "reward_info"), strict=True):
            assert ("error" in info) == (digit not in "08")
    assert time.monotonic() - start < 55  # one that hung would sleep for 60
    values = scorer.drain_metrics().values()
    assert (values["reward/failed"], values["reward/timeout"], values["reward/worker_death"]) == (14, 2, 8)
    assert not scorer.drain_metrics().values()


def test_a_hung_sample_delays_only_itself(scorer_of, tokenizer):
    code = """
        import time

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "9":
                while True:
                    pass
            return 1.0
    """
    scorer = scorer_of(code, timeout_s=0.7, on_error="zero")
    scorer.submit(rows_of(tokenizer, ["0"] * 300)).result()  # by now many samples are handed out at once
    start = time.monotonic()
    scored = scorer.submit(rows_of(tokenizer, (["0"] * 60 + ["9"] + ["0"] * 60) * 2)).result()
    assert scored["score"].sum() == 240
    assert time.monotonic() - start < 60  # of the 170 that each of its time would take


def test_the_time_limit_is_for_each_sample_even_when_many_are_handed_out_at_once(scorer_of, tokenizer):
    code = """
        import time

        def compute_score(data_source, solution_str, ground_truth, extra_info):
            time.sleep(0.03 * (solution_str == "9"))
            return 1.0
    """
    scorer = scorer_of(code, timeout_s=0.5)
    for _ in range(20):  # where much else runs, it takes more samples to see how short they are
        scorer.submit(rows_of(tokenizer, ["0"] * 300)).result()
        if scorer._pool._chunk > 20:
            break
    assert scorer._pool._chunk > 20
    assert scorer.submit(rows_of(tokenizer, ["9"] * 100)).result()["score"].sum() == 100


def test_a_function_that_cannot_be_loaded_is_reported_at_construction(scorer_of):
    with pytest.raises(RewardError, match=r"cannot start: ModuleNotFoundError.*no_such_library"):
        scorer_of("import no_such_library\ndef compute_score(**given):\n    return 1.0\n")
    with pytest.raises(RewardError, match="reward workers end before they are ready: exit code 7"):
        scorer_of("import os\nos._exit(7)\ndef compute_score(**given):\n    return 1.0\n")


def test_a_row_that_no_function_can_score_is_named(scorer_of, tokenizer):
    with pytest.raises(RewardError, match=r"exact_match failed on sample_index 101.*ground_truth"):
        rows = rows_of(tokenizer, ["1", "2"], truths=["1", None])
        scorer_of().submit(rows).result()
    with pytest.raises(ConfigError, match="'unheard/of' has no reward function"):
        scorer_of().submit(rows_of(tokenizer, ["1"], source="unheard/of")).result()


def test_a_worker_that_died_while_idle_costs_no_sample(scorer_of, tokenizer):
    scorer = scorer_of("def compute_score(**given):\n    return 1.0\n")
    (worker,) = scorer._pool._workers
    os.kill(worker.process.pid, 9)
    worker.process.wait()
    assert scorer.submit(rows_of(tokenizer, ["1"] * 4)).result()["score"].sum() == 4


def test_closing_ends_the_workers(scorer_of, tokenizer):
    scorer = scorer_of("def compute_score(**given):\n    return 1.0\n")
    processes = [worker.process for worker in scorer._pool._workers]
    scorer.close()
    assert processes and all(process.poll() is not None for process in processes)


def test_scoring_leaves_the_caller_free(scorer_of, tokenizer, tmp_path):
    """No score is there before the caller goes on."""
    go = tmp_path / "go"
    waits = (
        "import os, time\n"
        "def compute_score(**given):\n"
        "    end = time.monotonic() + 20\n"
        f"    while not os.path.exists({str(go)!r}) and time.monotonic() < end:\n"
        "        time.sleep(0.02)\n"
        "    return 1.0\n"
    )
    future = scorer_of(waits).submit(rows_of(tokenizer, ["1", "2"]))
    assert not future.done()
    go.touch()
    assert future.result()["score"].tolist() == [1, 1]


def test_a_keeper_ends_its_worker_when_the_pipe_of_the_rank_is_closed():
    ours, theirs = socket.socketpair()
    code = """
import sys, time
from siirl.sandbox.keeper import keep
keep(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True) as keeper:
        theirs.close()
        assert keeper.stdout.readline() == "up\n"
        (worker,) = psutil.Process(keeper.pid).children()
        ours.close()
        assert keeper.wait(10) == 0
        assert not worker.is_running()
