"""What `siirl check` says of images in prompts: accepted is what runs, all else is refused with the fix."""

import json
from pathlib import Path

import pytest
from plan_cases import config

from siirl.compiler.compile import compile_plan, load_dag
from siirl.compiler.plan_instructions import Load, Run
from siirl.errors import UserError
from siirl.models.families import types_with
from siirl.models.trained import why_not
from siirl.types import IMAGE_FIELDS, FieldKey

VISION_MODELS = types_with(lambda row: row.sees_images)

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))
VLM = "data.dataset_type=vlm"
TOWER = {"depth": 2, "spatial_merge_size": 2, "num_heads": 4, "intermediate_size": 128}
VISION = {"vision_config": TOWER, "text_config": {"hidden_size": 64}}


def model(folder: Path, kind: str) -> str:
    folder.mkdir(exist_ok=True)
    parts = VISION if kind in VISION_MODELS else {}
    if kind == "qwen2_5_vl":
        parts = VISION | {"vision_config": TOWER | {"intermediate_size": 171}}
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | parts))
    return str(folder)


def compiled(tmp_path: Path, kind: str, *keys: str):
    cfg = config(f"{MODEL}.path={model(tmp_path / kind, kind)}", f"{ROLLOUT}.name=hf", *keys)
    return compile_plan(load_dag(cfg), cfg, 2)[0]


@pytest.mark.parametrize("sampler", ["hf", "vllm"])
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
@pytest.mark.parametrize("kind", VISION_MODELS)
def test_images_reach_every_node_that_runs_a_model(tmp_path, kind, strategy, sampler):
    keys = (VLM, f"{ROLLOUT}.name={sampler}", f"{ACTOR}.strategy={strategy}")
    plan = compiled(tmp_path, kind, *keys, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.ppo_mini_batch_size=4")
    reads = {ins.node: ins.reads for ins in plan.instructions if isinstance(ins, Run)}
    images = FieldKey(0, "images")
    on_model = {name for name, node in plan.nodes.items() if node.model is not None}
    assert len(on_model) == 4 and on_model == {name for name, keys in reads.items() if images in keys}
    plan = compiled(tmp_path, kind, *keys, "algorithm.adv_estimator=gae")
    reads = {ins.node: ins.reads for ins in plan.instructions if isinstance(ins, Run)}
    critics = {name for name, node in plan.nodes.items() if "critic" in (node.model or "")}
    assert len(critics) == 2 and all(images in reads[name] for name in critics)
    texts = compiled(tmp_path, "qwen3").instructions
    assert not any(images in ins.keys for ins in texts if isinstance(ins, Load))


TWO_RANKS = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    *("trainer.n_gpus_per_node=2", "trainer.device=cpu"),
)
IN_TWO = (VLM, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.pipeline_model_parallel_size=2")
REFUSED = {
    "ranks of GPUs": ("qwen3_vl", (VLM, *TWO_RANKS, "trainer.device=cuda"), "on CPUs alone. Set .*size=1"),
    "a model of texts": ("qwen3", (VLM,), "which sees no images. Use a model of qwen2_5_vl, qwen3_vl"),
    "data of texts": ("qwen3_vl", (), "qwen3_vl with data.dataset_type=llm.*Set data.dataset_type=vlm"),
    "replay": (
        "qwen3_vl",
        (VLM, f"{ROLLOUT}.name=replay"),
        "rollout.name=replay.* Set rollout.name to hf or vllm",
    ),
    "ranks that do not divide the tower": (
        "qwen2_5_vl",
        (VLM, *TWO_RANKS),
        r"size=2 does not divide the model's 171 intermediate_size of its vision tower: .*Set it to 1\.",
    ),
    "an argument by which siirl tells the ranks of images": (
        "qwen3_vl",
        (VLM, *TWO_RANKS, f"{ROLLOUT}.engine_kwargs.vllm.additional_config={{a:1}}"),
        r"additional_config with .*size=2 and images.*Remove it",
    ),
    "adapters alone": (
        "qwen3_vl",
        (VLM, f"{MODEL}.lora_rank=4", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.merge_lora=false"),
        "rollout.merge_lora=false with a qwen3_vl: .*Set .*merge_lora=true",
    ),
    "liger": ("qwen2_5_vl", (VLM, f"{MODEL}.use_liger=true"), "Liger kernels.*use_liger=false"),
    "layers that are not beside the tower": (
        "qwen3_vl",
        (*IN_TWO, f"{MODEL}.override_config.num_hidden_layers=4"),
        r"the first stage of pp\(2\) holds 2 of the 4 layers.*the first 3 \(deepstack\). "
        rf"Set {ACTOR}.megatron.pipeline_model_parallel_size=1",
    ),
    "fewer layers beside the tower": (
        "qwen3_vl",
        (*IN_TWO, f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=2"),
        r"holds 2 of the 32 layers.*Set .*pipeline_model_parallel_size=2\|1, without num_layers_in_first",
    ),
    "layers of the second chunk": (
        "qwen3_vl",
        (
            *(*IN_TWO, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"),
            f"{MODEL}.override_config.num_hidden_layers=8",
        ),
        "has 2 chunks, whose first one holds 2 of the 8 layers.*pipeline_model_parallel_size=2.1 and "
        ".*virtual_pipeline_model_parallel_size=null",
    ),
    "heads": (
        "qwen3_vl",
        (
            *(VLM, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"),
            f"{MODEL}.override_config.num_attention_heads=7",
        ),
        "attention heads do not divide over tp",
    ),
    "mbridge": (
        "qwen3_vl",
        (VLM, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.use_mbridge=true"),
        "use_mbridge=true for a qwen3_vl: .* has not been seen",
    ),
    "a critic under megatron": (
        "qwen3_vl",
        (VLM, "algorithm.adv_estimator=gae", "critic.strategy=megatron"),
        "a value head, which under megatron was not seen. Set strategy=fsdp",
    ),
}
FIXED = {
    "stages with enough layers": (
        *IN_TWO,
        f"{MODEL}.override_config.num_hidden_layers=6",
    ),
    "a longer first stage": (
        *(*IN_TWO, f"{MODEL}.override_config.num_hidden_layers=4"),
        f"{ACTOR}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3",
    ),
    "chunks with enough layers": (
        *(*IN_TWO, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"),
        f"{MODEL}.override_config.num_hidden_layers=12",
    ),
    "context in two": (VLM, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.context_parallel_size=2"),
}
TOOLS = "tools:\n  - function: math:sqrt\n    name: root\n    description: root\n"


def test_images_reach_what_an_interaction_reads_and_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tools.yaml").write_text(TOOLS)
    tools = f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"
    plan = compiled(tmp_path, "qwen3_vl", VLM, *tools)
    runs = {plan.nodes[ins.node].op: ins for ins in plan.instructions if isinstance(ins, Run)}
    for name in IMAGE_FIELDS:
        assert (
            FieldKey(0, name) in runs["interaction"].reads and FieldKey(0, name) in runs["interaction"].writes
        )
        assert FieldKey(0, name) in runs["actor_train"].reads


@pytest.mark.parametrize(("kind", "keys", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_take_images_is_refused_with_the_fix(tmp_path, monkeypatch, kind, keys, words):
    monkeypatch.chdir(tmp_path)
    Path("tools.yaml").write_text(TOOLS)
    with pytest.raises(UserError, match=words):
        compiled(tmp_path, kind, *keys)


def test_programs_that_play_episodes_may_send_images(tmp_path):
    plan = compiled(tmp_path, "qwen3_vl", VLM, "actor_rollout_ref.serve.command=python agent.py")
    (talk,) = plan.interactions.values()
    assert talk.program


def test_an_engine_of_several_ranks_takes_images(tmp_path):
    rollout = compiled(tmp_path, "qwen3_vl", VLM, *TWO_RANKS).models["agent_0.rollout"]
    assert rollout.dims.tp == 2


@pytest.mark.parametrize("keys", FIXED.values(), ids=FIXED)
def test_layers_beside_the_tower_are_accepted(tmp_path, keys):
    compiled(tmp_path, "qwen3_vl", *keys)


def test_a_reference_and_a_reward_model_are_held_to_the_same(tmp_path):
    score = model(tmp_path / "score", "qwen3")
    keys = (VLM, "reward_model.enable=true", f"reward_model.model.path={score}")
    with pytest.raises(UserError, match=r"reward_model\.strategy=fsdp: .*a qwen3, which sees no images"):
        compiled(tmp_path, "qwen3_vl", *keys)
    score = model(tmp_path / "score", "qwen2_5_vl")
    plan = compiled(tmp_path, "qwen3_vl", VLM, "reward_model.enable=true", f"reward_model.model.path={score}")
    (run,) = [ins for ins in plan.instructions if isinstance(ins, Run) and "reward" in ins.node]
    assert {FieldKey(0, name) for name in IMAGE_FIELDS} <= set(run.reads)


SEEN_BY_A_TEACHER = {
    "": "",
    "teacher.strategy: vllm": "in a rollout engine, .*Set teacher.strategy=fsdp",
    "teacher.tokenizer: own": "of its own reads texts alone.*Leave out teacher.tokenizer",
}


@pytest.mark.parametrize(("key", "words"), SEEN_BY_A_TEACHER.items())
def test_a_teacher_that_computes_on_the_policy_s_tokens_sees_images(tmp_path, key, words):
    teacher = {"teacher.model.path": model(tmp_path / "qwen3_vl", "qwen3_vl")}
    teacher |= dict([key.split(": ")]) if key else {}
    keys = (
        VLM,
        f"{ACTOR}.policy_loss.loss_mode=distill",
        f"dag.node_config={json.dumps({'teacher': teacher})}",
    )
    if words:
        with pytest.raises(UserError, match=f"'teacher'.*prompts with images.*{words}"):
            compiled(tmp_path, "qwen3_vl", *keys)
        return
    plan = compiled(tmp_path, "qwen3_vl", *keys)
    assert {FieldKey(0, name) for name in IMAGE_FIELDS} <= set(plan.run_of("teacher").reads)


def test_a_user_s_op_gives_its_model_the_images_of_the_tokens(tmp_path):
    dag, reads = tmp_path / "dag.yaml", ["prompt_ids", "prompt_length", "response_ids", "response_length"]
    for extra in ([], ["images"], ["images", "image_starts"]):
        fields = tuple([*reads, "response_mask", *extra])
        (tmp_path / "mine.py").write_text(
            f'@declare_op(reads={fields}, writes=("score",), model="ref", needs=("engine",))\n'
            "def mine(ctx, rows, engine): ...\n"
        )
        dag.write_text(OWN_OP.replace("FOLDER", str(tmp_path)))
        keys = (VLM, f"dag.workflow_path={dag}")
        if len(extra) == 2:
            assert compiled(tmp_path, "qwen3_vl", *keys).nodes["mine"].model == "agent_0.ref"
        else:
            with pytest.raises(UserError, match=r"'mine'.*without .*image_starts. Add them to its reads"):
                compiled(tmp_path, "qwen3_vl", *keys)


OWN_OP = """
dag_id: own
nodes:
  - {node_id: rollout, node_type: MODEL_INFERENCE, node_role: ROLLOUT}
  - {node_id: mine, node_type: COMPUTE, node_role: REWARD, dependencies: [rollout],
     executable_ref: "FOLDER/mine.py:mine"}
  - {node_id: advantages, node_type: COMPUTE, node_role: ADVANTAGE, dependencies: [mine]}
  - {node_id: train, node_type: MODEL_TRAIN, node_role: ACTOR, dependencies: [advantages]}
"""


def test_one_node_has_no_other_kind_of_dataset(tmp_path):
    keys = ('dag.node_config={actor_train: {"data.dataset_type": vlm}}',)
    with pytest.raises(UserError, match=r"actor_train.* has data.dataset_type=vlm and the run llm"):
        compiled(tmp_path, "qwen3", *keys)


def test_a_vision_model_is_judged_by_its_text_part():
    for kind in VISION_MODELS:
        raw = {"model_type": kind, "vision_config": {"depth": 2}}
        for strategy in ("fsdp", "megatron"):
            assert not why_not({**raw, "text_config": {"layer_types": ["full_attention"]}}, strategy)
        assert "hidden_act=gelu" in why_not({**raw, "text_config": {"hidden_act": "gelu"}}, "megatron")
        assert "linear_attention" in why_not(
            {**raw, "text_config": {"layer_types": ["linear_attention"]}}, "fsdp"
        )
        assert "quantization_config" in why_not({**raw, "quantization_config": {"bits": 4}}, "fsdp")
