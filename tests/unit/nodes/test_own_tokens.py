"""A teacher with another tokenizer: what it reads, and what it says of the policy's tokens, by hand."""

import itertools
import random

import pytest
import torch
from bpe_tokenizers import SAMPLE, byte_level, characters, sentencepiece_like
from op_contexts import op_context
from tensordict import TensorDict
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.data.rows import make_rows
from siirl.data.text_spans import token_bytes
from siirl.engines.train.base import BatchCounts, TokenOutputs
from siirl.nodes.own_tokens import OwnTokens
from siirl.nodes.policy_loss import make_loss_fn
from siirl.nodes.teacher_rows import taught, teacher_log_prob

PROMPT = [{"role": "user", "content": "the larger of 3 and 7"}]


class Teacher:
    """A model that says -(t + k / 8) of token t at place k of the response, and notes what it read."""

    def __init__(self):
        self.read: list[tuple[list[int], list[int]]] = []

    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> dict:
        columns = (
            rows[f"{name}_{part}"].tolist() for name in ("prompt", "response") for part in ("ids", "length")
        )
        for prompt, prompt_length, response, length in zip(*columns, strict=True):
            self.read.append((prompt[len(prompt) - prompt_length :], response[:length]))
        places = torch.arange(rows["response_ids"].shape[1]) / 8
        return {"log_prob": -(rows["response_ids"] + places).float() * rows["response_mask"]}

    def flops(self, rows: TensorDict, backward: bool) -> float:
        return 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizers of words, with marks of its own, of bytes, and of a few letters."""
    folder = tmp_path_factory.mktemp("tokenizers")
    byte_level(folder / "words", 330)
    byte_level(folder / "bytes", 256, marks=("[[", "]]"))
    words = " ".join(SAMPLE).split()
    sentencepiece_like(folder / "pieces", 330, words)
    sentencepiece_like(folder / "more pieces", 400, words)
    characters(folder / "letters", "the largr", marks=("[[", "]]"))
    return folder


class Speaker(Teacher):
    """A model whose distribution over its words at each place follows from the token before, of so many."""

    def __init__(self, size: int, top_k: int):
        super().__init__()
        draw = torch.Generator().manual_seed(size)
        self.next_VV = (2 * torch.randn(size, size, generator=draw)).log_softmax(-1)
        self.top_k = top_k

    def compute(self, rows: TensorDict, outputs: tuple[str, ...], temperature: float) -> dict:
        super().compute(rows, outputs, temperature)
        before_BT = torch.cat([rows["prompt_ids"][:, -1:], rows["response_ids"][:, :-1]], 1)
        said_BTV = self.next_VV[before_BT] * rows["response_mask"][..., None]
        found = {"log_prob": said_BTV.gather(-1, rows["response_ids"][..., None])[..., 0]}
        found["top_log_prob"] = said_BTV
        if "top_ids" in outputs:
            found["top_log_prob"], found["top_ids"] = said_BTV.topk(self.top_k)
        return found


def teaching(folder, policy: str, teacher: str, *more: str):
    cfg = load_config(
        [
            f"actor_rollout_ref.model.path={folder / policy}",
            f"teacher.model.path={folder / teacher}",
            "teacher.tokenizer=own",
            *more,
        ]
    )
    mine, its = (AutoTokenizer.from_pretrained(folder / name) for name in (policy, teacher))
    ctx = op_context("t", cfg, mine)
    return ctx, OwnTokens(cfg, mine, ctx.dialect), mine, its


def rows_of(tokenizer, *responses: list[int], prompt=PROMPT) -> TensorDict:
    asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    lengths = torch.tensor([len(response) for response in responses])
    rows = make_rows(
        {
            "sample_index": torch.arange(len(responses)),
            "prompt_ids": [asked] * len(responses),
            "prompt_length": [len(asked)] * len(responses),
            "response_ids": list(responses),
            "response_length": lengths,
            "raw_prompt": [prompt] * len(responses),
        }
    )
    rows["response_mask"] = torch.arange(rows["response_ids"].shape[1]) < lengths[:, None]
    return rows


def test_a_row_is_read_in_the_teachers_template_tokens_and_end(folder):
    ctx, own, mine, its = teaching(folder, "words", "bytes")
    text = "the larger of 12 ß"
    ended = [*mine(text)["input_ids"], mine.eos_token_id]
    teacher = Teacher()
    found = teacher_log_prob(ctx, rows_of(mine, ended, ended[:3]), teacher, own)
    asked = its.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"]
    spelled = list(text.encode())
    whole = [*its(text)["input_ids"], its.eos_token_id]
    cut = mine.decode(ended[:3])
    assert teacher.read == [(asked, whole), (asked, its(cut)["input_ids"])]
    log_prob, span = found["t_teacher_log_prob"], found["t_teacher_span"]
    begin = 0  # a token of words is as many of bytes as it has
    for place, piece in enumerate(token_bytes(mine)[one] for one in ended[:-1]):
        ids = whole[begin : begin + len(piece)]
        want = -sum(one + (begin + k) / 8 for k, one in enumerate(ids))
        assert float(log_prob[0, place]) == pytest.approx(want, rel=1e-6), (place, piece)
        begin += len(piece)
    assert begin == len(spelled) and span[0].tolist() == list(range(1, len(ended) + 1))
    end = its.eos_token_id + len(spelled) / 8
    assert float(log_prob[0, len(ended) - 1]) == pytest.approx(-end), "ends are compared with each other"
    assert span[1].tolist()[:4] == [1, 2, 3, 0] and ctx.metrics.values()["teacher/aligned"] == 1


def test_coarser_tokens_of_the_teacher_make_spans_of_several_of_the_policys(folder):
    ctx, own, mine, its = teaching(folder, "bytes", "words")
    text = "larger of"
    response = [*mine(text)["input_ids"], mine.eos_token_id]
    found = teacher_log_prob(ctx, rows_of(mine, response), Teacher(), own)
    ids = its(text)["input_ids"]
    assert len(ids) < len(text), "the teacher has words"
    ends = [len(its.decode(ids[: k + 1])) for k in range(len(ids))]
    span = [next(end for end in ends if end > place) for place in range(len(text))]
    assert found["t_teacher_span"][0].tolist() == [*span, len(response)]
    want = torch.zeros(len(response))
    for place, (end, one) in enumerate(zip(ends, ids, strict=True)):
        want[end - 1] = -(one + place / 8)
    want[-1] = -(its.eos_token_id + len(ids) / 8)
    torch.testing.assert_close(found["t_teacher_log_prob"][0], want)
    column = taught(ctx, with_columns(rows_of(mine, response), found))
    torch.testing.assert_close(column["teacher_log_prob"][0], want)
    assert column["teacher_span"].tolist() == found["t_teacher_span"].tolist()


def with_columns(rows: TensorDict, found: TensorDict) -> TensorDict:
    for name in found.keys():
        rows[name] = found[name]
    return rows


@pytest.mark.parametrize("name", ["words", "bytes"])
def test_with_equal_tokenizers_it_says_what_it_says_of_the_rows_themselves(folder, name):
    ctx, own, mine, _ = teaching(folder, name, name)
    draw = random.Random(5)
    texts = [draw.choice(SAMPLE)[draw.randrange(5) :][: draw.randrange(1, 20)] for _ in range(40)]
    rows = rows_of(mine, *([*mine(text)["input_ids"], mine.eos_token_id] for text in texts))
    teacher, plain = Teacher(), Teacher()
    found = teacher_log_prob(ctx, rows, teacher, own)
    want = plain.compute(rows, (), 1.0)["log_prob"]
    assert torch.equal(found["t_teacher_log_prob"], want) and teacher.read == plain.read
    each = torch.arange(1, want.shape[1] + 1) * rows["response_mask"]
    assert torch.equal(found["t_teacher_span"], each)


def test_what_is_no_text_and_what_the_teacher_cannot_write_is_in_few_spans_or_none(folder):
    ctx, own, mine, _ = teaching(folder, "bytes", "words")
    a = mine("a")["input_ids"][0]
    bad = next(one for one in range(len(mine)) if mine.convert_ids_to_tokens(one) == "ÿ")
    found = teacher_log_prob(ctx, rows_of(mine, [a, bad, a], [], [mine.eos_token_id]), Teacher(), own)
    assert found["t_teacher_span"].tolist() == [[1, 2, 3], [0, 0, 0], [1, 0, 0]]
    ctx, own, mine, _ = teaching(folder, "bytes", "letters")
    response = [*mine("the zlarger")["input_ids"], mine.eos_token_id]
    found = teacher_log_prob(ctx, rows_of(mine, response), Teacher(), own)
    assert found["t_teacher_span"][0].tolist() == [1, 2, 3, 4, *[0] * 8], (
        "up to what is no letter of the teacher"
    )
    assert not found["t_teacher_log_prob"][0, 4:].any()
    assert ctx.metrics.values()["teacher/aligned"] == pytest.approx(4 / 12)


def test_rows_beyond_the_positions_of_the_teacher_are_cut(folder):
    ctx, own, mine, its = teaching(folder, "bytes", "words")
    asked = len(its.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"])
    response = [*mine("larger of 7 and 3")["input_ids"], mine.eos_token_id]
    for positions in (asked + 3, asked, asked - 2):
        own._positions = positions
        teacher = Teacher()
        found = teacher_log_prob(ctx, rows_of(mine, response), teacher, own)
        prompt, read = teacher.read[0]
        room = max(0, positions - asked)
        assert len(prompt) + len(read) == positions and len(read) == room
        spans = {end for end in found["t_teacher_span"][0].tolist() if end}
        assert len(spans) == room, "one for each token that was read"


def test_rows_of_a_teacher_of_the_policys_tokens_beside_it_keep_their_own(folder):
    _, _, mine, _ = teaching(folder, "bytes", "words")
    rows = rows_of(mine, [1, 2, 3], [4, 5, 6])
    columns = {
        "a_teacher_weight": torch.tensor([1.0, 0.0]),
        "a_teacher_log_prob": -torch.ones(2, 3),
        "b_teacher_weight": torch.tensor([0.0, 1.0]),
        "b_teacher_log_prob": torch.tensor([[0.0, 0, 0], [0, 0, -2]]),
        "b_teacher_span": torch.tensor([[0, 0, 0], [3, 3, 3]]),
    }
    for name, column in columns.items():
        rows[name] = column
    found = taught(op_context("train", load_config([])), rows)
    assert found["teacher_span"].tolist() == [[1, 2, 3], [3, 3, 3]]
    assert found["teacher_log_prob"].tolist() == [[-1, -1, -1], [0, 0, -2]]
    assert not any("_teacher_" in name for name in found.keys()), list(itertools.islice(found.keys(), 9))


DISTILL = "actor_rollout_ref.actor.distill"


def test_two_tokenizers_that_begin_texts_with_a_space_agree_on_it(folder):
    ctx, own, mine, its = teaching(folder, "more pieces", "pieces")
    teacher, response = Teacher(), mine("the larger of 7")["input_ids"]
    assert token_bytes(mine)[response[0]].startswith(b" ")
    teacher_log_prob(ctx, rows_of(mine, [*response, mine.eos_token_id]), teacher, own)
    assert teacher.read[0][1] == [*its("the larger of 7")["input_ids"], its.eos_token_id]
    assert ctx.metrics.values()["teacher/aligned"] == 1


def loss_of(found: TensorDict, rows: TensorDict, policy_VV: torch.Tensor, *keys: str) -> list[torch.Tensor]:
    """The actor's loss, and its gradient, of a policy whose next token follows from the one before."""
    cfg = load_config(["actor_rollout_ref.actor.policy_loss.loss_mode=distill", *keys])
    rows = taught(op_context("train", cfg), with_columns(rows.clone(), found))
    z_VV = policy_VV.clone().requires_grad_()
    before_BT = torch.cat([rows["prompt_ids"][:, -1:], rows["response_ids"][:, :-1]], 1)
    all_BTV = z_VV.log_softmax(-1)[before_BT]
    outputs = TokenOutputs(
        log_prob_BT=all_BTV.gather(-1, rows["response_ids"][..., None])[..., 0],
        entropy_BT=torch.zeros(before_BT.shape),
        top_log_prob_BT=all_BTV.gather(-1, rows["top_ids"]) if "top_ids" in rows.keys() else all_BTV,
    )
    mask_BT = rows["response_mask"]
    loss, _ = make_loss_fn(cfg)(outputs, rows, BatchCounts(float(mask_BT.sum()), len(rows), mask_BT.shape[1]))
    return [loss, torch.autograd.grad(loss, z_VV)[0]]


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("top_k", [-1, 5])
def test_with_equal_tokenizers_the_loss_of_distributions_is_that_of_any_teacher(folder, top_k, divergence):
    """And so is its gradient."""
    keys = (f"{DISTILL}.top_k={top_k}", f"{DISTILL}.divergence={divergence}")
    ctx, own, mine, _ = teaching(folder, "words", "words", *keys)
    draw, size = random.Random(5), len(mine)
    texts = [draw.choice(SAMPLE)[draw.randrange(5) :][: draw.randrange(1, 20)] for _ in range(20)]
    rows = rows_of(mine, *([*mine(text)["input_ids"], mine.eos_token_id] for text in texts))
    rows["rollout_log_prob"] = torch.zeros(rows["response_ids"].shape)
    policy_VV = torch.randn(size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = []
    plain = op_context("t", load_config(list(keys)), mine)
    for context, its_own in ((ctx, own), (plain, None)):
        found = teacher_log_prob(context, rows, Speaker(size, top_k), its_own)
        assert ("t_teacher_span" in found.keys()) == (its_own is not None)
        losses.append(loss_of(found, rows, policy_VV, *keys))
    assert losses[1][0].item() > 0.05 and ctx.metrics.values()["teacher/aligned"] == 1
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("policy", "teacher"), [("bytes", "words"), ("words", "pieces")])
def test_words_of_equal_text_are_compared_and_ends_whatever_they_are_called(folder, policy, teacher):
    """At the first token of a response, which SentencePiece begins with a space that no text has."""
    ctx, own, mine, its = teaching(folder, policy, teacher, f"{DISTILL}.top_k=-1")
    response = [*mine("larger")["input_ids"], mine.eos_token_id]
    speaker = Speaker(len(its), -1)
    found = teacher_log_prob(ctx, rows_of(mine, response), speaker, own)["t_teacher_top_log_prob"][0, 0]
    (asked, read), pieces, own_pieces = speaker.read[0], token_bytes(mine), token_bytes(its)
    said = speaker.next_VV[asked[-1]]
    space = b" " if teacher == "pieces" else b""
    of_text = {piece: word for word, piece in enumerate(own_pieces) if piece[:1] == space or not space}
    of_text[space + pieces[mine.eos_token_id]] = its.eos_token_id
    compared = {
        word: of_text[space + piece]
        for word, piece in enumerate(pieces)
        if space + piece in of_text
        and (of_text[space + piece] != its.eos_token_id or word == mine.eos_token_id)
    }
    assert len(compared) > (200 if teacher == "words" else 2)
    is_long = len(read) != len(response)
    for word in range(len(mine)):
        if word == response[0] and is_long:
            assert found[word] < said.max()  # that of the span
        elif word in compared and not (is_long and compared[word] == read[0]):
            assert found[word] == said[compared[word]], pieces[word]
        else:
            assert found[word].abs() == torch.inf, pieces[word]
    others = [
        float(said[w])
        for w in range(len(its))
        if w not in compared.values() and (w != read[0] or not is_long)
    ]
    assert found[len(mine) :].tolist()[: len(others)] == sorted(others, reverse=True)
