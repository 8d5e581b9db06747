"""Folders of tasks for tests, in both layouts: a file `answer` that must hold the word of the task."""

from pathlib import Path


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def harbor(folder: Path, word: str = "blue", dockerfile: str = "", toml: str = "") -> Path:
    return write(
        folder,
        {
            "task.toml": f'version = "1.0"\n[metadata]\nauthor_name = "me"\n{toml}',
            "instruction.md": f"Write {word} to the file answer.\n",
            "environment/Dockerfile": dockerfile
            or "FROM python:3.12\nWORKDIR /app\nENV COLOUR=red\nCOPY data/ ./data/\nCOPY hint.txt .\n",
            "environment/data/first.txt": "1st",
            "environment/hint.txt": "a colour",
            "tests/test.sh": "sh /tests/check.sh\n",
            "tests/check.sh": f"""echo checking
[ "$(cat answer)" = forever ] && sleep 60
[ "$(cat answer)" = silent ] && exit 1
[ "$(cat answer)" = {word} ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
""",
            "solution/solve.sh": f"echo {word} > answer\n",
        },
    )


def terminal_bench(folder: Path, word: str = "blue") -> Path:
    return write(
        folder,
        {
            "task.yaml": f"instruction: |-\n  Write {word} to the file answer.\nparser_name: pytest\n"
            "max_test_timeout_sec: 60\ntags: [x]\n",
            "Dockerfile": "FROM x\nWORKDIR /app\n",
            "docker-compose.yaml": "services: {client: {build: .}}\n",
            "run-tests.sh": "python3 -m pytest -p no:cacheprovider -rA $TEST_DIR/test_outputs.py\n",
            "tests/test_outputs.py": "from pathlib import Path\n\n\n"
            f"def test_word():\n    assert Path('answer').read_text().strip() == '{word}'\n",
            "solution.sh": f"echo {word} > answer\n",
        },
    )
