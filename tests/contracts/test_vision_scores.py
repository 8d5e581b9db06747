"""A reward model that sees: images of prompts and of later turns reach its score head, in its own tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import train_engine_cases as cases
import vision_cases as vision
from dist_harness import run_workers
from tensordict import TensorDict
from test_vision_heads import PlainCritic, with_head
from torch import Tensor
from train_engine_cases import Scenario

from siirl.compiler.plan import ModelPlan
from siirl.config import Config, load_config
from siirl.data.chat import load_tokenizer
from siirl.data.image_reader import ImageReader
from siirl.data.rows import make_rows, seen_of, take_rows
from siirl.data.seen import NO_IMAGES, Seen
from siirl.engines.engine_registry import make_train_engine
from siirl.errors import DataError
from siirl.parallel.process_groups import ProcessGroupManager
from siirl.rewards.conversations import ConversationEncoder

COLOUR, ASKED, USER, ASSISTANT, RED, BEGIN, END = 18, 19, 2, 3, 20, 4, 5
OTHER_TEMPLATE = vision.TEMPLATE.replace("<{{ m.role }}>", "<{{ m.role }}> red")
SMALLER = {"size": {"shortest_edge": 1024, "longest_edge": 4096}}
SHOWN_LATER = sorted(vision.LATER)


@pytest.fixture(scope="module", params=vision.KINDS)
def policy(request, tmp_path_factory) -> Path:
    return vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param, layers=1)


@pytest.fixture(scope="module")
def scorer(policy, tmp_path_factory) -> Path:
    """A reward model with the policy's tokens; images are as large as there."""
    made = tmp_path_factory.mktemp(f"{policy.name}_scorer")
    kind = next(kind for kind in vision.KINDS if policy.name.startswith(kind))
    return with_head(vision.make_vision_model(made, kind, layers=2, seed=3), bias=False)


def changed(folder: Path, to: Path, **files: object) -> Path:
    """A copy of a model with another chat template, or other values of its processor."""
    shutil.copytree(folder, to)
    for name, value in files.items():
        if name == "template":
            (to / "chat_template.jinja").write_text(str(value))
        else:
            file = to / "preprocessor_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    return to


def config(policy: Path, scorer: Path, *more: str) -> Config:
    return load_config(
        [
            *("data.dataset_type=vlm", f"actor_rollout_ref.model.path={policy}"),
            *("reward_model.enable=true", f"reward_model.model.path={scorer}"),
            "reward_model.fsdp_config.mixed_precision.param_dtype=float32",
            *("reward_model.micro_batch_size_per_gpu=3", "data.max_prompt_length=64", *more),
        ]
    )


def rows_of(policy: Path) -> TensorDict:
    """vision_rows with their messages."""
    rows = vision.vision_rows(policy)
    messages = [[{"role": "user", "content": "<image>colour " * len(seen) + "?"}] for seen in vision.SEEN]
    rows["raw_prompt"] = make_rows({"raw_prompt": messages}).get("raw_prompt")
    return rows


def scores(rank: int, world: int, policy: str, scorer: str, index: list[int], *more: str) -> Tensor:
    """Of some of the rows, whichever rank has them."""
    cfg, scenario = config(Path(policy), Path(scorer), *more), Scenario("", world)
    dims, wanted = cases.dims_of(scenario, tuple(range(world)))
    name = "agent_0.reward"
    plan = ModelPlan(name, 0, "reward", "fsdp", "score", False, tuple(range(world)), dims, "r", ("r",))
    engine = make_train_engine(plan, cfg, ProcessGroupManager(wanted, "gloo", 60), torch.device("cpu"))
    mine = index[engine.dp_rank :: engine.dp_size]
    encoder = ConversationEncoder(cfg, load_tokenizer(cfg))
    rows, num_cut = encoder.encode(take_rows(rows_of(Path(policy)), mine))
    assert num_cut == (len(mine) if more else 0)
    found = torch.zeros(vision.NUM_ROWS)
    found[mine] = engine.compute(rows, ("score",), 1.0)["score"][:, 0]
    torch.distributed.all_reduce(found)
    return found[index]


def by_hand(
    policy: Path, scorer: Path, row: int, opened: tuple[int, ...] = ()
) -> tuple[list[int], Seen, int]:
    """A conversation in the reward model's tokens, its images, and how many of its tokens are the prompt's.

    opened: what its template writes behind each role.
    """
    own, reader, rows = ImageReader(str(scorer)), ImageReader(str(policy)), vision.vision_rows(policy)
    ids, later = [USER, *opened], rows["response_ids"][row, : rows["response_length"][row]].tolist()
    images, starts = [*vision.SEEN[row]], []
    for image in images:
        starts.append(len(ids) + 1)
        ids += [BEGIN, *[vision.IMAGE] * own.num_tokens(image), END, COLOUR]
    ids += [ASKED, ASSISTANT, *opened]
    num_prompt = len(ids)
    if row in vision.LATER:
        image = vision.LATER[row]
        images.append(image)
        starts.append(num_prompt + 3)
        later[3 : 3 + reader.num_tokens(image)] = [vision.IMAGE] * own.num_tokens(image)
    return ids + later, Seen(tuple(images), tuple(starts)), num_prompt


def plain_scores(policy: Path, scorer: Path, index: list[int], opened: tuple[int, ...] = ()) -> Tensor:
    model, found = PlainCritic(scorer), []
    for row in index:
        ids, seen, num_prompt = by_hand(policy, scorer, row, opened)
        with torch.no_grad():
            found.append(model.of_row(scorer, ids, num_prompt, seen)[-1])
    return torch.stack(found)


ALL = list(range(vision.NUM_ROWS))


@pytest.mark.parametrize("world", [1, 2])
def test_scores_of_conversations_are_a_linear_layer_on_the_last_state(policy, scorer, world):
    (found, *_) = run_workers(scores, world, str(policy), str(scorer), ALL)
    wanted = plain_scores(policy, scorer, ALL)
    assert float(wanted.max() - wanted.min()) > 0.3
    assert float((found - wanted).abs().max()) < 1e-5


def test_a_reward_model_with_other_sizes_of_images_reads_them_as_its_own(policy, scorer, tmp_path):
    smaller = changed(scorer, tmp_path / scorer.name, **SMALLER)
    (found,) = run_workers(scores, 1, str(policy), str(smaller), ALL)
    wanted = plain_scores(policy, smaller, ALL)
    assert float((found - wanted).abs().max()) < 1e-5
    assert float((wanted - plain_scores(policy, scorer, ALL)).abs().max()) > 0.1


def test_images_of_prompts_are_rendered_by_another_template_and_later_ones_refused(policy, scorer, tmp_path):
    other = changed(scorer, tmp_path / scorer.name, template=OTHER_TEMPLATE, **SMALLER)
    index = [row for row in ALL if row not in SHOWN_LATER]
    (found,) = run_workers(scores, 1, str(policy), str(other), index)
    assert float((found - plain_scores(policy, other, index, (RED,))).abs().max()) < 1e-5
    cfg = config(policy, other)
    with pytest.raises(DataError, match=r"images between its turns, .* that has the policy's"):
        ConversationEncoder(cfg, load_tokenizer(cfg)).encode(take_rows(rows_of(policy), SHOWN_LATER))


@pytest.mark.parametrize("max_length", [9, 7, 4])
def test_an_image_that_would_be_cut_goes_whole(policy, scorer, max_length):
    cfg = config(policy, scorer, f"reward_model.max_length={max_length}")
    rows, reader, num_inside = rows_of(policy), ImageReader(str(policy)), 0
    encoded, num_cut = ConversationEncoder(cfg, load_tokenizer(cfg)).encode(rows)
    assert num_cut > 0
    for row, seen in enumerate(seen_of(encoded)):
        ids = encoded["prompt_ids"][row, -int(encoded["prompt_length"][row]) :].tolist()
        whole, images, _ = by_hand(policy, scorer, row)
        begins = max(0, len(whole) - max_length)
        ends = [start + reader.num_tokens(one) for one, start in zip(*images, strict=True)]
        for start, end in zip(images.starts, ends, strict=True):
            if start < begins < end:
                begins, num_inside = end, num_inside + 1
        assert ids == whole[begins:]
        kept = [number for number, start in enumerate(images.starts) if start >= begins]
        assert seen.images == tuple(images.images[number] for number in kept)
        assert seen.starts == tuple(images.starts[number] - begins for number in kept)
    assert num_inside or max_length != 7
    assert NO_IMAGES in seen_of(encoded)
    (found,) = run_workers(scores, 1, str(policy), str(scorer), [4], f"reward_model.max_length={max_length}")
    assert torch.isfinite(found).all()
