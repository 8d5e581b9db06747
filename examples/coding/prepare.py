"""Make what the example trains on: 20 repositories with failing tests, as Harbor's tasks, and a tiny model.

Each repository is a module with one wrong operator. A word of the model is a whole command, so that a model
of random weights finds the right one by trying.
"""

import argparse
import itertools
import shutil
from pathlib import Path

from examples.multi_agent.prepare import CHAT_TEMPLATE, ROLES
from examples.quickstart.prepare import make_model, make_tokenizer

OPERATORS = {"sum": "+", "difference": "-", "product": "*", "quotient": "//"}
THINGS = ("apples", "bees", "cups", "days", "eggs")
COMMANDS = [f"sed -i 's|%|{operator}|' things.py" for operator in OPERATORS.values()]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def task_files(kind: str, thing: str, number: int) -> dict[str, str]:
    """The files of a task, by name."""
    name, operator = f"{kind}_of_{thing}", OPERATORS[kind]
    numbers = [(60 + number, 4 + number), (90, 7), (8, 5)]
    tests = "\n".join(f"assert {name}({a}, {b}) == {a} {operator} {b}" for a, b in numbers)
    return {
        "task.toml": 'version = "1.0"\n[metadata]\nauthor_name = "siirl"\n[verifier]\ntimeout_sec = 20\n',
        "instruction.md": f"The {kind} of {thing} is wrong .\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY things.py test_things.py ./\n",
        "environment/things.py": f"def {name}(a, b):\n    return a % b\n",
        "environment/test_things.py": f"from things import {name}\n\n{tests}\n",
        "tests/test.sh": "cp /tests/test_things.py . && python3 test_things.py\n"
        "echo $((1 - ($? != 0))) > /logs/verifier/reward.txt\n",
        "tests/test_things.py": f"from things import {name}\n\n{tests}\n",
        "solution/solve.sh": f"sed -i 's|%|{operator}|' things.py\n",
    }


def write(out: Path) -> None:
    """tasks/ and model/."""
    shutil.rmtree(out / "tasks", ignore_errors=True)
    for number, (kind, thing) in enumerate(itertools.product(OPERATORS, THINGS)):
        for name, text in task_files(kind, thing, number).items():
            file = out / "tasks" / f"{kind}_{thing}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    tokenizer = make_tokenizer(["<unk>", *ROLES, *OPERATORS], CHAT_TEMPLATE, max_length=128, unknown="<unk>")
    tokenizer.add_tokens([*COMMANDS, SUBMIT])
    make_model(tokenizer, initializer_range=0.06).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/coding"))
    args = parser.parse_args()
    write(args.out)
    print(f"tasks and model: {args.out}")


if __name__ == "__main__":
    main()
