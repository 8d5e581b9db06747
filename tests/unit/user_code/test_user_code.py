"""Code that a workflow names is found, parsed, and fits how siirl calls it, before anything starts."""

import sys

import pytest

from siirl.errors import DagError
from siirl.user_code.load_object import load_object
from siirl.user_code.signatures import Call
from siirl.user_code.source import check_loaded, check_reference, module_source

CODE = """
raise SystemExit("the module was run")
def plain(messages, episode): ...
def short(messages): ...
def named(messages, episode, role, *, tone="kind"): ...
def any_of(*given, **more): ...
def bare(): ...
async def waits(messages, episode): ...
def only(messages, /, episode): ...
class Thing: ...
imported_elsewhere = plain
"""
TWO = ("messages", "episode")


def call(*keywords: str, **more) -> Call:
    return Call(TWO, keywords, **more)


def test_a_module_is_found_without_running_what_it_lies_in(tmp_path, monkeypatch):
    """`siirl check` starts nothing of the user's: neither the module nor the packages above it."""
    (tmp_path / "loud" / "inner").mkdir(parents=True)
    for folder in ("loud", "loud/inner"):
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('run')")
    (tmp_path / "loud" / "inner" / "code.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    check_reference("loud.inner.code:plain", "key", call())
    for absent in ("loud.inner.absent:plain", "loud.absent.code:plain", "absent.code:plain"):
        with pytest.raises(DagError, match="cannot be imported"):
            check_reference(absent, "key", call())


ACCEPTED = [
    ("plain", call()),
    ("any_of", call("role", "x")),
    ("named", call("role")),
    ("named", call("tone", "role")),
    ("waits", call(awaits=True)),
    ("only", call()),
    ("imported_elsewhere", call("anything")),
]


@pytest.mark.parametrize(("name", "made"), ACCEPTED)
def test_a_function_that_fits_is_accepted_without_being_run(name, made, tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    check_reference(f"{tmp_path}/code.py:{name}", "node 'n': route", made)


REFUSED = {
    "no text": (5, call(), "node 'n': route = 5 is no text. Write file.py:fn"),
    "a truth": (True, call(), "route = True is no text"),
    "a list": (["a", "b"], call(), r"route = \['a', 'b'\] is no text"),
    "no colon": ("found", call(), "route = 'found' names no function. Write file.py:fn"),
    "no name": ("code.py:", call(), "route = 'code.py:' names no function"),
    "no file": ("nowhere.py:fn", call(), "there is no file 'nowhere.py' in /.*Correct the path"),
    "no module": ("no_such_package.flow:fn", call(), "there is no such module.*PYTHONPATH"),
    "syntax": ("broken.py:who", call(), r"broken.py, line 2 is no Python: expected ':' \(def who"),
    "argument twice": ("twice.py:fn", call(), "twice.py, line 1 is no Python: duplicate argument 'a'"),
    "other name": ("code.py:plane", call(), "has no 'plane', it defines plain, .*Did you mean 'plain'"),
    "too few": ("code.py:short", call(), r"short\(messages\) \(line 4\) cannot be called as short\(messages, "
                r"episode\): it takes 1 value, not 2. Change its arguments.$"),
    "none": ("code.py:bare", call(), "it takes no values, not 2"),
    "needed": ("code.py:named", call(more="kwargs"), "it needs role, which is not.*arguments, or kwargs"),
    "unknown": ("code.py:named", call("rolle", "role"), r"as named\(messages, episode, rolle=..., role=...\)"
                r": it does not take rolle \(did you mean 'role'\?\)"),
    "twice": ("code.py:plain", call("episode"), "episode is given twice"),
    "coroutine": ("code.py:waits", call(), "is a coroutine, and nobody awaits it. Drop `async`"),
    "class": ("code.py:Thing", call(), "is a class, not a function"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_cannot_be_called_is_refused_with_place_reason_and_fix(name, tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("x = 1\ndef who(episode)\n    return None\n")
    (tmp_path / "twice.py").write_text("def fn(a, a): ...\n")
    monkeypatch.chdir(tmp_path)
    reference, made, words = REFUSED[name]
    with pytest.raises(DagError, match=f"^node 'n': route = .*{words.partition('route = ')[2] or words}"):
        check_reference(reference, "node 'n': route", made)


LOADED = [
    (lambda messages: None, "it takes 1 value, not 2"),
    (5, "cannot be called"),
    (lambda messages, episode, more: None, "it needs more"),
]


@pytest.mark.parametrize(("function", "words"), LOADED)
def test_what_the_source_does_not_show_is_checked_when_it_is_loaded(function, words):
    check_loaded(lambda messages, episode: None, "node 'n': route", call())
    with pytest.raises(DagError, match=f"node 'n': route.*{words}"):
        check_loaded(function, "node 'n': route", call())


def test_loading_says_what_is_wrong_as_the_check_does(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("def who(episode)\n    return None\n")
    monkeypatch.chdir(tmp_path)
    for reference, words in (
        (5, "is no text"),
        ("who", "names no function"),
        ("broken.py:who", "broken.py, line 1 is no Python"),
        ("nowhere.py:who", "there is no file 'nowhere.py'"),
    ):
        with pytest.raises(DagError, match=f"node 'n': route = .*{words}"):
            load_object(reference, "node 'n': route")


def test_modules_in_folders_without_init_are_found_and_nothing_of_them_is_imported(tmp_path, monkeypatch):
    for inner in ("plain.py", "deeper/below.py"):
        file = tmp_path / "outer_of_mine" / "inner" / inner
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("plain", "deeper.below"):
        found = module_source(f"outer_of_mine.inner.{name}")
        assert found == tmp_path / "outer_of_mine" / "inner" / (name.replace(".", "/") + ".py")
    with pytest.raises(ModuleNotFoundError):
        module_source("outer_of_mine.inner.absent.below")
    assert not any(name.startswith("outer_of_mine") for name in sys.modules)
