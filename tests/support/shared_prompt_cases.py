"""Attention in two parts against one, for random batches; as a script with TRITON_INTERPRET=1 and a share."""

import random
import sys
from dataclasses import dataclass

import torch

from siirl.engines.rollout.vllm.shared_prompts import RunFinder, attend

BLOCK = 4
"""Tokens of a block in the cases of a CPU."""


@dataclass
class Batch:
    """Rows of a decode step as vLLM has them, in plain numbers; lines of equal width, with what is left of
    other rows after their last block."""

    lines: list[list[int]]
    lengths: list[int]


def random_batch(rng, most_rows, width, block=BLOCK):
    """Prompts of some samples each, some with a system prompt in front.

    Rows that have ended or were preempted are missing, one may have been taken up again at the end, and rows
    that fill up a batch are last.
    """
    fresh = iter(rng.sample(range(3, 40 * width * most_rows), 30 * width * most_rows))
    system = [next(fresh) for _ in range(rng.choice([0, 0, 1, 3]))]
    rows = []
    while len(rows) < most_rows:
        prompt = system * rng.choice([0, 1, 1, 1]) + [next(fresh) for _ in range(rng.randrange(width // 2))]
        for _ in range(rng.choice([1, 2, 3, 8, 16])):
            own = [next(fresh) for _ in range(rng.randrange(not prompt, width - len(prompt) + 1))]
            line = prompt + own
            least = len(prompt) * block + bool(own)
            length = rng.choice([rng.randint(least, len(line) * block), least, len(line) * block])
            rows.append((line[: -(-length // block)], length))
    rows = [row for row in rows[:most_rows] if rng.random() < 0.9]
    if rows and rng.random() < 0.3:
        rows.append(rows.pop(rng.randrange(len(rows))))
    rows += [([], 0)] * (0 if rows and rng.random() < 0.5 else rng.randint(1, 3))
    lines = [line + [rng.choice([0, 1, 2]) for _ in range(width - len(line))] for line, _ in rows]
    return Batch(lines, [length for _, length in rows])


def plain_runs(batch, most, block=BLOCK):
    """(rows of each run, blocks that its rows share), by the definition, in order."""
    rows = range(len(batch.lines))
    full = [max(length - 1, 0) // block for length in batch.lengths]

    def common(row):
        if row <= 0 or row >= len(batch.lines):
            return 0
        both = min(full[row - 1], full[row])
        equal = [batch.lines[row - 1][place] == batch.lines[row][place] for place in range(both)]
        return equal.index(False) if False in equal else both

    runs = []
    for row in rows:
        less = common(row) < max(common(row - 1), common(row + 1))
        if not common(row) or less or not runs:
            runs.append([row])
        else:
            runs[-1].append(row)
    cut = [run[first : first + most] for run in runs for first in range(0, len(run), most)]
    return [(run, common(run[1]) if len(run) > 1 else 0) for run in cut]


def check_runs(found, batch, most, block=BLOCK):
    """What was found is what the definition says, and all rows of a run have the blocks that they share."""
    rows = len(batch.lines)
    starts, prefix_lens, shared, suffix_lens = (
        tensor.tolist() for tensor in (found.starts, found.prefix_lens, found.shared, found.suffix_lens)
    )
    runs = plain_runs(batch, most, block)
    assert starts == [run[0] for run, _ in runs for _ in run] + [rows]
    assert shared == [blocks for run, blocks in runs for _ in run]
    for run, blocks in runs:
        assert [prefix_lens[row] for row in run] == [0] * (len(run) - 1) + [blocks * block]
        assert len({tuple(batch.lines[row][:blocks]) for row in run}) == 1
    for row in range(rows):
        assert suffix_lens[row] == batch.lengths[row] - shared[row] * block
        assert suffix_lens[row] > 0 or batch.lengths[row] == 0
        own = -(-suffix_lens[row] // block)
        line = batch.lines[row][shared[row] :][:own]
        assert found.suffix_table[row].tolist() == line + [0] * (len(batch.lines[row]) - own)


def paged_attention(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    seqused_k,
    block_table,
    softmax_scale,
    causal,
    out,
    return_softmax_lse,
    **others,
):
    """FlashAttention's function over pages, by its definition; what rows without keys get is no number."""
    groups = q.shape[1] // k.shape[2]
    ends, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert ends[0] == 0 and len(ends) == len(lengths) + 1 == len(block_table) + 1
    result = torch.full_like(q, float("nan")) if out is None else out
    lse = q.new_full((q.shape[1], len(q)), float("nan"))
    for line, (begin, end, length) in enumerate(zip(ends[:-1], ends[1:], lengths, strict=True)):
        assert 0 <= end - begin <= max_seqlen_q and 0 <= length <= max_seqlen_k
        pages = -(-length // k.shape[1])
        assert min(block_table[line].tolist()) >= 0 and max(block_table[line].tolist()) < len(k)
        key, value = (
            cache[block_table[line, :pages].long()].flatten(0, 1)[:length].repeat_interleave(groups, 1)
            for cache in (k, v)
        )
        for place in range(begin, end):
            seen = length - (end - 1 - place) if causal else length
            if seen > 0:
                score = torch.einsum("hd,thd->ht", q[place], key[:seen]) * softmax_scale
                lse[:, place] = score.logsumexp(-1)
                result[place] = torch.einsum("ht,thd->hd", score.softmax(-1), value[:seen])
    return (result, lse) if return_softmax_lse else result


def check_batch(rng, finder, most, width, rows, heads=4, kv_heads=2, dim=8):
    """A random batch in two parts against one."""
    batch = random_batch(rng, rows, width)
    count = len(batch.lines)
    table = torch.tensor(batch.lines, dtype=torch.int32).reshape(count, width)
    ids, table = torch.unique(table, return_inverse=True)  # fewer pages, and the same equalities
    table, pages = table.to(torch.int32), len(ids)
    batch.lines = table.tolist()
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    found = finder.find(table, lengths)
    check_runs(found, batch, most)
    real = sum(length > 0 for length in batch.lengths)
    query = torch.randn(count, heads, dim, dtype=torch.float64)
    cache = torch.randn(2, pages, BLOCK, kv_heads, dim, dtype=torch.float64)
    call = {
        "q": query,
        "k": cache[0],
        "v": cache[1],
        "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(count + 1).clamp(max=real).to(torch.int32),
        "max_seqlen_k": width * BLOCK,
        "softmax_scale": dim**-0.5,
        "causal": True,
    }
    whole = paged_attention(**call, seqused_k=lengths, block_table=table, out=None, return_softmax_lse=False)
    out = torch.full_like(query, float("nan"))
    own = {"seqused_k": found.suffix_lens, "block_table": found.suffix_table, "out": out}
    assert attend(paged_attention, found, **call, **own) is out
    assert (out - whole)[:real].abs().max().item() < 1e-10 if real else True
    return sum(blocks > 0 for _, blocks in plain_runs(batch, most))


def main(share):
    """A share of all cases. Those of one finder follow one another: nothing of a batch may be left over."""
    rng = random.Random(5)
    torch.manual_seed(5)
    shared = 0
    for rows, width, queries, cases in ((12, 6, 2, 120), (40, 9, 16, 60), (1, 5, 1, 30), (30, 300, 8, 6)):
        finder = RunFinder(rows + 4, queries, BLOCK, torch.device("cpu"))
        most = max(64 // queries, 8)
        for _ in range(max(1, round(share * cases))):
            shared += check_batch(rng, finder, most, width, rows)
    assert shared > 250 * share, shared


if __name__ == "__main__":
    main(float(sys.argv[1]))
