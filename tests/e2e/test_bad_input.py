"""What a user gets wrong is found before any worker starts: exit code 2, and a message with value and fix."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from fixtures_tiny import arithmetic_rows, write_parquet
from job_harness import Inputs, overrides

from siirl import main_dag
from siirl.errors import DataError


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs.make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def launch(inputs, tmp_path, monkeypatch, capsys):
    """(exit code, stderr) of the main job; no worker may start."""

    def start(job):
        raise AssertionError("the run was started")

    monkeypatch.setattr(main_dag, "run_local", start)
    monkeypatch.setattr(main_dag, "setup_logging", lambda rank, folder: None)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(*more):
        code = main_dag.main(overrides(inputs, tmp_path / "out", *more))
        return code, capsys.readouterr().err

    return call


@dataclass
class Folder:
    """Where a case writes its broken input, and the good inputs of the module."""

    path: Path
    inputs: Inputs

    def write(self, name: str, text: str) -> Path:
        file = self.path / name
        file.write_text(text)
        return file

    def rows(self, rows) -> str:
        return f"data.train_files={write_parquet(self.path / 'bad.parquet', rows)}"

    def model(self, *removed: str) -> Path:
        """A copy of the model directory without the files of these names or patterns."""
        copy = Path(shutil.copytree(self.inputs.model, self.path / "model"))
        for pattern in removed:
            for file in copy.glob(pattern):
                file.unlink()
        return copy

    def model_override(self, *removed: str) -> str:
        return f"actor_rollout_ref.model.path={self.model(*removed)}"

    def reward(self, code: str) -> str:
        return f"custom_reward_function.path={self.write('my_reward.py', code)}"

    def dag(self, change) -> str:
        """dag.workflow_path of the GRPO template, after change(nodes by id, list of nodes)."""
        spec = yaml.safe_load((Path(main_dag.__file__).parents[1] / "dag_templates/grpo.yaml").read_text())
        change({node["node_id"]: node for node in spec["nodes"]}, spec["nodes"])
        return f"dag.workflow_path={self.write('bad.yaml', yaml.safe_dump(spec))}"

    def custom_node(self, reference: str = "", **fields) -> str:
        """The template with a custom node below the reward node."""
        entry = {"node_id": "mine", "node_type": "COMPUTE", "dependencies": ["function_reward"]}
        entry |= {
            "executable_ref": reference or "json:loads",
            "reads": ["score"],
            "writes": [],
            **fields,
        }
        return self.dag(lambda by_id, nodes: nodes.append(entry))

    def damaged_checkpoints(self, *steps: int) -> list[str]:
        """A folder of checkpoints, all of which lack their manifest."""
        for step in steps:
            (self.path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
        return [f"trainer.default_local_dir={self.path / 'checkpoints'}"]

    def second_agent(self) -> str:
        """A second agent whose reward node writes a field of the first."""

        def change(by_id, nodes):
            for node in list(nodes):
                names = [f"{name}_2" for name in node["dependencies"]]
                again = {"node_id": f"{node['node_id']}_2", "dependencies": names, "agent_group": 1}
                nodes.append(node | again)
            nodes.append(
                {
                    "node_id": "thief",
                    "node_type": "COMPUTE",
                    "agent_group": 1,
                    "dependencies": ["function_reward_2"],
                    "executable_ref": "json:loads",
                    "reads": ["score"],
                    "writes": ["agent_0.score"],
                }
            )

        return self.dag(change)

    def file_instead_of(self, key: str) -> list[str]:
        return [f"{key}={self.write('taken', '')}", "trainer.save_freq=1"]


def without(column):
    return [{k: v for k, v in row.items() if k != column} for row in arithmetic_rows(16)]


def role(name, value):
    def change(by_id, nodes):
        by_id[name]["node_role"] = value

    return change


def cycle(by_id, nodes):
    by_id["rollout_actor"]["dependencies"] = ["actor_train"]


def no_reward(by_id, nodes):
    nodes.remove(by_id["function_reward"])
    by_id["calculate_advantages"]["dependencies"].remove("function_reward")


def outside(by_id, nodes):
    by_id["rollout_actor"]["placement"] = "0-4"


STRATEGY = "actor_rollout_ref.actor.strategy"
SCORE = "def compute_score({}):\n    return 0.0\n"

CASES = {
    "missing data file": (
        lambda f: ["data.train_files=/no/such/train.parquet"],
        ["/no/such/train.parquet does not exist", "check the path"],
    ),
    "missing prompt column": (
        lambda f: ["data.prompt_key=promt"],
        ["no column 'promt'", "Did you mean 'prompt'?"],
    ),
    "missing ground truth": (
        lambda f: [f.rows(without("reward_model")), "custom_reward_function.path=null"],
        ["bad.parquet has no column 'reward_model'"],
    ),
    "data source without a reward function": (
        lambda f: [f.rows(arithmetic_rows(16, data_source="mine")), "custom_reward_function.path=null"],
        ["data_source 'mine' has no reward function", "custom_reward_function.path"],
    ),
    "fewer prompts than a batch": (
        lambda f: [f.rows(arithmetic_rows(2)), "data.train_batch_size=8"],
        ["hold 2 prompts, data.train_batch_size is 8", "Lower the batch size or add data"],
    ),
    "batch smaller than the data-parallel size": (
        lambda f: ["trainer.n_gpus_per_node=16"],
        ["8 prompts of a batch for 16 data-parallel shards", "data.train_batch_size"],
    ),
    "unknown key": (
        lambda f: ["data.train_batch_sise=8"],
        ["data.train_batch_sise", "data.train_batch_size"],
    ),
    "wrong type": (lambda f: ["data.train_batch_size=many"], ["train_batch_size=many: expected an integer"]),
    "unknown strategy": (lambda f: [f"{STRATEGY}=fdsp"], [f"{STRATEGY}=fdsp", "fsdp"]),
    "unknown rollout": (
        lambda f: ["actor_rollout_ref.rollout.name=vlm"],
        ["actor_rollout_ref.rollout.name=vlm", "vllm"],
    ),
    "unknown node role": (
        lambda f: [f.dag(role("function_reward", "REWRAD"))],
        ["'function_reward'", "'REWRAD'", "Did you mean 'REWARD'?"],
    ),
    "cycle": (lambda f: [f.dag(cycle)], ["cycle", "rollout_actor", "actor_train"]),
    "missing field": (
        lambda f: [f.dag(no_reward)],
        ["'calculate_advantages' reads agent_0.score, which no node writes", "node_role REWARD"],
    ),
    "doubly written field": (
        lambda f: [f.custom_node(writes=["score"])],
        ["'function_reward' and node 'mine' both write agent_0.score", "Remove one"],
    ),
    "placement outside the cluster": (
        lambda f: [f.dag(outside)],
        ["'rollout_actor'", "names rank 4", "raise trainer.nnodes or trainer.n_gpus_per_node"],
    ),
    "two agents sharing a field": (
        lambda f: [f.second_agent()],
        ["'thief' of agent 1 writes agent_0.score", "two agents would share a field"],
    ),
    "model directory missing": (
        lambda f: ["actor_rollout_ref.model.path=/no/such/model"],
        ["/no/such/model does not exist", "actor_rollout_ref.model.path"],
    ),
    "model without config": (
        lambda f: [f.model_override("config.json")],
        ["has no config.json", "actor_rollout_ref.model.path"],
    ),
    "model without weights": (
        lambda f: [f.model_override("*.safetensors")],
        ["/model has no *.safetensors file", "save_pretrained()"],
    ),
    "model without tokenizer": (
        lambda f: [f.model_override("tokenizer*")],
        ["/model has no tokenizer", "data.tokenizer"],
    ),
    "rows longer than the model's positions": (
        lambda f: ["data.max_response_length=500"],
        ["data.max_prompt_length + data.max_response_length = 532", "512 positions", "max_prompt_length=256"],
    ),
    "Liger kernels that are not installed": (
        lambda f: ["actor_rollout_ref.model.use_liger=true"],
        ["use_liger=True", "liger-kernel is not installed", "use_liger=False"],
    ),
    "attention kernels of GPUs on a CPU": (
        lambda f: ["actor_rollout_ref.model.attention_kernels=flash_attn_4", "trainer.device=cpu"],
        ["attention_kernels=flash_attn_4", "trainer.device=cpu", "Set it to torch"],
    ),
    "attention kernels that compute in bfloat16": (
        lambda f: [
            "actor_rollout_ref.model.attention_kernels=flash_attn_4",
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float32",
            "trainer.device=cuda",
        ],
        ["attention_kernels=flash_attn_4", "mixed_precision.param_dtype=float32", "Set it to torch"],
    ),
    "kernels of states for a model without any, on a CPU": (
        lambda f: ["actor_rollout_ref.model.attention_kernels=fla", "trainer.device=cpu"],
        ["fla in a qwen3: it has no gated delta nets", "trainer.device=cpu: it is for GPUs", "to torch"],
    ),
    "attention kernels that are not installed": (
        lambda f: [
            "actor_rollout_ref.model.attention_kernels=flash_attn_4",
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bfloat16",
            "trainer.device=cuda",
        ],
        ["the package flash-attn-4 is not installed", "siirl[flash-attn-4]", "attention_kernels=torch"],
    ),
    "unwritable checkpoint directory": (
        lambda f: f.file_instead_of("trainer.default_local_dir"),
        ["trainer.default_local_dir=", "/taken' cannot be written", "Choose another folder"],
    ),
    "unwritable output directory": (
        lambda f: f.file_instead_of("trainer.output_dir"),
        ["trainer.output_dir=", "/taken' cannot be written", "Choose another folder"],
    ),
    "no such checkpoint": (
        lambda f: ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/global_step_3"],
        ["'/no/global_step_3' is no checkpoint", "Give a global_step_N folder"],
    ),
    "only damaged checkpoints": (
        lambda f: f.damaged_checkpoints(2, 4),
        ["global_step_4: ", "global_step_2: ", "has no manifest.json", "trainer.resume_mode=disable"],
    ),
    "reward file missing": (
        lambda f: ["custom_reward_function.path=/no/such/reward.py"],
        ["custom_reward_function.path=/no/such/reward.py", "there is no such file"],
    ),
    "reward function missing": (
        lambda f: ["custom_reward_function.name=compute_scores"],
        ["compute_scores", "Did you mean 'compute_score'?"],
    ),
    "reward function of another signature": (
        lambda f: [f.reward(SCORE.format("prompt, response"))],
        ["compute_score of ", "cannot be called as", "it needs prompt, which is not given"],
    ),
    "reward that is no Python": (lambda f: [f.reward("def (")], ["my_reward.py, line 1 is no Python"]),
    "custom node of a missing module": (
        lambda f: [f.custom_node("no_such.module:fn")],
        ["'mine'", "'no_such.module' cannot be imported: there is no such module", "PYTHONPATH"],
    ),
    "custom node of a missing file": (
        lambda f: [f.custom_node("/no/such/file.py:fn")],
        ["'mine'", "there is no file '/no/such/file.py'", "Correct the path"],
    ),
    "custom node of a missing function": (
        lambda f: [f.custom_node(f"{f.write('ops.py', 'def other(): pass')}:fn")],
        ["'mine'", "has no 'fn', it defines other"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_work_is_refused_before_anything_starts(name, inputs, tmp_path, launch):
    make, fragments = CASES[name]
    code, err = launch(*make(Folder(tmp_path, inputs)))
    assert code == 2
    for fragment in fragments:
        assert fragment in err
    assert "Traceback" not in err


def test_files_without_rows_are_an_empty_dataset(inputs, tmp_path, launch):
    import pyarrow.parquet as pq

    empty = tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(inputs.train).slice(0, 0), empty)
    code, err = launch(f"data.train_files={empty}")
    assert code == 2 and f"no rows in {empty}" in err and "the dataset is empty" in err


def test_the_same_command_line_without_the_mistake_starts(launch):
    with pytest.raises(AssertionError, match="the run was started"):
        launch("trainer.save_freq=1")


def test_a_custom_node_that_exists_starts(inputs, tmp_path, launch):
    folder = Folder(tmp_path, inputs)
    folder.write("ops.py", "def fn(context, rows):\n    return rows\n")
    with pytest.raises(AssertionError, match="the run was started"):
        launch(folder.custom_node(f"{tmp_path / 'ops.py'}:fn"))


def shards(model: Path, *names: str) -> None:
    """An index that names these files, the first of which holds everything."""
    (model / "model.safetensors").rename(model / names[0])
    index = {"weight_map": {f"tensor_{position}": name for position, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "missing shard": (
        lambda model: shards(model, "model-1.safetensors", "model-2.safetensors"),
        "lacks 1 of the 2 weight files .*: model-2.safetensors",
    ),
    "no index": (
        lambda model: (model / "model.safetensors").rename(model / "model-1.safetensors"),
        "model-1.safetensors, but neither model.safetensors nor model.safetensors.index.json",
    ),
    "cut short": (cut, "instead of .*: it is damaged"),
    "Git LFS pointer": (
        lambda model: (model / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\n"
        ),
        "is no safetensors file, .*Git LFS",
    ),
    "no header": (
        lambda model: (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{["),
        "in its header",
    ),
    "config that is no JSON": (
        lambda model: (model / "config.json").write_text("{"),
        "config.json cannot be read",
    ),
    "config of no model": (
        lambda model: (model / "config.json").write_text("{}"),
        "has no model_type that is a name",
    ),
    "a type that is a list": (
        lambda model: (model / "config.json").write_text('{"model_type": [null]}'),
        "has no model_type that is a name",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_model_directories_are_refused(name, inputs, tmp_path):
    from siirl.model_files.directory import check_config_file, check_weight_files

    damage, message = DAMAGES[name]
    model = Folder(tmp_path, inputs).model()
    check_config_file(model)
    check_weight_files(model)
    damage(model)
    with pytest.raises(DataError, match=message):
        check_config_file(model)
        check_weight_files(model)


def test_whole_shards_are_accepted(inputs, tmp_path):
    from siirl.model_files.directory import check_weight_files

    model = Folder(tmp_path, inputs).model()
    shards(model, "model-1.safetensors")
    check_weight_files(model)
