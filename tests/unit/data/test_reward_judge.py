"""A judge's questions and answers: what is asked, which grade is read, and what counts as malformed."""

import shutil

import pytest
import torch
from fixtures_tiny import make_tiny_model_dir
from http_harness import serving
from op_contexts import op_context
from plan_cases import compiled, run_symbolically
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.dag.spec import DagBuilder
from siirl.data.chat import load_tokenizer
from siirl.data.completions import Completion
from siirl.data.rows import make_rows, objects
from siirl.engines.weights.target import stored_weights
from siirl.errors import ConfigError, DataError, EndpointError, RewardError
from siirl.nodes.reward_judge import judge_reward
from siirl.rewards.judge import Judge, check_judge

pytestmark = pytest.mark.heavy

SERVICE = ("reward_model.judge.url=http://localhost:1/v1/chat/completions",)


def config(*overrides: str):
    return load_config(["actor_rollout_ref.rollout.name=hf", "reward_model.enable=true", *overrides])


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("It is right.\nScore: 7", 0.7),
        ("score 10", 1.0),
        ("**Score:** 2.5 of 10", 0.25),
        ("Score: 3? No.\nSCORE: 4", 0.4),
        ("Score: 11", None),
        ("Score: -1", None),
        ("I cannot tell.", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_grade_in_the_answer_counts(answer, score):
    verdict = Judge(config(*SERVICE, "reward_model.judge.default_score=-0.5")).verdict(answer)
    assert verdict.malformed == (score is None)
    assert verdict.score == pytest.approx(-0.5 if score is None else score)


def test_the_users_parser_and_range_take_their_place(tmp_path):
    file = tmp_path / "parse.py"
    file.write_text("def grade(answer):\n    return {'good': 1, 'bad': -1}.get(answer.strip())\n")
    keys = (
        f"reward_model.judge.parser={file}:grade",
        "reward_model.judge.low=-1",
        "reward_model.judge.high=1",
    )
    judge = Judge(config(*SERVICE, *keys))
    assert [judge.verdict(text).score for text in ("good", " bad", "Score: 5")] == [1.0, 0.0, 0.0]
    assert [judge.verdict(text).malformed for text in ("good", " bad", "Score: 5")] == [False, False, True]


def test_a_question_is_the_template_filled_in_once(tmp_path):
    template = tmp_path / "ask.txt"
    template.write_text('{"q": "{prompt}", "a": "{response}"} {ground_truth} {data_source} {other}')
    judge = Judge(config(*SERVICE, f"reward_model.judge.prompt={template}"))
    chat = [{"role": "user", "content": "1+1"}]
    assert judge.question(chat, "{prompt}", "2", "math") == '{"q": "1+1", "a": "{prompt}"} 2 math {other}'
    chat = [{"role": "system", "content": "be kind"}, *chat]
    default = Judge(config(*SERVICE)).question(chat, "two", None, "math")
    assert "system: be kind\n\nuser: 1+1" in default and "[Answer]\ntwo" in default


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("judge.prompt=/no/such/file", "neither a template nor a file"),
        ("judge.prompt='Rate {prompt}'", r"has no \{response\}: the judge would not see"),
        ("judge.pattern='score ([0-9'", "is no regular expression"),
        ("judge.pattern='score'", "has no group"),
        ("judge.low=10", "low=10 is not below reward_model.judge.high=10"),
        ("judge.url=localhost", r"must be the http\(s\) address"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(key, message):
    with pytest.raises(ConfigError, match=message):
        check_judge(config(f"reward_model.{key}"))


def rows_of(tokenizer):
    responses = [tokenizer(text)["input_ids"] for text in ("4", "5", "4")]
    return make_rows(
        {
            "row_id": [0, 1, 2],
            "sample_index": [10, 10, 10],
            "raw_prompt": [[{"role": "user", "content": "2+2="}]] * 3,
            "data_source": ["math"] * 3,
            "ground_truth": ["4"] * 3,
            "prompt_ids": [[1]] * 3,
            "prompt_length": [1] * 3,
            "response_ids": responses,
            "response_length": [1] * 3,
        }
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model_dir(tmp_path_factory.mktemp("judge"), vocab=100, init_std=0.2, tie=False)


def test_a_service_grades_each_different_response_once(model):
    def answer(message):
        (turn,) = message["messages"]
        grade = 9 if "[Answer]\n4" in turn["content"] else 1
        return 200, {"choices": [{"message": {"content": f"Score: {grade}"}}]}

    with serving(answer) as service:
        cfg = config(
            f"actor_rollout_ref.model.path={model}",
            f"reward_model.judge.url={service.url}",
            "reward_model.judge.served_model=grader",
            "reward_model.judge.max_tokens=64",
        )
        tokenizer = load_tokenizer(cfg)
        ctx = op_context("judge", cfg, tokenizer)
        out = judge_reward(ctx, rows_of(tokenizer), Judge(cfg))
    assert out["score"].tolist() == pytest.approx([0.9, 0.1, 0.9])
    assert objects(out, "reward_info")[1] == {"judge": "Score: 1"}
    assert len(service.messages) == 2
    assert {key: service.messages[0][key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "grader",
        "temperature": 0.0,
        "max_tokens": 64,
    }
    assert ctx.metrics.values()["reward/judge_malformed"] == 0.0


def test_a_service_that_is_none_ends_the_run(model):
    with serving(lambda message: (200, {"error": "no model"})) as service:
        cfg = config(
            f"actor_rollout_ref.model.path={model}",
            f"reward_model.judge.url={service.url}",
            "reward_model.remote.max_tries=1",
        )
        tokenizer = load_tokenizer(cfg)
        with pytest.raises(EndpointError, match=r"has no choices\[0\]\.message\.content"):
            judge_reward(op_context("judge", cfg, tokenizer), rows_of(tokenizer), Judge(cfg))
    assert issubclass(EndpointError, RewardError)


def test_an_engine_gets_the_judges_stored_weights_and_answers_the_same_every_time(model):
    from siirl.compiler.plan import ModelPlan
    from siirl.config.roles import judge_config
    from siirl.engines.engine_registry import make_rollout_engine
    from siirl.parallel.dims import ParallelDims

    cfg = config(
        f"actor_rollout_ref.model.path={model}",
        f"reward_model.model.path={model}",
        "reward_model.judge.name=hf",
        "reward_model.judge.max_tokens=6",
        "reward_model.judge.pattern='([a-z0-9<>])'",
        "reward_model.judge.default_score=0.25",
        "reward_model.judge.prompt='Rate {prompt} {response}'",
        "reward_model.max_length=400",
        "actor_rollout_ref.rollout.dtype=float32",
    )
    tokenizer = load_tokenizer(cfg)
    plan = ModelPlan("agent_0.judge", 0, "judge", "hf", "lm", False, (0,), ParallelDims(1), "j", ("j",))
    engine = make_rollout_engine(plan, judge_config(cfg), None, torch.device("cpu"))
    ctx = op_context("judge", cfg, tokenizer)
    rows = rows_of(tokenizer)
    first = judge_reward(ctx, rows, Judge(cfg), engine, tokenizer)
    answers = [info["judge"] for info in objects(first, "reward_info")]
    assert engine.weight_version == 0 and answers[0] == answers[2] and answers[0]
    again = judge_reward(ctx, rows, Judge(cfg), engine, tokenizer)
    assert [info["judge"] for info in objects(again, "reward_info")] == answers

    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model)
    chat = [{"role": "user", "content": "Rate 2+2= 4"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = plain.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert answers[0] == tokenizer.decode(expected, skip_special_tokens=False)

    keys = ("reward_model.judge.name=hf", "reward_model.max_length=9")
    short = config(f"reward_model.model.path={model}", *keys)
    asked_too_much = op_context("judge", short, tokenizer)
    out = judge_reward(asked_too_much, rows, Judge(short), engine, tokenizer)
    assert out["score"].tolist() == [0.0] * 3
    assert asked_too_much.metrics.values()["reward/judge_malformed"] == 1.0


def test_a_judge_without_an_output_head_is_refused(model, tmp_path):
    from fixtures_tiny import make_tiny_reward_model

    folder = make_tiny_reward_model(tmp_path, tie=False)
    with pytest.raises(DataError, match=r"lacks 1 tensors of its model, lm_head\.weight"):
        list(stored_weights(folder, ["lm_head.weight", "model.norm.weight"]))


@pytest.mark.parametrize(
    ("judge", "op", "models"),
    [
        ("reward_model.judge.name=hf", "judge_reward", {"agent_0.judge": "hf"}),
        (*SERVICE, "judge_service", {}),
    ],
)
def test_the_configuration_says_what_a_reward_node_of_a_model_is(judge, op, models):
    dag = DagBuilder("judged")
    rollout = dag.node("rollout", "MODEL_INFERENCE", "ROLLOUT")
    reward = dag.node("reward", "MODEL_INFERENCE", "REWARD", dependencies=[rollout])
    advantage = dag.node("advantage", "COMPUTE", "ADVANTAGE", dependencies=[reward])
    dag.node("train", "MODEL_TRAIN", "ACTOR", dependencies=[advantage])
    keys = ("reward_model.enable=true", judge)
    path = () if "url" in judge else ("reward_model.model.path=/models/judge",)
    plan = compiled(dag.build(), 2, *keys, *path)
    run_symbolically(plan)
    assert plan.nodes["reward"].op == op
    assert {m.name: m.backend for m in plan.models.values() if m.role == "judge"} == models
    if models:
        with pytest.raises(ConfigError, match=r"reward_model\.model\.path is not set"):
            compiled(dag.build(), 2, *keys)


class Says:
    """An engine that has its weights, and one answer."""

    weight_version = 0

    def __init__(self, ids):
        self.ids = ids

    def generate(self, prompts, params, seeds):
        assert self.ids[-1] in params.stop_token_ids
        return [[Completion(self.ids, [0.0] * len(self.ids), "stop", 0)] for _ in prompts]


def test_a_judge_that_reasons_between_special_tokens_grades_by_its_answer(model, tmp_path):
    shutil.copytree(model, tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["[THINK]", "[/THINK]"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "judge")
    cfg = config(
        f"actor_rollout_ref.model.path={model}",
        f"reward_model.model.path={tmp_path / 'judge'}",
        "reward_model.judge.prompt='{response}'",
        "reward_model.judge.max_tokens=64",
    )
    said = "[THINK]score: 9[/THINK]score: 1"
    ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    ctx = op_context("judge", cfg, load_tokenizer(cfg))
    out = judge_reward(ctx, rows_of(ctx.tokenizer), Judge(cfg), Says(ids), tokenizer)
    assert out["score"].tolist() == pytest.approx([0.1] * 3)
    assert objects(out, "reward_info") == [{"judge": "score: 1"}] * 3
