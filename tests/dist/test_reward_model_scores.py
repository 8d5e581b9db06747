"""A reward model's scores equal those of transformers' own sequence classifier, on any number of ranks."""

from pathlib import Path

import pytest
import torch
from dist_harness import run_workers
from fixtures_tiny import make_tiny_model_dir, make_tiny_reward_model, make_tiny_tokenizer

from siirl.compiler.compile import TEMPLATES, compile_plan
from siirl.config import load_config
from siirl.dag.yaml_file import load_dag_file
from siirl.data.chat import load_tokenizer, read_tokenizer
from siirl.data.rows import make_rows, take_rows
from siirl.engines.engine_registry import make_train_engine
from siirl.parallel.process_groups import ProcessGroupManager
from siirl.rewards.conversations import ConversationEncoder

QUESTIONS = (
    "max 3 4=",
    "7+8=",
    "is it 5? say yes or no",
    "1=",
    "a long question of many words: 2 4 6 8 =",
    "9=",
)
ANSWERS = ("4", "15 or so", "", "1", "20", "(9)")
MEGATRON = ("reward_model.strategy=megatron", "reward_model.megatron.param_dtype=float32")
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    """(policy, reward model): the second has another vocabulary and another chat template."""
    root = tmp_path_factory.mktemp("models")
    policy = make_tiny_model_dir(root / "policy", init_std=0.2)
    reward = make_tiny_reward_model(root / "reward", vocab=90, hidden=64, init_std=0.2, seed=3)
    template = reward / "chat_template.jinja"
    assert template.is_file()
    template.write_text(OTHER_TEMPLATE)
    return str(policy), str(reward)


def config(policy: str, reward: str, *more: str):
    return load_config(
        [
            f"actor_rollout_ref.model.path={policy}",
            "actor_rollout_ref.rollout.name=hf",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            "reward_model.enable=True",
            f"reward_model.model.path={reward}",
            "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
            "reward_model.micro_batch_size_per_gpu=2",
            *more,
        ]
    )


def policy_rows(tokenizer):
    """Rows as a rollout leaves them, prompts padded on the left, responses on the right."""
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    responses = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in ANSWERS]
    return make_rows(
        {
            "raw_prompt": chats,
            "prompt_ids": prompts,
            "prompt_length": [len(ids) for ids in prompts],
            "response_ids": responses,
            "response_length": [len(ids) for ids in responses],
        }
    )


def engine_scores(
    rank: int, world: int, policy: str, reward: str, more: tuple[str, ...], num_rows: int = len(QUESTIONS)
) -> dict[int, float]:
    """Row -> score of this rank's rows; backend and sizes are those that the compiler gives the engine."""
    cfg = config(policy, reward, *more)
    tokenizer = load_tokenizer(cfg)
    dag = load_dag_file(TEMPLATES / "grpo_reward_model.yaml")
    plan, _ = compile_plan(dag, cfg, world)
    model = plan.models["agent_0.reward"]
    engine = make_train_engine(model, cfg, ProcessGroupManager(plan.groups, "gloo", 60), torch.device("cpu"))
    mine = list(range(engine.dp_rank, num_rows, engine.dp_size))
    encoded, _ = ConversationEncoder(cfg, tokenizer).encode(take_rows(policy_rows(tokenizer), mine))
    scores = engine.compute(encoded, ("score",), 1.0)["score"][:, 0].tolist()
    return dict(zip(mine, scores, strict=True))


def plain_scores(reward: str) -> list[float]:
    """By transformers: each conversation rendered by the reward model's tokenizer, scored by itself."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = read_tokenizer(reward, False, "")
    model = AutoModelForSequenceClassification.from_pretrained(reward)
    scores = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits.item())
    return scores


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, ()),
        (2, ()),
        (2, (*MEGATRON, "reward_model.megatron.tensor_model_parallel_size=2")),
        pytest.param(1, MEGATRON, marks=pytest.mark.slow),
        pytest.param(
            2, (*MEGATRON, "reward_model.megatron.pipeline_model_parallel_size=2"), marks=pytest.mark.slow
        ),
    ],
    ids=["fsdp", "fsdp on 2", "megatron tp 2", "megatron", "megatron pp 2"],
)
def test_scores_equal_those_of_hf_on_conversations_rendered_anew(models, world, more):
    parts = run_workers(engine_scores, world, *models, more)
    scores = {row: score for part in parts for row, score in part.items()}
    expected = plain_scores(models[1])
    assert max(expected) - min(expected) > 0.1
    assert [scores[row] for row in range(len(QUESTIONS))] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), MEGATRON], ids=["fsdp", "megatron"])
def test_a_rank_without_rows_takes_part(models, more):
    parts = run_workers(engine_scores, 2, *models, more, 1)
    assert parts[0] == pytest.approx({0: plain_scores(models[1])[0]}, abs=1e-5) and parts[1] == {}


def test_a_long_conversation_is_cut_at_its_beginning(models):
    tokenizer = load_tokenizer(config(*models))
    rows = policy_rows(tokenizer)
    whole, num_cut = ConversationEncoder(config(*models), tokenizer).encode(rows)
    assert num_cut == 0 and int(whole["prompt_length"].min()) > 12
    short, num_cut = ConversationEncoder(config(*models, "reward_model.max_length=12"), tokenizer).encode(
        rows
    )
    assert num_cut == len(rows) and torch.equal(short["prompt_ids"], whole["prompt_ids"][:, -12:])


def test_tokens_are_taken_as_they_are_where_the_tokenizers_agree(models, tmp_path):
    policy, reward = models
    cfg = config(policy, reward)
    tokenizer = load_tokenizer(cfg)
    assert ConversationEncoder(cfg, tokenizer).renders
    same = make_tiny_model_dir(tmp_path / "same", init_std=0.2)
    for more, renders in (((), False), ((f"reward_model.model.rm_tokenizer={same}",), True)):
        encoder = ConversationEncoder(config(policy, str(same), *more), tokenizer)
        assert encoder.renders == renders
        rows = policy_rows(tokenizer)
        encoded, num_cut = encoder.encode(rows)
        assert num_cut == 0
        first = encoded["prompt_ids"][0, -int(encoded["prompt_length"][0]) :].tolist()
        assert tokenizer.decode(first) == "<user>max 3 4=<eos><assistant>4<eos>"
        encoded, num_cut = encoder.encode(take_rows(rows, []))
        assert (len(encoded), num_cut) == (0, 0)


def test_a_tokenizer_without_a_template_takes_plain_prompts_only(models, tmp_path):
    from siirl.errors import DataError

    policy, reward = models
    plain = make_tiny_tokenizer(tmp_path / "plain", chat_template=False)
    cfg = config(policy, reward, f"reward_model.model.rm_tokenizer={plain}")
    tokenizer = load_tokenizer(cfg)
    encoder, rows = ConversationEncoder(cfg, tokenizer), policy_rows(tokenizer)
    with pytest.raises(DataError, match="no chat template"):
        encoder.encode(rows)
    texts = make_rows({name: rows.get(name) for name in rows.keys() if name != "raw_prompt"})
    texts["raw_prompt"] = make_rows({"raw_prompt": list(QUESTIONS)}).get("raw_prompt")
    encoded, _ = encoder.encode(texts)
    assert int(encoded["prompt_length"][0]) == len(QUESTIONS[0] + ANSWERS[0])
    assert Path(plain).is_dir()
