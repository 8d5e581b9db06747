"""`siirl migrate`: what becomes of the settings of siiRL and verl, and how many of their scripts run then."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from launch_settings import launches, write_files
from megatron_cases import MODELS
from migration_page import with_lists

from siirl.cli import main
from siirl.compiler.compile import compile_plan, load_dag
from siirl.config import Config, load_config, with_overrides
from siirl.config.checks import check_config
from siirl.config.foreign import FOREIGN, OTHER_DEFAULTS, foreign
from siirl.config.resolve import FOLLOWS, get
from siirl.config.root import all_keys
from siirl.config.tree import default_config, split_name
from siirl.errors import ConfigError, UserError
from siirl.migrate.defaults import OWN, names_vision_model
from siirl.migrate.foreign_files import page
from siirl.migrate.hydra_files import Composed, with_named_file
from siirl.migrate.translate import translate
from siirl.migrate.translation import Translation, scalar, typed

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "migration.md"
MODEL_PATH = "actor_rollout_ref.model.path"
OPTIONS = "actor_rollout_ref.actor.megatron.override_transformer_config"
COUNTS = re.compile(
    r"Of (\d+) launch scripts of (siiRL|verl)\b.*? (\d+) (?:are accepted )?unchanged, and (?:of )?(\d+) after"
)


def composed(words: list[str]) -> Config:
    """The configuration of settings, without hydra's half second."""
    updates = {}
    for word in words:
        name, _, value = word.lstrip("+").partition("=")
        key, path = split_name(name)
        updates[name] = scalar(value) if path else typed(all_keys()[key], value)
    return with_overrides(default_config(), updates)


def refusal(words: list[str]) -> str:
    """Why `siirl check --elsewhere` refuses settings, or an empty string."""
    try:
        cfg = composed(words)
        check_config(cfg)
        compile_plan(load_dag(cfg), cfg, cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node)
    except UserError as error:
        return str(error)
    return ""


def command(translation: Translation) -> list[str]:
    return [f"{item.name}={item.value}" for item in translation.written()]


def lost(translation: Translation) -> list[str]:
    return sorted(item.there.partition("=")[0].lstrip("+") for item in translation.of("impossible"))


SHOWN = 1
"""Keys of a script that cannot be had, in the table by script."""
REFUSED = {
    "dag.workflow_path": "cannot be read",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "there is no such file",
    "actor_rollout_ref.rollout.response_length": "differs from data.max_response_length",
    "algorithm.adv_estimator": "relative to the other samples of a prompt",
    "actor_rollout_ref.rollout.max_model_len": "is less than the longest row",
    "actor_rollout_ref.rollout.name": "an SGLang engine of several GPUs was not seen",
    "actor_rollout_ref.actor.router_replay.mode": "were not seen to say experts",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size": "94 layers do not divide into pp(8)",
    "actor_rollout_ref.rollout.val_kwargs.n": "greedy responses would be the same",
}
"""What the check still says of a few scripts: files that are not here, settings that make no sense."""


VISION = {
    **{"model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064},
    **{"max_position_embeddings": 128000, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "vision_config": {"depth": 32, "spatial_merge_size": 2, "hidden_size": 1280},
}
QWEN = {
    **{"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768},
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
}
SIZES = {
    **MODELS,
    **{"Qwen2-7B": QWEN, "Qwen2.5-7B": QWEN, "Qwen2.5-VL-7B": VISION},
    "Qwen2.5-32B": QWEN
    | {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "intermediate_size": 27648},
    "Qwen2.5-72B": QWEN
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "intermediate_size": 29568},
    "Qwen2.5-3B": QWEN
    | {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"num_key_value_heads": 2, "intermediate_size": 11008, "tie_word_embeddings": True},
}
"""What is in the config.json of models that scripts name, by the part of the name that says it."""


def with_models(words: list[str], folder: Path) -> list[str]:
    """Settings whose models are folders with their config.json, as far as SIZES has them."""
    found = []
    for word in words:
        name, _, value = word.partition("=")
        known = [part for part in SIZES if name.endswith("model.path") and part in value]
        if known:
            model = folder / Path(value).name
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text(json.dumps(SIZES[max(known, key=len)]))
            word = f"{name}={model}"
        found.append(word)
    return found


def in_brief(cannot: tuple[str, ...], why: str) -> str:
    """What a script asks for that siirl does not have; else what the check says of it."""
    shown = [f"`{name}`" for name in sorted(cannot)[:SHOWN]]
    shown += [f"{len(cannot) - SHOWN} more"] * (len(cannot) > SHOWN)
    if shown:
        return ", ".join(shown)
    return ", ".join(f"`{key}`: {text}" for key, text in REFUSED.items() if text in why)


@pytest.fixture(scope="module")
def translations(tmp_path_factory) -> dict[tuple[str, str], tuple[list[str], Translation]]:
    """Script -> its settings, with config.json of most models, and what becomes of them."""
    folder, root = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("repository")
    write_files(root)
    found = {}
    for (origin, name), launch in launches().items():
        words, composed = with_models(launch.words(), folder), Composed()
        whole: Sequence[str] = words
        if origin == "verl":
            whole, composed = with_named_file(words, root / f"{name}.sh")
        assert not composed.missing, name
        found[origin, name] = (words, translate(origin, whole))
    return found


@pytest.fixture(scope="module")
def outcomes(translations) -> dict[tuple[str, str], tuple[bool, bool, str]]:
    """Script -> (it runs unchanged, it runs by its migration, else why not).

    Asserts that each refusal is a known one.
    """
    found = {}
    for (origin, name), launch in launches().items():
        words, translation = translations[origin, name]
        assert lost(translation) == sorted(launch.cannot), name
        why = refusal(command(translation))
        assert not why or any(text in why for text in REFUSED.values()), (name, why)
        unchanged = not launch.cannot and not any(word.startswith("--") for word in words)
        unchanged = unchanged and not refusal(words)
        found[origin, name] = (unchanged, not launch.cannot and not why, in_brief(launch.cannot, why))
    return found


def test_the_document_counts_the_scripts_that_run(outcomes):
    said = {
        found[1].lower(): tuple(map(int, (found[0], *found[2:])))
        for found in COUNTS.findall(" ".join(DOCUMENT.read_text().split()))
    }
    for origin in ("siirl", "verl"):
        own = [outcome for (where, _), outcome in outcomes.items() if where == origin]
        assert said[origin] == (len(own), sum(one[0] for one in own), sum(one[1] for one in own))


def test_the_reference_lists_each_script_with_what_becomes_of_it(outcomes):
    rows = ["| script | unchanged | by `siirl migrate` | what it asks for |", "|---|---|---|---|"]
    for (origin, name), (unchanged, migrated, why) in outcomes.items():
        if origin != "bases":
            runs = " | ".join("yes" if one else "no" for one in (unchanged, migrated))
            rows.append(f"| {origin}: `{name}` | {runs} | {why} |")
            assert migrated == (not why), name
    assert "\n".join(rows) in (ROOT / "docs" / "migration_reference.md").read_text()


@pytest.mark.parametrize("folder", ["Qwen2.5-VL-7B-Instruct", "checkpoint"])
def test_scripts_of_vision_models_run_by_their_migration(tmp_path, folder):
    """Also where the model is there and is looked at, whatever it is called."""
    model = tmp_path / folder
    model.mkdir()
    (model / "config.json").write_text(json.dumps(VISION))
    found = {
        key: launch for key, launch in launches().items() if "VL" in str(launch.arguments.get(MODEL_PATH))
    }
    assert len(found) == 6
    for (origin, name), launch in found.items():
        words = [word for word in launch.words() if not word.startswith(MODEL_PATH)]
        translation = translate(origin, [*words, f"{MODEL_PATH}={model}"])
        written = {item.name: item.value for item in translation.written()}
        assert written["data.dataset_type"] == "vlm", name
        assert written["actor_rollout_ref.rollout.tensor_model_parallel_size"] == "1"
        assert written["actor_rollout_ref.rollout.name"] == "vllm" and not lost(translation)
        carried = command(translation)
        assert not refusal(carried), name
        for before in ("data.dataset_type=llm", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"):
            assert before.rpartition(".")[2] in refusal([*carried, before]), name


@pytest.mark.parametrize(
    ("path", "sees"),
    [
        *(("/m/Qwen3-VL-2B", True), ("Qwen/Qwen2.5-VL-72B-Instruct", True), ("/m/qwen2_5_vl", True)),
        *(("Qwen/Qwen3-8B", False), ("/m/Qwen2-VL-7B", False), ("", False)),
    ],
)
def test_a_vision_model_that_is_not_here_is_known_by_its_name(path, sees):
    assert names_vision_model(path) is sees


def test_the_lists_of_the_document_are_current():
    """`make docs` writes them."""
    reference = (ROOT / "docs" / "migration_reference.md").read_text()
    assert with_lists(reference) == reference


def test_what_only_a_file_of_verls_sets_is_in_the_command(translations):
    _, translation = translations["verl", "sglang_multiturn/run_qwen2_5_3b_gsm8k_multiturn_fsdp"]
    multi = "actor_rollout_ref.rollout.multi_turn"
    assert f"{multi}.max_assistant_turns=5" in command(translation)


def test_no_script_that_runs_unchanged_is_lost_by_its_migration(outcomes):
    assert [name for name, (now, then, _) in outcomes.items() if now and not then] == []


def test_no_setting_of_a_script_is_lost_in_silence(translations):
    """Each is in the command with its value, or named with a reason."""
    for (_, name), (words, translation) in translations.items():
        command_ = command(translation)
        for word in words:
            bare = word.lstrip("+")
            named = [item for item in translation.settings if bare in item.there.replace("+", "")]
            said = any(item.why or item.value == bare.partition("=")[2] for item in named)
            group = bare.startswith(("algorithm.rollout_correction.", "--config-"))
            assert bare in command_ or word in translation.options or said or group, (name, word)


def test_every_key_named_in_the_table_is_one_of_siirl():
    for name, entry in FOREIGN.items():
        if entry.here and "*" not in entry.here:
            split_name(entry.here)
        plain = name.replace(".*", ".x").replace("*.", "critic.").replace("*", "x")
        assert foreign(plain), name
        if "*" not in name and entry.here:
            with pytest.raises(ConfigError):
                load_config([f"{name}=1"])


def test_an_unknown_key_of_verl_names_the_right_one():
    for name, right in (
        ("algorithm.rollout_correction.rollout_is", "rollout_correction.weight=truncate"),
        ("reward_model.rollout.name", "reward_model.judge.name"),
        ("critic.fsdp.param_offload", "critic.fsdp_config.param_offload"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "reward_model.overlong_buffer.len"),
    ):
        with pytest.raises(ConfigError, match=re.escape(right)):
            load_config([f"{name}=1"])


def test_the_other_defaults_differ_from_ours():
    for name, other in OTHER_DEFAULTS.items():
        ours = get(default_config(), name)
        columns = {other.verl, other.siirl, other.preset} - {None}
        assert columns, name
        if name in FOLLOWS or name in OWN:
            continue  # ours is that of another key, or of the machine
        assert all(isinstance(there, str) or there != ours for there in columns), name


@pytest.mark.parametrize(
    ("origin", "words", "written", "impossible"),
    [
        ("verl", ["algorithm.adv_estimator=gae"], ["critic.optim.lr=1e-05"], []),
        ("verl", ["algorithm.adv_estimator=grpo"], [], ["critic.optim.lr"]),
        (
            "siirl",
            ["algorithm.adv_estimator=gae", "data.train_batch_size=64"],
            ["critic.ppo_mini_batch_size=64"],
            [],
        ),
        (
            "siirl",
            ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.ppo_mini_batch_size=128"],
            ["critic.ppo_mini_batch_size=256"],
            [],
        ),
        (
            "verl",
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=99",
            ],
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=99",
            ],
            [  # they follow here, too
                "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            ],
        ),
        (
            "verl",
            [
                "algorithm.rollout_correction.rollout_is=token",
                "algorithm.rollout_correction.rollout_is_threshold=3",
            ],
            [
                "actor_rollout_ref.actor.rollout_correction.weight=truncate",
                "actor_rollout_ref.actor.rollout_correction.level=token",
                "actor_rollout_ref.actor.rollout_correction.high=3",
            ],
            [],
        ),
        (
            "verl",
            [
                "algorithm.rollout_correction.rollout_rs=sequence",
                "algorithm.rollout_correction.rollout_rs_threshold=4",
            ],
            [
                "actor_rollout_ref.actor.rollout_correction.reject=sequence",
                "actor_rollout_ref.actor.rollout_correction.reject_low=0.25",
                "actor_rollout_ref.actor.rollout_correction.reject_high=4",
            ],
            [],
        ),
        (
            "verl",
            [
                "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv",
                "actor_rollout_ref.actor.clip_ratio_low=0.15",
            ],
            [
                "actor_rollout_ref.actor.policy_loss.clip_divergence_low=0.15",
                "actor_rollout_ref.actor.policy_loss.clip_divergence_high=0.2",
                "actor_rollout_ref.actor.policy_loss.ratio_cap=3.0",
            ],
            [],
        ),
        (
            "verl",
            ["actor_rollout_ref.actor.clip_ratio=0.4"],
            ["actor_rollout_ref.actor.clip_ratio_low=0.2"],
            [],
        ),
        ("siirl", ["trainer.resume_mode=off"], ["trainer.resume_mode=off"], []),
        ("siirl", ["trainer.device=npu"], [], ["trainer.device"]),
        ("siirl", ["trainer.device=cpu"], ["trainer.device=cpu"], []),
        ("verl", ["trainer.device=cuda"], ["trainer.device=cuda"], []),
        (
            "siirl",
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=16", "trainer.nnodes=2"],
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=8"],
            [],
        ),
        (
            "verl",
            ["critic.ppo_micro_batch_size=64", "trainer.n_gpus_per_node=4"],
            ["critic.ppo_micro_batch_size_per_gpu=16"],
            [],
        ),
        ("verl", ["model_engine=megatron"], ["actor_rollout_ref.actor.strategy=megatron"], []),
        (
            "verl",
            ["actor_rollout_ref.rollout.name=sglang"],
            ["actor_rollout_ref.rollout.name=sglang"],
            [],
        ),
        ("verl", ["trainer.nodes=2"], [], ["trainer.nodes"]),
        (
            "verl",
            [
                "actor_rollout_ref.actor.model_engine=megatron",
                "actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
            ],
            ["actor_rollout_ref.actor.strategy=megatron"],
            [],
        ),
        ("verl", ["critic.model_engine=veomni"], [], ["critic.model_engine"]),
        (
            "verl",  # experts over the ranks of one engine, and over more
            [
                "actor_rollout_ref.rollout.expert_parallel_size=4",
                "+actor_rollout_ref.rollout.moe_tensor_parallel_size=1",
            ],
            [],
            ["actor_rollout_ref.rollout.expert_parallel_size"],
        ),
        (
            "verl",
            [
                "actor_rollout_ref.rollout.expert_parallel_size=4",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            ],
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=4"],
            [],
        ),
        (
            "verl",  # data parallel ranks of a server: engines here
            [
                "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
                "actor_rollout_ref.rollout.data_parallel_size=4",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            ],
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            [],
        ),
        (
            "verl",  # of experts, which lie over all of them: one engine
            [
                "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
                "actor_rollout_ref.rollout.data_parallel_size=4",
                "actor_rollout_ref.rollout.expert_parallel_size=8",
                "trainer.n_gpus_per_node=8",
            ],
            ["actor_rollout_ref.rollout.tensor_model_parallel_size=8"],
            [],
        ),
        (
            "verl",  # and over more than a machine has
            [
                "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
                "actor_rollout_ref.rollout.data_parallel_size=8",
                "trainer.n_gpus_per_node=8",
            ],
            [],
            ["actor_rollout_ref.rollout.data_parallel_size"],
        ),
        ("verl", ['trainer.logger=["console","file"]'], ["trainer.logger=[console]"], []),
        (
            "verl",
            [
                "model_engine=megatron",
                *(f"+{OPTIONS}.{option}" for option in ("bias_dropout_fusion=True", "made_up=1")),
            ],
            ["actor_rollout_ref.actor.strategy=megatron"],
            [f"{OPTIONS}.made_up"],
        ),
        ("verl", ["actor_rollout_ref.actor.calculate_sum_pi_squared=True", "trainer.device=gpu"], [], []),
        ("verl", ["+ray_kwargs.ray_init.runtime_env.py_executable=x"], [], []),
        (
            "verl",
            ["critic.fsdp.dtype=bf16", "critic.fsdp.model_dtype=fp32", "critic.fsdp.strategy=fsdp2"],
            ["critic.fsdp_config.mixed_precision.param_dtype=bf16", "critic.fsdp_config.model_dtype=fp32"],
            [],
        ),
        ("verl", ["actor_rollout_ref.model.lora_alpha=0"], [], []),
        (
            "verl",
            ["actor_rollout_ref.model.lora_alpha=0", "actor_rollout_ref.model.lora_rank=8"],
            [],
            ["actor_rollout_ref.model.lora_alpha"],
        ),
        (
            "verl",
            ["actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora.rank=0"],
            ["actor_rollout_ref.model.lora_rank=32"],
            [],
        ),
        (
            "verl",
            [
                "algorithm.adv_estimator=gdpo",
                '+algorithm.gdpo_reward_keys=["a", "b"]',
                "+algorithm.gdpo_reward_weights=[1.0,0.5]",
                "reward.reward_manager.name=gdpo",
            ],
            ["algorithm.gdpo_rewards={a:1.0,b:0.5}", "reward_model.reward_manager=naive"],
            [],
        ),
        (
            "verl",
            ["+algorithm.gdpo_reward_keys=[a,b]", "+algorithm.gdpo_reward_weights=[1]"],
            [],
            ["algorithm.gdpo_reward_keys"],
        ),
        (
            "verl",
            ["algorithm.filter_groups.metric=seq_reward", "algorithm.filter_groups.enable=True"],
            ["algorithm.filter_groups.metric=score"],
            [],
        ),
        (
            "verl",
            [
                "algorithm.filter_groups.metric=seq_final_reward",
                "algorithm.filter_groups.enable=True",
                "algorithm.use_kl_in_reward=True",
            ],
            [],
            ["algorithm.filter_groups.metric"],
        ),
        (
            "verl",  # siirl's own group: what is beside its switch is not off
            [
                "reward_model.enable=False",
                "reward_model.sandbox_fusion_url=http://x",
                "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
                "reward_model.reward_loop_source=importlib",
            ],
            ["reward_model.sandbox_fusion.url=http://x", "reward_model.overlong_buffer.enable=True"],
            ["reward_model.reward_loop_source"],
        ),
        (
            "verl",  # its names between two of its releases, and files that its package alone has
            [
                "reward_model.enable=True",
                "reward_model.model_path=/m/scores",
                "reward_model.inference.name=vllm",
                "actor@actor_rollout_ref.actor=ds_actor",
                "actor_rollout_ref.actor.deepspeed.zero_stage=2",
            ],
            ["reward_model.model.path=/m/scores"],
            ["actor@actor_rollout_ref.actor", "actor_rollout_ref.actor.deepspeed.zero_stage"],
        ),
        (
            "verl",  # their groups: off, and on
            [
                "actor_rollout_ref.model.mtp.enable=False",
                "actor_rollout_ref.model.mtp.method=mtp",
                "distillation.enabled=True",
                "distillation.nnodes=1",
            ],
            [],
            ["distillation.enabled", "distillation.nnodes"],
        ),
    ],
)
def test_a_setting_becomes(origin, words, written, impossible):
    translation = translate(origin, words)
    result = command(translation)
    assert all(word in result for word in written), result
    for name in impossible:
        assert not any(word.startswith(f"{name}=") for word in result)
    assert lost(translation) == sorted(name for name in impossible if name in " ".join(words))
    assert len(result) == len(set(result))


SCRIPT = """
ALG=${ALG:-grpo}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$ALG \\
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
  trainer.experiment_name=run_$(date +%s) $@
"""


def test_the_page_of_a_script_says_what_was_done(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert main(["migrate", str(tmp_path / "run.sh"), "ALG=rloo", "trainer.total_epochs=3"]) == 0
    page = capsys.readouterr().out
    for text in (
        "`siirl check --elsewhere` accepts the command.",
        "algorithm.adv_estimator=rloo",
        "trainer.total_epochs=3",
        "trainer.experiment_name=run_FILL_IN",
        "#   $(date +%s) in trainer.experiment_name",
        "# verl's default; siirl's is 128: prompts of a step",
        "ppo_mini_batch_size=256  # verl's default; siirl's is 1024",
        'siirl run "${SETTINGS[@]}" "$@"',
    ):
        assert text in page
    (tmp_path / "run.sh").write_text(SCRIPT.replace("=vllm", "=trtllm"))
    assert main(["migrate", str(tmp_path / "run.sh")]) == 1
    assert "not supported" in capsys.readouterr().out


PRESET = """
defaults: [_self_]
hydra: {run: {dir: /tmp/x}}
data: {train_batch_size: 64, train_files: ~/a.parquet}
algorithm: {adv_estimator: gae, gae_lambda: 0.9}
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 32
    use_dynamic_bsz: false
    ppo_micro_batch_size: null
    ppo_micro_batch_size_per_gpu: null
    optim: {total_training_steps: -1, lr_decay_steps: null}
    fsdp_config: {wrap_policy: {min_num_params: 0}, offload_policy: false, reshard_after_forward: false}
  ref: {log_prob_use_dynamic_bsz: '${actor_rollout_ref.actor.use_dynamic_bsz}'}
  rollout:
    {name: vllm, mode: sync, engine_kwargs: {vllm: {swap_space: null}, sglang: {attention_backend: null}},
     agent: {custom_async_server: {path: null}}, response_length: '${oc.select:data.max_response_length,512}'}
critic:
  optim: {min_lr_ratio: null, total_training_steps: -1}
  model: {tokenizer_path: '${actor_rollout_ref.model.path}'}
reward_model: {sandbox_fusion: {url: null, max_concurrent: 64}}
trainer: {resume_mode: off, nnodes: 1, resume_from_path: null, max_actor_ckpt_to_keep: null, device: cuda}
dag: {workflow_path: null}
"""


def test_a_yaml_file_is_migrated_as_a_script_is(tmp_path, capsys):
    (tmp_path / "preset.yaml").write_text(PRESET)
    assert main(["migrate", str(tmp_path / "preset.yaml")]) == 0
    page = capsys.readouterr().out
    for text in (
        "algorithm.lam=0.9  ",
        "critic.ppo_mini_batch_size=64",
        "actor.fsdp_config.reshard_after_forward=false",
        "rollout.response_length=512",
        "resume_mode=off",
        "accepts the command",
    ):
        assert text in page, page


TREE = """
actor_rollout_ref:
  actor:
    optim: {_target_: x, optimizer: AdamW, lr: 2.0e-06, weight_decay: 0.01, betas: [0.9, 0.999]}
    checkpoint: {save_contents: [model], load_contents: '${.save_contents}', strict: true}
    fsdp_config: {strategy: fsdp, model_dtype: fp32, qat: {enable: false, mode: w4a16}, forward_only: false}
    calculate_sum_pi_squared: false
  rollout:
    name: vllm
    n: 4
    qat: '${oc.select:a.b,${oc.select:c.d,null}}'
    disaggregation: {enabled: false, port: 1}
  model:
    lora_rank: 16
    lora_alpha: 8
    hf_config_path: null
    lora: {rank: 0, alpha: 32, target_modules: [linear_qkv]}
data: {train_batch_size: 1024, shuffle: true, made_up: null}
algorithm: {adv_estimator: grpo, gamma: 1.0}
distillation: {enabled: false, distillation_loss: {topk: 32}}
reward:
  {reward_model: {enable: false, nnodes: 0, rollout: {name: '???'}}, custom_reward_function: {path: null}}
"""


def test_a_whole_tree_of_defaults_becomes_what_differs(tmp_path, capsys):
    (tmp_path / "whole.yaml").write_text(TREE)
    assert main(["migrate", str(tmp_path / "whole.yaml")]) == 0
    page = capsys.readouterr().out
    settings = page.partition("SETTINGS=(")[2]
    for text in (
        "optim.lr=2e-06",
        "lora_rank=16",
        "lora_alpha=8",
        "save_contents=[model]",
        "load_contents=[model]",
    ):
        assert text in settings, page
    for text in ("gamma", "weight_decay", "lora.", "alpha=32", "topk", "null"):
        assert text not in settings, page
    assert "algorithm.gamma=1.0" in page and "siirl's default, too" in page and "0 not supported" in page


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no.sh", None, "cannot be read"),
        ("a.sh", "echo", "no training command"),
        ("a.yaml", "a: [", "is not YAML"),
        ("b.yaml", "- 1", "no mapping of keys"),
    ],
)
def test_a_file_that_holds_no_settings_is_one_message(tmp_path, capsys, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "threshold", "reject", "bounds"),
    [
        ("seq_mean_k1", "0.997_1.003", "geometric", (1 / 1.003, 1 / 0.997)),
        ("seq_sum_k1", "0.9_5", "sequence", (1 / 5, 1 / 0.9)),
        ("seq_mean_k1", "2", "geometric", (0.5, 2)),
        ("geometric", "0.9_5", "geometric", (0.9, 5)),
    ],
)
def test_bounds_of_a_k1_rejection_are_turned_over(mode, threshold, reject, bounds):
    """A row is skipped here if verl leaves it out, which bounds the mean or sum of -log ratio of a row."""
    group = "algorithm.rollout_correction"
    found = translate("verl", [f"{group}.rollout_rs={mode}", f"{group}.rollout_rs_threshold={threshold}"])
    written = {item.name.rpartition(".")[2]: item.value for item in found.written()}
    low, high = float(written["reject_low"]), float(written["reject_high"])
    assert written["reject"] == reject and (low, high) == pytest.approx(bounds, rel=1e-5)


@pytest.mark.parametrize("mode", ["seq_max_k2", "seq_sum_k3", "seq_mean_k3"])
def test_a_rejection_by_divergence_keeps_its_threshold(mode):
    group = "algorithm.rollout_correction"
    found = translate("verl", [f"{group}.rollout_rs={mode}", f"{group}.rollout_rs_threshold=0.005"])
    written = {item.name.rpartition(".")[2]: item.value for item in found.written()}
    assert (written["reject"], written["reject_divergence"]) == (mode.removeprefix("seq_"), "0.005")
    assert "reject_low" not in written and "weight" not in written


@pytest.mark.parametrize(
    "mode", ["token_k1", "token_k3", "seq_mean_k3", "seq_max_k2", "seq_mean_k1,token_k1"]
)
def test_a_rejection_that_cannot_be_had_is_said(mode):
    found = translate("verl", [f"algorithm.rollout_correction.rollout_rs={mode}"])
    assert [item.there for item in found.of("impossible")] == [
        f"algorithm.rollout_correction.rollout_rs={mode}"
    ]
    assert not any("reject" in item.name for item in found.written())


WORKFLOW = """
dag_id: theirs
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: reward, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout]}
  - {node_id: even, node_type: COMPUTE, node_role: DATA_REBALANCE, dependencies: [reward]}
  - {node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [even]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantage]}
"""


def test_a_workflow_becomes_a_command_that_says_which_nodes_are_skipped(tmp_path, capsys):
    path = tmp_path / "workflow.yaml"
    path.write_text(WORKFLOW)
    keys = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    keys += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert main(["migrate", str(path), *keys]) == 0
    page = capsys.readouterr().out
    for text in (
        f"dag.workflow_path={path}",
        "rollout.n=4",
        "accepts the command",
        "skipped: even: rows are sharded evenly",
    ):
        assert text in page, page


def test_a_workflow_that_cannot_work_is_migrated_with_what_is_wrong(tmp_path, capsys):
    path = tmp_path / "workflow.yaml"
    path.write_text(WORKFLOW.replace("node_role: ADVANTAGE", "node_role: ADVANTEGE"))
    assert main(["migrate", str(path)]) == 1
    page = capsys.readouterr().out
    assert "refuses the command" in page and "ADVANTEGE" in page


def test_the_page_lists_what_cannot_be_had_and_a_preset_of_the_users_stays():
    found = translate("siirl", ["--config-path=/mine", "--config-name=preset", "no.such_key=1"])
    assert found.options == ["--config-path=/mine", "--config-name=preset"]
    text = page("a run", found, {}, [])
    assert (
        "# not supported (the command below runs without):\n#   no.such_key=1: there is no such key" in text
    )
    assert "siirl run --config-path=/mine --config-name=preset " in text
