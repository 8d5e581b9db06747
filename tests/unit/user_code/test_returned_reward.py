"""A reward function that returns what its environment gave is known by its source, and only such a one."""

import pytest

from siirl.user_code.returned_reward import returns_given

TURNS = 'turns = [m for m in extra_info["conversation"] if m["agent"] == 0]'
TWICE = {
    "the sum": 'return sum(turn["reward"] for turn in turns)',
    "a name and a dict": 'own = sum(t.get("reward", 0) for t in turns)\n    return {"score": own, "n": 1.0}',
    "in a loop": "total = 0\n    for turn in turns:\n        total += turn['reward']\n    return total / 2",
    "by a list": "r = []\n    for t in turns:\n        r.append(t['reward'])\n    return max(r)",
    "a key": "out = {'n': 1.0}\n    out['score'] = turns[-1]['reward']\n    return out",
    "another function": "return earned(turns)",
    "whether it won": "return float(turns[-1]['reward'] > 0)",
}
ONCE = {
    "a metric": 'return {"score": 0.1, "won": turns[-1]["reward"]}',
    "joined dicts": 'return {"score": 0.0} | {"won": float(turns[-1]["reward"] > 0)}',
    "the row's own": 'return float(extra_info["reward"])',
    "what was said": 'return float(turns[-1]["content"] == ground_truth)',
}


def written(folder, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    {TURNS}\n    {body}\n\n\n"
        "def earned(turns):\n    best = [turn['reward'] for turn in turns]\n    return best[-1]\n"
    )
    return str(path)


@pytest.mark.parametrize("body", [*TWICE.values(), *ONCE.values()], ids=[*TWICE, *ONCE])
def test_what_the_environment_gave_is_followed_to_the_score(tmp_path, body):
    assert returns_given(written(tmp_path, body), "compute_score") == (body in TWICE.values())


def test_what_cannot_be_read_is_not_judged(tmp_path):
    assert not returns_given(str(tmp_path / "none.py"), "compute_score")
    assert not returns_given(written(tmp_path, TWICE["the sum"]), "another")
