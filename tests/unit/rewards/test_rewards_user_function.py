import textwrap

import pytest

from siirl.config import load_config
from siirl.errors import ConfigError
from siirl.rewards.user_function import check_user_function, load_user_function

GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def config(path, *more):
    return load_config([f"custom_reward_function.path={path}", *more])


def source_file(tmp_path, code):
    file = tmp_path / "my_reward.py"
    file.write_text(textwrap.dedent(code))
    return file


ACCEPTED = {
    "plain": GOOD,
    "catch_all": "def compute_score(**given):\n    return 1.0\n",
    "keyword_only": GOOD.replace("(data", "(*, data"),
    "assigned": "def f(**given):\n    return 1.0\ncompute_score = f\n",
    "conditional": "if True:\n    def compute_score(**given):\n        return 1.0\n",
    "imported": "from functools import partial as compute_score\n",
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_function_that_fits_is_accepted_without_being_run(tmp_path, kind):
    code = "raise SystemExit('the module was run')\n" + ACCEPTED[kind]
    check_user_function(config(source_file(tmp_path, code)))


def test_a_module_on_the_path_is_accepted_by_name(tmp_path, monkeypatch):
    source_file(tmp_path, GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    check_user_function(config("my_reward"))
    assert load_user_function("my_reward", "compute_score", {})(
        data_source="", solution_str="", ground_truth="", extra_info=None
    )


REFUSED = {
    "other_name": ("def compute_scores(**given): ...", "Did you mean 'compute_scores'"),
    "far_name": (
        "def score(**given): ...",
        r"has no such function, it defines score\. Set .*\.name=score\.$",
    ),
    "nothing": ("x = 1", "defines no function"),
    "syntax": ("def compute_score(:", "my_reward.py, line 1 is no Python"),
    "missing": ("def compute_score(solution_str, ground_truth): ...", "it does not take data_source"),
    "needs_more": ("def compute_score(tokenizer, **given): ...", "it needs tokenizer, which is not given"),
    "positional": ("def compute_score(data_source, /, **given): ...", "data_source is positional-only"),
    "async": ("async def compute_score(**given): ...", "is a coroutine"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_function_that_does_not_fit_is_refused_before_launch(tmp_path, kind):
    code, message = REFUSED[kind]
    with pytest.raises(ConfigError, match=message):
        check_user_function(config(source_file(tmp_path, code)))


def test_reward_kwargs_must_fit_the_signature(tmp_path):
    file = source_file(tmp_path, GOOD.replace("extra_info=None", "extra_info, scale"))
    check_user_function(config(file, "+custom_reward_function.reward_kwargs.scale=2"))
    with pytest.raises(ConfigError, match="it needs scale"):
        check_user_function(config(file))
    with pytest.raises(ConfigError, match="it does not take bias"):
        check_user_function(
            config(source_file(tmp_path, GOOD), "+custom_reward_function.reward_kwargs.bias=2")
        )


@pytest.mark.parametrize("path", ["/nowhere/reward.py", "no_such_package.reward"])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ConfigError, match="no such"):
        check_user_function(config(path))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("compute_score = 3", "no plain function"),
        ("import functools\ncompute_score = functools.partial(lambda a: a)", "cannot be called"),
    ],
)
def test_what_the_source_does_not_show_is_refused_when_loaded(tmp_path, code, message):
    with pytest.raises(ConfigError, match=message):
        load_user_function(str(source_file(tmp_path, code)), "compute_score", {})
