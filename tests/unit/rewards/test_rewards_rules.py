import dataclasses

import pytest
import torch

from siirl.config import load_config
from siirl.dialect.dialect import Dialect
from siirl.dialect.marks import KNOWN
from siirl.dialect.parts import read_turn
from siirl.errors import ConfigError
from siirl.rewards.by_data_source import RewardChooser
from siirl.rewards.math_answer import math
from siirl.rewards.reward_registry import REWARDS
from siirl.rewards.rules import boxed_format, exact_match, gsm8k, last_boxed, think_format
from siirl.rewards.sample import Sample, score_sample


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("12", "12", 1),
        (" 12\n", "12 ", 1),
        ("12.", "12", 0),
        ("", "12", 0),
        ("7", 7, 1),
        ("b", ["a", "b"], 1),
        ("c", ["a", "b"], 0),
    ],
)
def test_exact_match_compares_stripped_text(response, truth, score):
    assert exact_match("s", response, truth, None) == score


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("so 6*7 = 42\n#### 42", 1, 1),
        ("#### 41 or rather\n#### 42", 1, 1),
        ("#### $42", 1, 1),
        ("#### 42.00", 1, 1),
        ("#### 42.", 1, 1),
        ("the answer is 42.", 0, 1),
        ("#### 43", 0.25, 0.25),
        ("####42 and 7 more", 1, 0.25),
        ("#### forty-two", 0, 0),
        ("42 " + "x" * 400, 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_reads_the_last_answer(response, strict, flexible):
    assert gsm8k("s", response, "42", None, format_score=0.25) == strict
    assert gsm8k("s", response, "42", None, method="flexible", format_score=0.25) == flexible


def test_gsm8k_compares_numbers_not_their_spelling():
    assert gsm8k("s", "#### 1,234", "1234", None) == 1
    assert gsm8k("s", "#### -5", "-5", None) == 1
    assert gsm8k("s", "#### -5", "5", None) == 0
    assert gsm8k("s", "#### 1,234", "1,234.0", None) == 1


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"an open { and \boxed{8} and a stray } }", "8"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\fbox{9}", "9"),
        (r"\boxed {10}", "10"),
        (r"\boxed{}", ""),
        ("none", None),
        (r"\boxed 3", None),
    ],
)
def test_last_boxed_balances_braces(text, content):
    assert last_boxed(text) == content


def test_last_boxed_takes_one_pass_over_a_degenerate_response():
    assert last_boxed(r"\boxed{" * 50_000) is None


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>b", 1),
        ("  <think>a\n</think>\nb ", 1),
        ("<think></think>b", 0),
        ("<think>a</think>", 0),
        ("a</think>b", 0),
        ("x<think>a</think>b", 0),
        ("<think>a</think>b<think>c</think>", 0),
    ],
)
def test_think_format_wants_reasoning_and_then_an_answer(text, score):
    parts = read_turn(Dialect("a model", reasoning=KNOWN[0]), text, False).as_dict()
    assert think_format("s", text, None, None, parts) == score


@pytest.mark.parametrize(("text", "score"), [("a</think>b", 1), ("a</think>", 0), ("b", 0)])
def test_think_format_knows_of_reasoning_that_the_prompt_has_opened(text, score):
    parts = read_turn(Dialect("a model", reasoning=KNOWN[0]), text, True).as_dict()
    assert think_format("s", text, None, None, parts) == score


def test_boxed_format_wants_a_box_that_is_not_empty():
    assert [boxed_format("s", text, None, None) for text in (r"\boxed{1}", r"\boxed{ }", "1")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{42}", "42", 1),
        (r"\boxed{042}", "42", 1),
        (r"\boxed{43}", "42", 0),
        (r"\boxed{0.75}", r"\frac{3}{4}", 1),
        (r"\boxed{\dfrac{6}{8}}", r"\frac{3}{4}", 1),
        (r"\boxed{3/4}", r"\frac{3}{4}", 1),
        (r"\boxed{0.74}", r"\frac{3}{4}", 0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        (r"\boxed{x^2+2x+2}", "x^2+2x+1", 0),
        (r"\boxed{y^2+2y+1}", "x^2+2x+1", 0),
        (r"\boxed{x=5}", "5", 1),
        (r"\boxed{\sqrt{2}+1}", r"\sqrt{2}+2", 0),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", 1),
        (r"\boxed{2i}", "2i", 1),
        (r"\boxed{1+2i}", "2i+1", 1),
        (r"\boxed{1-2i}", "2i+1", 0),
        (r"\boxed{\sin^2 x + \cos^2 x}", "1", 1),
        (r"\boxed{0.3333}", r"\frac{1}{3}", 0),
        (r"\boxed{\frac{1}{0}}", "1", 0),
        (r"\boxed{(2, 1)}", "(1, 2)", 0),
        (r"\boxed{[1, 2)}", r"\left[1,2\right)", 1),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        ("the answer is 42", "42", 1),
        ("first 41, so the final answer is $42$.", "42", 1),
        ("I do not know", "42", 0),
        ("", "42", 0),
        (r"\boxed{}", "42", 0),
        (r"\boxed{\frac{1}{", "42", 0),
        (r"\boxed{42}", r"\boxed{42}", 1),
        (r"\boxed{5}", ["4", "5"], 1),
        (r"\boxed{1,234}", "1234", 1),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        (r"\boxed{" + "9" * 5000 + "}", "42", 0),
    ],
)
def test_math_compares_values(response, truth, score):
    assert math("s", response, truth, None) == score


def test_math_can_insist_on_a_box():
    assert math("s", "the answer is 42", "42", None, boxed_only=True) == 0
    assert math("s", r"the answer is \boxed{42}", "42", None, boxed_only=True) == 1


@pytest.mark.parametrize("name", ["math", "gsm8k", "exact_match"])
@pytest.mark.parametrize("truth", [None, []], ids=str)
def test_a_row_without_ground_truth_is_an_error(name, truth):
    with pytest.raises(ValueError, match=r"no reward_model\.ground_truth"):
        REWARDS[name].fn("s", r"\boxed{1} #### 1", truth, None)


def chooser(*overrides):
    return RewardChooser(load_config(list(overrides)))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("aime24", "math_dapo"),
        ("deepscaler", "math"),
        ("arithmetic/sums", "exact_match"),
        ("think_format", "think_format"),
        ("codecontests", "code"),
        ("taco", "code"),
    ],
)
def test_the_data_source_selects_the_function(source, name):
    assert chooser().parts(source) == ((name, 1.0),)


def test_the_user_maps_further_data_sources():
    choose = chooser(
        "+reward_model.reward_kwargs.functions={my/*:{math:0.9,think_format:0.1},openai/gsm8k:exact_match}",
    )
    assert choose.parts("my/data") == (("math", 0.9), ("think_format", 0.1))
    assert choose.parts("openai/gsm8k") == (("exact_match", 1.0),)


def test_the_users_own_function_scores_every_source():
    assert chooser("custom_reward_function.path=/r.py").parts("whatever") == (("custom", 1.0),)


def test_a_map_of_functions_comes_before_the_users_own_function_and_may_name_it():
    choose = chooser(
        "custom_reward_function.path=/r.py",
        "+reward_model.reward_kwargs.functions={a:math,b:{custom:0.5,think_format:0.5}}",
    )
    assert choose.parts("a") == (("math", 1.0),)
    assert choose.parts("b") == (("custom", 0.5), ("think_format", 0.5))
    assert choose.parts("c") == (("custom", 1.0),)


def test_parts_are_normalised_by_their_range_and_weights_by_their_sum():
    functions = "{a:{custom:{weight:3,low:-1,high:1},think_format:1}}"
    choose = chooser(
        "custom_reward_function.path=/r.py",
        f"+reward_model.reward_kwargs.functions={functions}",
        "+reward_model.reward_kwargs.normalize_weights=True",
    )
    mix = choose.mix("a")
    assert mix.parts == (("custom", 0.375), ("think_format", 0.25))
    assert mix.offset == 0.375
    best = score_sample({"custom": lambda **given: 1, "think_format": lambda **given: 1}, mixed(mix))
    worst = score_sample({"custom": lambda **given: -1, "think_format": lambda **given: 0}, mixed(mix))
    assert (best.score, worst.score) == (1.0, 0.0)
    assert best.info == {"custom": 1.0, "think_format": 1.0}


def mixed(mix):
    return Sample(mix.parts, "a", "response", "truth", None, mix.offset)


def test_the_remote_manager_asks_the_service_about_every_source_that_is_not_mapped():
    choose = chooser(
        "reward_model.reward_manager=remote",
        "reward_model.remote.url=http://localhost:1/score",
        "+reward_model.reward_kwargs.functions={a:{remote:0.5,math:0.5},b:gsm8k}",
    )
    assert choose.parts("openai/gsm8k") == (("remote", 1.0),)
    executors = [choose.executor(source) for source in ("openai/gsm8k", "a", "b")]
    assert executors == ["thread", "process", "inline"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward_manager=batch"], "batch: there is no function to call with a batch"),
        (["reward_manager=remote"], "remote: there is no service. Set reward_model.remote.url"),
        (["remote.url=localhost"], r"remote.url='localhost': it must be the http\(s\) address"),
        (["reward_manager=navie"], "Did you mean 'naive'|naive, batch, dapo, parallel, prime, remote"),
        (["+sandbox_fusion.url=localhost"], r"sandbox_fusion.url='localhost'"),
        (["+sandbox_fusion.url=http://a", "+sandbox_fusion.retries=3"], "retries: unknown. Known: url"),
        (["+sandbox_fusion.url=http://a", "+sandbox_fusion.max_tries=0"], "max_tries=0: it must be a number"),
    ],
)
def test_a_manager_that_cannot_work_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        chooser(
            *(
                key.replace("+", "+reward_model.") if key[0] == "+" else f"reward_model.{key}"
                for key in overrides
            )
        )


@pytest.mark.parametrize(
    ("overrides", "source", "error", "message"),
    [
        ([], "unheard/of", ConfigError, "'unheard/of' has no reward function.*custom_reward_function"),
        ([], "olimpiad", ConfigError, "'olimpiad' has no .*Did you mean 'olympiad'"),
        ([], "remote", ConfigError, "'remote' is scored by remote, and there is no service.*remote.url"),
        (["functions={a:{math:{low:1,high:1}}}"], "a", ConfigError, "low=1 and high=1: low must be less"),
        (["functions={a:{math:{scale:1}}}"], "a", ConfigError, "math has no option 'scale'"),
        (["functions={a:custom}"], "a", ConfigError, "unknown reward function 'custom'"),
        (["functions={a:{math:0}}", "normalize_weights=True"], "a", ConfigError, "weights add up to 0"),
        (["functions={a:mth}"], "a", ConfigError, "unknown reward function 'mth'.*Did you mean 'math'"),
        (["functions={a:{math:heavy}}"], "a", ConfigError, "weight of math is 'heavy'"),
        (["functions=math"], "a", ConfigError, "functions='math': it must be a map"),
        (["metod=strict"], "a", ConfigError, "metod: no built-in reward.*Did you mean 'method'"),
    ],
)
def test_what_cannot_be_chosen_is_refused(overrides, source, error, message):
    with pytest.raises(error, match=message):
        chooser(*(f"+reward_model.reward_kwargs.{key}" for key in overrides)).check({source})


def test_keyword_arguments_reach_the_functions_that_take_them():
    choose = chooser(
        "+reward_model.reward_kwargs.method=flexible", "+reward_model.reward_kwargs.boxed_only=True"
    )
    assert choose.kwargs["gsm8k"] == {"method": "flexible"}
    assert choose.kwargs["math"] == {"boxed_only": True}
    assert choose.kwargs["exact_match"] == {}


def sample(*parts):
    return Sample(parts or (("f", 1.0),), "s", "response", "truth", {"k": 1})


def test_scores_of_several_functions_are_weighted_and_kept():
    functions = {"f": lambda **given: 1.0, "g": lambda **given: {"score": 0.5, "why": "short"}}
    outcome = score_sample(functions, sample(("f", 2.0), ("g", 1.0)))
    assert outcome.score == 2.5
    assert outcome.info == {"f": 1.0, "g": 0.5, "g/why": "short"}


def test_a_function_gets_the_sample_by_keyword():
    seen = {}
    score_sample({"f": lambda **given: seen.update(given) or 0.0}, sample())
    assert seen == {
        "data_source": "s",
        "solution_str": "response",
        "ground_truth": "truth",
        "extra_info": {"k": 1},
    }


def test_numbers_of_any_library_are_scores():
    import numpy as np
    import torch

    for value in (
        True,
        1,
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        torch.tensor(1.0),
    ):
        outcome = score_sample({"f": lambda value=value, **given: {"score": value, "acc": value}}, sample())
        assert outcome.score == 1.0, type(value)


def test_scores_that_add_up_to_more_than_float32_holds_are_an_error():
    most = float(torch.finfo(torch.float32).max)
    assert score_sample({"f": lambda **given: most}, sample()).score == most
    twice = dataclasses.replace(sample(), parts=(("f", 1.0), ("f", 1.0)))
    with pytest.raises(ValueError, match=r"add up to 6.8.*finite, in float32"):
        score_sample({"f": lambda **given: most}, twice)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (float("nan"), "must be finite"),
        (float("-inf"), "must be finite"),
        (1e39, r"returned 1e\+39: a score must be finite, in float32"),
        (-(10**400), "must be finite, in float32"),
        (None, r"it returned None instead of a number: does a path end without return\?"),
        ("1.0", r"it returned '1\.0' instead of a number \(it is a str\)"),
        ((1.0, "x"), "it is a tuple"),
        ([1.0], "it is a list"),
        ({"reward": 1}, 'a dict without "score".*reward'),
        ({"score": "high"}, "'high' instead of a number"),
        ({"score": 1.0, "x": object()}, "must be numbers or texts"),
    ],
)
def test_a_result_that_is_no_score_is_an_error(result, message):
    with pytest.raises(ValueError, match=message):
        score_sample({"f": lambda **given: result}, sample())
