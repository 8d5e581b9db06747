"""The schema knows every key of siiRL, explains each of its own, and the reference page says what it says."""

import ast
import inspect
import json
import typing
from collections import defaultdict
from pathlib import Path

import pytest
from configuration_pages import DEVIATIONS, PAGES, PLACES, page_of, reference_pages, write_pages

from siirl.config import Config, effect_warnings, from_dict, to_dict, with_overrides
from siirl.config.aliases import ALIASES
from siirl.config.keys import walk
from siirl.config.resolve import FOLLOWS, REFERENCE, get, status
from siirl.config.root import TOP_GROUPS, all_groups, all_keys, get_group_class
from siirl.config.tree import default_config
from siirl.config.values import plain
from siirl.errors import UserError

ROOT = Path(__file__).parents[3]


def reference_defaults() -> dict[str, typing.Any]:
    """Key -> default, as siiRL has them."""
    lines = (Path(__file__).parent / "config_reference_keys.txt").read_text().splitlines()
    pairs = (line.partition(" = ") for line in lines)
    return {name: plain(ast.literal_eval(value)) for name, _, value in pairs}


def test_every_key_of_siirl_is_known_with_its_default():
    wrong = {}
    for name, expected in reference_defaults().items():
        ours = plain(get(default_config(), name)) if name in all_keys() else "unknown"
        if name in DEVIATIONS:
            assert DEVIATIONS[name].reference == expected, name
            assert ours != expected, f"{name} does not deviate any more"
        elif ours != expected:
            wrong[name] = (expected, ours)
    assert wrong == {}
    assert set(DEVIATIONS) <= set(reference_defaults())


def test_every_key_is_explained_and_has_one_status():
    for name, key in all_keys().items():
        rule = key.rule
        assert rule.doc and "|" not in rule.doc, name
        assert sum(map(bool, (rule.later, rule.ignored, rule.replaced))) <= 1, name
        if key.default is None and name not in FOLLOWS:
            assert type(None) in typing.get_args(key.type), name
        if rule.choices and key.default is not None:
            default = key.default if isinstance(key.default, tuple) else (key.default,)
            assert set(default) <= set(rule.choices) | set(rule.later_choices), name
        conditions = [one for both in (rule.when, rule.within) for one in both.split(" or ") if one]
        for needed in (condition.partition("=")[0] for condition in conditions):
            absolute = needed.split(".")[0] in TOP_GROUPS
            assert (needed if absolute else f"{name.rsplit('.', 1)[0]}.{needed}") in all_keys(), name


def test_older_names_and_followers_point_at_keys_that_act():
    for alias, targets in ALIASES.items():
        assert alias in all_keys()
        assert {status(target) for target in targets} == {"supported"}, alias
    for name, template in FOLLOWS.items():
        source = all_keys().get(template.removeprefix("${").removesuffix("}"))
        same = source is not None and source.default == all_keys()[name].default
        assert all_keys()[name].default is None or same, name
    assert {one for template in FOLLOWS.values() for one in REFERENCE.findall(template)} <= set(all_keys())


def test_group_names_cover_every_level():
    assert {
        "data",
        "actor_rollout_ref",
        "actor_rollout_ref.actor",
        "actor_rollout_ref.actor.optim",
    } <= all_groups()
    assert not all_groups() & set(all_keys())


def test_the_reference_pages_are_current():
    committed = {page.name: page.read_text() for page in (ROOT / "docs" / "configuration").glob("*.md")}
    if committed != reference_pages():
        pytest.fail("docs/configuration/ is out of date: run `make docs`")


def test_writing_the_reference_removes_the_page_of_a_group_that_is_no_more(tmp_path):
    (tmp_path / "older_group.md").write_text("# Keys: older group\n")
    write_pages(tmp_path)
    assert {page.name for page in tmp_path.iterdir()} == set(reference_pages())


def test_each_group_of_keys_has_one_page_which_the_first_page_links():
    pages = reference_pages()
    first = pages["index.md"]
    for group in {key.rpartition(".")[0] for key in all_keys()}:
        having = [name for name, text in pages.items() if f"\n## {group}\n" in text]
        assert having == [f"{page_of(group)}.md"], group
    for name in pages.keys() - {"index.md"}:
        assert f"({name})" in first and f"\n{name.removesuffix('.md')}\n" in first
    assert len(first.split()) < 800 and max(len(text.split()) for text in pages.values()) < 5000
    assert {group for _, groups in PAGES.values() for group in groups} <= all_groups()


def test_the_reference_names_every_key_in_the_section_of_its_group():
    text = "\n".join(text for name, text in reference_pages().items() if name != "index.md")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    absent = [
        key for key in all_keys() if f"`{key.rpartition('.')[2]}`" not in sections[key.rpartition(".")[0]]
    ]
    assert absent == []
    assert {group for groups in PLACES.values() for group in groups} <= set(sections)
    assert set(TOP_GROUPS) - {group.partition(".")[0] for groups in PLACES.values() for group in groups} <= {
        "critic",  # as the actor's
        "frozen",
    }


def test_keys_that_do_nothing_say_so_in_the_same_words():
    """config_unused_keys.txt: a key, a value that is not its default, and what is said of it."""
    lines = (Path(__file__).parent / "config_unused_keys.txt").read_text().splitlines()
    named = {line.partition(" = ")[0] for line in lines}
    assert named == {name for name in all_keys() if status(name) != "supported"}
    accepted = {}
    for line in lines:
        setting, _, expected = line.partition(" | ")
        name, _, value = setting.partition(" = ")
        try:
            cfg = with_overrides(default_config(), {name: json.loads(value)})
        except UserError as error:
            assert str(error) == expected
            continue
        kept, wanted = plain(get(cfg, name)), json.loads(value)
        assert (kept | wanted if isinstance(wanted, dict) else wanted) == kept and name in cfg.explicit
        accepted[name] = wanted
        if name in ALIASES:
            assert expected == " ".join(["sets", *sorted(set(cfg.explicit) - {name})])
        else:
            assert [line for line in effect_warnings(cfg) if line.startswith(f"{name}=")] == [expected]
    cfg = with_overrides(
        default_config(), {name: accepted[name] for name in accepted.keys() - ALIASES.keys()}
    )
    assert from_dict(to_dict(cfg)) == cfg and len(cfg.unused) > 100


def test_the_schema_holds_only_keys_that_do_something():
    """A field of a class that several groups have acts in one of them."""
    acts: dict[tuple[type, str], set[str]] = defaultdict(set)
    for name in walk(Config()):
        group, _, last = name.rpartition(".")
        classes = typing.cast(type, get_group_class(group)).__mro__
        owner = next(owner for owner in classes if last in inspect.get_annotations(owner))
        acts[owner, last].add(status(name))
    assert [field for field, found in acts.items() if "supported" not in found] == []
