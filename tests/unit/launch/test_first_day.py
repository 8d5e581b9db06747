"""What is said on the first day: of a logger that is not installed, a reward that raises, Ctrl-C."""

import importlib.util
import json
from importlib import metadata
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fixtures_tiny import make_tiny_model_dir, make_tiny_tokenizer

from siirl.cli import main
from siirl.config import load_config, to_dict
from siirl.errors import RewardError
from siirl.launch.failure import Death, describe_exception, report
from siirl.launch.outcome import Stop, conclude
from siirl.observe.loggers import LOGGERS, check_installed
from siirl.rewards.sample import describe, failed


@pytest.mark.parametrize("name", [name for name, logger in LOGGERS.items() if logger.package])
def test_a_destination_whose_package_is_not_installed_is_refused(name, monkeypatch):
    find, package = importlib.util.find_spec, LOGGERS[name].package.replace("-", "_")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == package else find(module)
    )
    with pytest.raises(
        Exception, match=rf"'{name}', and the package .*pip install {LOGGERS[name].package}\)"
    ):
        check_installed(["console", name])
    check_installed(["console", "tensorboard"])


def test_check_lists_it_beside_what_else_is_wrong(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more)
    )
    keys = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.logger=[console,wandb]"]
    assert main(["check", *keys, "data.train_files=/none.parquet"]) == 2
    told = capsys.readouterr().err
    assert "the package wandb is not installed" in told and "/none.parquet" in told


def test_the_line_of_a_reward_that_raises_is_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json\n\n\ndef score(text):\n    return json.loads(text)['score']\n"
    )
    spec = importlib.util.spec_from_file_location("mine_of_first_day", tmp_path / "mine.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError) as raised:
        module.score("no json")
    assert describe(raised.value).endswith(f"(at {tmp_path}/mine.py:5)"), "not the line of the json package"
    error = RewardError("score failed")
    error.frames = failed(raised.value).frames
    told = describe_exception(error, 0, None).traceback
    assert f'{tmp_path}/mine.py", line 5, in score' in told, "the user's own lines"
    assert "json/decoder.py" not in told and "score failed" not in told, "nobody else's; the message once"
    log = tmp_path / "rank_1.log"
    log.write_text(told)
    deaths = [Death(rank, 1, rank, describe_exception(error, rank, None), None) for rank in (1, 0)]
    assert told.splitlines()[-1] not in report(deaths[0], deaths, log, 0), (
        "rank 0 has told them on the console"
    )
    assert told.splitlines()[-1] in report(deaths[0], deaths[:1], log, 0), "no other rank has"


@pytest.mark.parametrize(
    "keys, told",
    [
        ([], []),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"], ["actor.ppo_max_token_len_per_gpu"]),
        (["critic.ppo_micro_batch_size_per_gpu=1"], ["critic.ppo_max_token_len_per_gpu"]),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"], []),
        (["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "data.max_response_length=8000"], []),
        (
            [
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
            ],
            [],
        ),
    ],
)
def test_micro_batches_of_one_short_sequence_are_said_to_be_slow(keys, told, capsys):
    run = ["algorithm.adv_estimator=gae", "data.train_batch_size=8", "trainer.n_gpus_per_node=1"]
    assert main(["check", "--elsewhere", *run, *keys]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "computed by itself" in line]
    assert len(lines) == len(told) and all(map(str.__contains__, lines, told)), lines


@pytest.mark.parametrize(
    "step, said", [(None, "There is no checkpoint in"), (7, "To go on after step 7: siirl resume")]
)
def test_a_run_that_is_stopped_says_how_it_goes_on(tmp_path, capsys, step, said):
    config = to_dict(load_config([f"trainer.default_local_dir={tmp_path / 'checkpoints'}"]))
    if step is not None:
        (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"global_step_{step}" / "manifest.json").write_text("{}")
    job = SimpleNamespace(config=config, output_path=tmp_path, run_id="x")
    assert conclude(job, [], Stop([2]), {}) == 130
    told = capsys.readouterr().err
    assert "stopped by SIGINT" in told and said in told, told


@pytest.fixture
def inputs(tmp_path):
    """Keys of a run on chats, whose tokenizer has a chat template."""
    make_tiny_model_dir(tmp_path / "model", vocab=110)
    make_tiny_tokenizer(tmp_path / "model", vocab=110)
    prompt = [{"role": "user", "content": "1 + 1 = ?"}]
    rows = [{"data_source": "arithmetic", "prompt": prompt, "reward_model": {"ground_truth": "2"}}] * 8
    longer = {**rows[0], "prompt": [{"role": "user", "content": "1 + 1 = ? " * 20}]}
    pq.write_table(pa.Table.from_pylist([*rows, longer]), tmp_path / "rows.parquet")
    keys = [f"data.{split}_files={tmp_path / 'rows.parquet'}" for split in ("train", "val")]
    keys += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.device=cpu"]
    keys += ["actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.model.path={tmp_path / 'model'}"]
    keys += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.n_gpus_per_node=1"]
    return [*keys, f"trainer.output_dir={tmp_path / 'out'}", "data.max_response_length=8"]


def test_a_tokenizer_without_a_chat_template_is_found_by_check(inputs, tmp_path, capsys):
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["check", *inputs, "data.max_prompt_length=240"]) == 2
    assert "has no chat template. Use a chat model's tokenizer" in capsys.readouterr().err


def named(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "rag", "template": "{{ messages[0].content }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def another_form(name):
    def leave(folder):
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / file).unlink(missing_ok=True)
        (folder / name).write_bytes(b"\n\x0e\n\x05<unk>")

    return leave


TOKENIZERS = {
    "as tekken.json alone": another_form("tekken.json"),
    "reads with protobuf, not installed here. Install it": another_form("tokenizer.model"),
    "called rag, and none called default. Set data.chat_template to one": named,
}


@pytest.mark.parametrize("why", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_read_is_named_by_check(inputs, tmp_path, capsys, monkeypatch, why):
    find = metadata.distribution

    def without_protobuf(name):
        if name == "protobuf":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.setattr(metadata, "distribution", without_protobuf)
    TOKENIZERS[why](tmp_path / "model")
    assert main(["check", *inputs, "data.max_prompt_length=240"]) == 2
    told = capsys.readouterr().err
    assert why in told and "Traceback" not in told, told


def test_check_tells_of_stops_in_the_files_of_a_model_and_of_tools_that_no_template_shows(
    inputs, tmp_path, capsys
):
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    tools = "tools:\n  - builtin: calculator\n"
    (tmp_path / "tools.yaml").write_text(tools)
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    keys = [f"{multi_turn}.enable=true", f"{multi_turn}.tool_config_path={tmp_path / 'tools.yaml'}"]
    assert main(["check", *inputs, *keys, "data.max_prompt_length=240"]) == 0
    told = "".join(capsys.readouterr())
    assert "shows no tools" in told and "Set rollout.multi_turn.show_tools=system" in told, told
    assert "generation_config" in told, told


@pytest.mark.parametrize(
    "key, told",
    [
        ("custom_reward_function.weights=[1,0.5]", "custom_reward_function.weights="),
        ("data.template_date=yesterday", "data.template_date=yesterday: chat templates write a day"),
        ("data.template_date=2025-02-30", "data.template_date=2025-02-30"),
    ],
)
def test_a_refused_value_that_rows_are_judged_with_is_a_finding_and_no_traceback(
    tmp_path, monkeypatch, capsys, key, told
):
    monkeypatch.chdir(tmp_path)
    make_tiny_model_dir(tmp_path / "model", vocab=16, max_positions=1100)
    (tmp_path / "train.jsonl").write_text(
        "\n".join(
            json.dumps({"prompt": "1", "data_source": "x", "reward_model": {"ground_truth": "1"}})
            for _ in range(4)
        )
    )
    (tmp_path / "mine.py").write_text("def compute_score(solution_str):\n    return 1.0\n")
    keys = ["algorithm.adv_estimator=grpo", "data.train_files=train.jsonl", "data.train_batch_size=4"]
    keys += ["actor_rollout_ref.model.path=model", "actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"]
    assert main(["check", *keys, "custom_reward_function.path=mine.py", key]) == 2
    assert told in capsys.readouterr().err
