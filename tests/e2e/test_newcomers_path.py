"""The pages that a newcomer reads first do what they say, block by block, on a machine without a GPU.

They are typed as typed_pages does it. As they are for a GPU and a model of 0.6B, the same commands get a
tiny model and one step here (SMALL), and `make quickstart` and `pip` install nothing. A line of settings
alone is checked as part of a run; a Python block without the name of a file is typed into Python.
"""

import re
import sys
from pathlib import Path

import pytest
from fixtures_tiny import make_tiny_model_dir, make_tiny_reward_model
from typed_pages import BLOCK, NAMED, Block, follow

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = (
    "actor_rollout_ref.rollout.name=hf data.train_batch_size=4 data.max_prompt_length=160 "
    "data.max_response_length=16 trainer.total_training_steps=1 trainer.test_freq=1 trainer.save_freq=1 "
    "trainer.n_gpus_per_node=1"
)
MORE = "actor_rollout_ref.rollout.n=2"
TEAM = "actor_rollout_ref.rollout.agent.max_turn_tokens=2"
TASK = (
    "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=model data.train_files=train.jsonl "
    "data.val_files=val.jsonl custom_reward_function.path=my_reward.py"
)
HERE = f"""
siirl() {{
  local more= small="{SMALL}"
  [[ " $* " == *inputs/model* ]] && small="trainer.total_training_steps=1 trainer.test_freq=1"
  [[ " $* " == *solver_verifier* ]] && more={TEAM}
  case $1 in
    run|check|plan) command siirl "$@" $small {MORE} $more ;;
    view) command siirl "$@" --export page.html ;;
    resume) command siirl resume "$2" trainer.total_training_steps=2 ;;
    chat) echo "3 + 4 = ?" | command siirl "$@" --max-tokens 2 ;;
    *) command siirl "$@" ;;
  esac
}}
make() {{
  python examples/quickstart/prepare.py --out outputs/quickstart &&
  bash examples/quickstart/algorithm.sh grpo
}}
pip() {{ :; }}
latest() {{ command ls -td outputs/siirl/* | head -n 1; }}
"""
SETTING = re.compile(r"[\"']?\+?[a-z_]+\.[a-z_.]+=")
REPLACED = {
    "/models/Qwen3-0.6B": "model",
    "path=MODEL": "path=model",
    "OUTPUT": '"$(latest)"',
    "siirl.load_config(\n    [": f"siirl.load_config(\n    {SMALL.split()} + [",
    "/models/": "models/",
}
"""What the pages say -> what the same is here."""


def newcomers_blocks(page: Path) -> list[Block]:
    """The blocks of a page that a reader writes or types."""
    found = [Block("commands", HERE)]
    for _, language, text in BLOCK.findall(page.read_text()):
        text += "\n"
        for said, here in REPLACED.items():
            text = text.replace(said, here)
        if named := NAMED.match(text):
            found.append(Block("file", text, named[1]))
        elif language == "python":
            found.append(Block("commands", f"python - <<'END'\n{text}END"))
        elif language == "bash":
            found.append(Block("commands", as_typed(text)))
    return found


def as_typed(text: str) -> str:
    """The commands of a block: TASK is what `...` stands for, and settings alone are checked beside it."""
    lines = [line.rstrip() for line in text.replace("\\\n", " ").splitlines()]
    lines = [f"siirl check --elsewhere {line} ..." if SETTING.match(line) else line for line in lines]
    return "\n".join(re.sub(r"^siirl (\w+)(.*) \.\.\.$", rf"siirl \1 {TASK}\2", line) for line in lines)


@pytest.fixture
def clone(tmp_path):
    """What a clone of the repository has, with its environment, and what the page "your task" has written."""
    for name in ("examples", "dag_templates", "siirl"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    make_tiny_model_dir(tmp_path / "model", vocab=104, max_positions=1100)
    for name in ("gsm8k.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(8 * '{"question": "3 + 4 = ?", "answer": "7"}\n')
    make_tiny_reward_model(tmp_path / "models" / "my-reward-model", vocab=104)
    return tmp_path


PAGES = ("README.md", "docs/quickstart.md", "docs/your_task.md", "docs/data.md", "docs/rewards.md")


@pytest.mark.parametrize("page", PAGES)
def test_a_newcomer_follows_the_page(page, clone):
    blocks = newcomers_blocks(ROOT / page)
    task = newcomers_blocks(ROOT / "docs/your_task.md")
    given = [block for block in task if block.kind == "file"] + [Block("commands", "python make_data.py")]
    follow([*given * (page != "docs/your_task.md"), *blocks], clone, timeout_s=800)
