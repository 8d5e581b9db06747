"""The reward op of a generative judge: a rollout engine of this run, or a service."""

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from siirl.data.chat import encode_prompts
from siirl.data.completions import SamplingParams
from siirl.data.rows import make_rows, objects
from siirl.data.said import raw_texts, said_in
from siirl.dialect.dialect import dialect_of_model
from siirl.dialect.parts import read_turn
from siirl.engines.rollout.base import RolloutEngine
from siirl.engines.weights.target import load_stored
from siirl.nodes.context import OpContext
from siirl.nodes.function_reward import finished
from siirl.nodes.generate import prompt_seed
from siirl.rewards.judge import Judge


def judge_reward(
    ctx: OpContext,
    rows: TensorDict,
    judge: Judge,
    engine: RolloutEngine | None = None,
    judge_tokenizer: PreTrainedTokenizerBase | None = None,
) -> TensorDict:
    """score [B] and reward_info [B], or under the node's own name, by what a judge writes about each.

    Equal questions are asked once. A malformed answer, and a question too long to ask, count as the default
    score and in reward/judge_malformed. Local to the ranks of the engine's shard, which answer alike.
    RewardError for a service that does not answer.
    """
    questions = _questions(ctx, judge, rows)
    first_row = dict(zip(reversed(questions), reversed(rows["row_id"].tolist()), strict=True))
    asked = list(first_row)
    if engine is None or judge_tokenizer is None:
        answers = judge.ask_service(asked)
    else:
        answers = _ask_engine(ctx, judge, engine, judge_tokenizer, first_row)
    answer_of = dict(zip(asked, answers, strict=True))
    verdicts = [judge.verdict(answer_of[question]) for question in questions]
    ctx.metrics.mean("reward/judge_malformed", sum(x.malformed for x in verdicts), len(verdicts))
    infos = [{"judge": answer_of[question] or ""} for question in questions]
    return finished(ctx, rows, make_rows({"score": [x.score for x in verdicts], "reward_info": infos}))


def _questions(ctx: OpContext, judge: Judge, rows: TensorDict) -> list[str]:
    lengths = rows["response_length"].tolist()
    ids = [row[:length] for row, length in zip(rows["response_ids"].tolist(), lengths, strict=True)]
    texts = raw_texts(ctx.dialect, ctx.tokenizer, ids)
    if ctx.cfg.reward_model.scored_text == "answer":
        texts = [said.answer for said in said_in(rows, ctx.tokenizer, ctx.dialect)]
    columns = (
        objects(rows, "raw_prompt"),
        texts,
        objects(rows, "ground_truth"),
        objects(rows, "data_source"),
    )
    return [judge.question(*values) for values in zip(*columns, strict=True)]


def _ask_engine(
    ctx: OpContext,
    judge: Judge,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    questions: dict[str, int],
) -> list[str | None]:
    """The engine's answers, in one call; None for questions that it has no room for.

    questions: text -> the row that decides its seed, if the judge samples. Its weights are read from the
    model's directory whenever it has none: at first, and after a sleep that gave them back.
    """
    load_stored(engine, ctx.cfg.reward_model.model.path)
    chats = [[{"role": "user", "content": text}] if tokenizer.chat_template else text for text in questions]
    prompts = encode_prompts(tokenizer, chats, {})
    asked = [index for index, prompt in enumerate(prompts) if len(prompt) <= judge.max_question]
    dialect = dialect_of_model(ctx.cfg.reward_model.model, tokenizer)
    params = SamplingParams(
        max_tokens=judge.settings.max_tokens,
        temperature=judge.settings.temperature,
        stop_token_ids=dialect.stop_ids,
    )
    seeds = [prompt_seed(ctx, row_id) for row_id in questions.values()]
    completions = engine.generate(
        [prompts[index] for index in asked], params, [seeds[index] for index in asked]
    )
    texts = raw_texts(dialect, tokenizer, [samples[0].token_ids for samples in completions])
    answers: list[str | None] = [None] * len(questions)
    for index, text in zip(asked, texts, strict=True):
        answers[index] = read_turn(dialect, text, dialect.opens).answer
    return answers
