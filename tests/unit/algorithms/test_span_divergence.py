"""The divergence from a teacher with another vocabulary, against sums over its events written one by one."""

import inspect
import itertools
import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from siirl.algorithms.distillation import TeacherSpans, divergence, span_divergence

KINDS = [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)]
WORDS, OWN, LENGTH = 7, 6, 9
POLICY_OF = torch.tensor([3, -1, 0, 6, -1, 2])
"""The policy's word of each of the teacher's: 1, 4 and 5 of the policy have none."""
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def logits(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made_spans(draw: random.Random) -> list[tuple[int, int, int, int]]:
    """(begin, end, first, last) of some in a response of LENGTH tokens, and in what the teacher reads."""
    found, begin, first = [], draw.randrange(2), 0
    while begin < LENGTH - 1:
        end, last = begin + draw.choice((1, 1, 2, 3)), first + draw.choice((1, 1, 2))
        found.append((begin, min(end, LENGTH), first, last))
        begin, first = end, last
    return found


class Event(NamedTuple):
    """What a text may begin with, and how likely both find it."""

    policy: Tensor
    teacher: Tensor


def events(
    p_V: Tensor,
    q_V: Tensor,
    texts: tuple[Tensor, Tensor],
    first: tuple[int, int],
    long: bool,
    likely: list[int],
) -> tuple[list[Event], tuple[list[Tensor], list[Tensor]]]:
    """(what is compared, with all else as the last; of each the words that the other does not have).

    texts: log-probs of the whole span; first: the first tokens of both; likely: what the teacher says.
    """
    pairs = [(int(POLICY_OF[word]), word) for word in likely if POLICY_OF[word] >= 0]
    if long and first[1] not in likely:
        pairs = [pair for pair in pairs if pair[1] != likely[-1]]  # the span has its place
    found = [Event(texts[0].exp(), texts[1].exp())] if long else []
    for word, its in pairs:
        if not long or (word != first[0] and its != first[1]):
            found.append(Event(p_V[word].exp(), q_V[its].exp()))
    found.append(
        Event(*(1 - sum(x) for x in zip(*found, strict=True)))
        if found
        else Event(p_V[0] * 0 + 1, q_V[0] * 0 + 1)
    )
    sides = (
        [p_V[w].exp() for w in range(WORDS) if w not in POLICY_OF.tolist() and not (long and w == first[0])],
        [q_V[w].exp() for w in range(OWN) if POLICY_OF[w] < 0 and not (long and w == first[1])],
    )
    return found, sides


def by_hand(of_events: list[Event], name: str, beta: float) -> Tensor:
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(name, beta)

    def kl(one: list[Tensor], other: list[Tensor]) -> Tensor:
        return sum(x * (x / y).log() for x, y in zip(one, other, strict=True))

    p, q = ([event[side] for event in of_events] for side in (0, 1))
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = [beta * y + (1 - beta) * x for x, y in of_events]
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def sorted_distance(one: list[Tensor], other: list[Tensor]) -> Tensor:
    one, other = (sorted(side, reverse=True) for side in (one, other))
    return sum(abs(x - y) for x, y in itertools.zip_longest(one, other, fillvalue=torch.tensor(0.0)))


def said(spans: list, teacher_SV: Tensor, ids: Tensor, own: Tensor, top_k: int | None) -> dict[str, Tensor]:
    """What the teacher's side makes of it, at the first token of each span."""
    place = torch.tensor(spans).unbind(1)
    top = (teacher_SV[place[2]], None) if top_k is None else teacher_SV[place[2]].topk(top_k)
    text = torch.stack([teacher_SV.gather(1, own[:, None])[first:last].sum() for *_, first, last in spans])
    found = TeacherSpans(
        top_log_prob_MK=top[0],
        top_ids_MK=top[1],
        own_token_M=own[place[2]],
        token_M=ids[place[0]],
        log_prob_M=text,
        is_long_M=(place[1] - place[0] > 1) | (place[3] - place[2] > 1),
    )
    return found.in_policy_words([POLICY_OF], torch.zeros_like(place[0]), WORDS)


def columns_of(spans: list, values_MK: Tensor) -> Tensor:
    found = values_MK.new_zeros(1, LENGTH, values_MK.shape[1])
    for (begin, *_), value_K in zip(spans, values_MK, strict=True):
        found[0, begin] = value_K
    return found


@pytest.mark.parametrize("top_k", [None, 1, 3, OWN])
@pytest.mark.parametrize(("name", "beta"), KINDS)
def test_it_is_that_of_events_and_of_sorted_lists_by_hand(name, beta, top_k):
    """With its gradient, on 30 responses of random spans."""
    for seed in range(30):
        draw = random.Random(seed)
        spans = made_spans(draw)
        ids = torch.tensor(draw.choices(range(WORDS), k=LENGTH))
        own = torch.tensor(draw.choices(range(OWN), k=2 * LENGTH))
        x = logits(LENGTH, WORDS, seed=seed).requires_grad_()
        p, q = x.log_softmax(-1), logits(2 * LENGTH, OWN, seed=seed + 100).log_softmax(-1)
        column = {key: columns_of(spans, value) for key, value in said(spans, q, ids, own, top_k).items()}
        span_BT = torch.zeros(1, LENGTH, dtype=torch.int64)
        for begin, end, *_ in spans:
            span_BT[0, begin:end] = end
        top_ids = column.get("top_ids")
        found = span_divergence(
            p[None] if top_ids is None else p[None].gather(-1, top_ids),
            column["top_log_prob"],
            p.gather(1, ids[:, None])[None, :, 0],
            top_ids,
            ids[None],
            span_BT,
            name,
            beta,
            0.7,
            chunk=20,
        )
        want = torch.zeros(LENGTH, dtype=torch.float64)
        for begin, end, first, last in spans:
            long = end - begin > 1 or last - first > 1
            likely = q[first].topk(top_k or OWN).indices.tolist()
            texts = (p[range(begin, end), ids[begin:end]].sum(), q[range(first, last), own[first:last]].sum())
            of_events, sides = events(
                p[begin], q[first], texts, (int(ids[begin]), int(own[first])), long, likely
            )
            want[begin] = by_hand(of_events, name, beta)
            if top_k is None:
                want[begin] = want[begin] + 0.7 * sorted_distance(*sides)
        torch.testing.assert_close(found[0], want, **EXACT)
        slope = logits(LENGTH, seed=3)
        grads = [
            torch.autograd.grad((one * slope).sum(), x, retain_graph=True)[0] for one in (found[0], want)
        ]
        torch.testing.assert_close(grads[0], grads[1], **EXACT)


def single(
    p_TV: Tensor, column: dict[str, Tensor], ids_T: Tensor, name: str, beta: float, coef: float
) -> Tensor:
    """Of spans of one token each."""
    ids_TK = column.get("top_ids")
    return span_divergence(
        (p_TV if ids_TK is None else p_TV.gather(1, ids_TK))[None],
        column["top_log_prob"][None],
        p_TV.gather(1, ids_T[:, None])[None, :, 0],
        None if ids_TK is None else ids_TK[None],
        ids_T[None],
        torch.arange(1, len(ids_T) + 1)[None],
        name,
        beta,
        coef,
    )[0]


def of_single(
    q_TU: Tensor, policy_of: Tensor, ids_T: Tensor, num_words: int, top_k: int | None
) -> dict[str, Tensor]:
    top = (q_TU, None) if top_k is None else q_TU.topk(top_k)
    nothing = q_TU.new_zeros(len(q_TU))
    found = TeacherSpans(*top, ids_T, ids_T, nothing, nothing > 0)
    return found.in_policy_words([policy_of], torch.zeros_like(ids_T), num_words)


@pytest.mark.parametrize(("name", "beta"), KINDS)
@pytest.mark.parametrize("top_k", [None, 4])
def test_with_one_vocabulary_it_is_the_divergence_of_teachers_with_the_policys_tokens(name, beta, top_k):
    """Its gradient, too; whatever unshared_coef is."""
    x, q = logits(40, 11, seed=1).requires_grad_(), logits(40, 11, seed=2).log_softmax(-1)
    p, ids = x.log_softmax(-1), torch.randint(11, (40,), generator=torch.Generator().manual_seed(0))
    column = of_single(q, torch.arange(11), ids, 11, top_k)
    found = single(p, column, ids, name, beta, 3.0)
    if top_k is None:
        assert torch.equal(column["top_log_prob"], q)
        want = divergence(p, q, name, beta, whole=True)
    else:
        top, words = q.topk(top_k)
        assert torch.equal(column["top_ids"], words) and torch.equal(column["top_log_prob"], top)
        want = divergence(p.gather(1, words), top, name, beta, whole=False)
    torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-14)
    grads = [torch.autograd.grad(one.sum(), x, retain_graph=True)[0] for one in (found, want)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("name", "beta"), KINDS)
def test_of_single_tokens_it_is_the_loss_of_trls_gold_and_that_of_all_other_words_as_one(name, beta):
    gold = pytest.importorskip("trl.experimental.gold.gold_trainer")
    texts = [{f"shared {i}" if n >= 0 else f"own {i}": i for i, n in enumerate(POLICY_OF.tolist())}]
    texts.append({f"policy {i}": i for i in range(WORDS)})
    for its, word in enumerate(POLICY_OF.tolist()):
        if word >= 0:
            del texts[1][f"policy {word}"]
            texts[1][f"shared {its}"] = word
    teacher, policy = (SimpleNamespace(get_vocab=lambda words=words: words) for words in texts)
    options = dict.fromkeys(inspect.signature(gold.GOLDConfig).parameters)
    options |= {
        "uld_use_hybrid_loss": True,
        "uld_hybrid_matched_weight": 1.0,
        "uld_hybrid_unmatched_weight": 0.7,
    }
    loss = gold.ULDLoss(SimpleNamespace(**options | {"beta": beta}), policy, teacher)
    x, q = logits(20, WORDS, seed=1).requires_grad_(), logits(20, OWN, seed=2).log_softmax(-1)
    p, ids = x.log_softmax(-1), torch.zeros(20, dtype=torch.int64)
    loss.mapping_tensor = loss.mapping_tensor.long()
    theirs = loss._compute_hybrid_uld_loss(p.exp(), q.exp())
    has = POLICY_OF >= 0
    rest = [Event(1 - p[t, POLICY_OF[has]].exp().sum(), 1 - q[t, has].exp().sum()) for t in range(20)]
    want = theirs + sum(by_hand([one], name, beta) for one in rest) / 20
    found = single(p, of_single(q, POLICY_OF, ids, WORDS, None), ids, name, beta, 0.7).mean()
    torch.testing.assert_close(found, want, **EXACT)
    grads = [torch.autograd.grad(one, x, retain_graph=True)[0] for one in (found, want)]
    torch.testing.assert_close(grads[0], grads[1], **EXACT)
