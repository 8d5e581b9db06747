"""Images of prompts: what a column may hold, where they stand in a prompt, and the tokens that they take."""

import base64
import json
import shutil

import pytest
import vision_cases as vision
from fixtures_tiny import write_parquet
from transformers import AutoTokenizer

from siirl.config import load_config
from siirl.config.checks import contradictions
from siirl.data.check_files import inspect_data
from siirl.data.dataset import PromptDataset
from siirl.data.image_reader import ImageReader
from siirl.data.images import read_images
from siirl.data.loader import make_loader
from siirl.data.rows import objects
from siirl.errors import DataError
from siirl.model_files.directory import check_model_files

PNG = vision.png(30, 90, 1)
TEXT = base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vision.make_vision_model(tmp_path_factory.mktemp("model"), "qwen3_vl", layers=1)


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


def row(content: str, images, **more):
    prompt = [{"role": "user", "content": content}]
    return {
        "prompt": prompt,
        "data_source": "s",
        "reward_model": {"ground_truth": "1"},
        "images": images,
    } | more


def dataset(folder, model, tokenizer, *rows, **options) -> PromptDataset:
    file = write_parquet(folder / "a.parquet", list(rows))
    return PromptDataset(str(file), tokenizer, image_reader=ImageReader(str(model)), **options)


def test_an_image_is_bytes_a_path_or_both(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    cells = [[PNG], [str(file)], [{"bytes": PNG, "path": None}], [{"bytes": None, "path": str(file)}], PNG]
    for cell in (*cells, [{"image": f"file://{file}"}], {"bytes": PNG}):
        assert read_images(cell, "here") == [TEXT], cell
    assert read_images(None, "here") == read_images([], "here") == []


BAD = {
    "no image": (b"\x89PNG no", "image 1 is no image that can be read"),
    "cut short": (PNG[:20], "image 1 is no image that can be read"),
    "missing": ("/nowhere/a.png", r"/nowhere/a\.png, cannot be read"),
    "address": ("https://example.com/a.png", "only files are read. Download it"),
    "number": (3, "is int: an image is the bytes"),
    "nothing": ({"bytes": None, "path": None}, "is NoneType: an image"),
}


@pytest.mark.parametrize(("cell", "words"), BAD.values(), ids=BAD)
def test_what_is_no_image_is_refused_with_its_row(cell, words):
    with pytest.raises(DataError, match=f"f.parquet, row 3: .*{words}"):
        read_images([cell], "f.parquet, row 3")


def test_prompts_have_as_many_tokens_as_their_images_take(tmp_path, model, tokenizer):
    both = row("<image>red and <image>? ", [{"bytes": PNG}, {"bytes": vision.png(100, 50, 2)}])
    data = dataset(tmp_path, model, tokenizer, both, row("colour ?", []), row("colour ?", None))
    seen, text, null = data.rows([0, 1, 2])
    wide, tall = (ImageReader(str(model)).num_tokens(one) for one in seen["images"])
    assert (wide, tall) == (3, 6)
    words = "<user> <seen> " + "<img> " * wide + "</seen> red and <seen> " + "<img> " * tall
    assert tokenizer.decode(seen["prompt_ids"]).split() == (words + "</seen> ? <assistant>").split()
    assert seen["prompt_length"] == len(seen["prompt_ids"])
    assert seen["raw_prompt"][0]["content"] == "<image>red and <image>? ", "rewards read the text"
    assert (text["images"], null["images"]) == ([], [])
    assert tokenizer.decode(text["prompt_ids"]).split() == ["<user>", "colour", "?", "<assistant>"]


WRONG = {
    "fewer places": (row("<image>?", [PNG, PNG]), "1 times <image>, and the row has 2 images"),
    "no place": (row("colour ?", [PNG]), "0 times <image>, and the row has 1"),
    "written out": (row("<image> <img> ?", [PNG]), "has 2 places for 1 images"),
    "text": (row("", [PNG], prompt="<image>?"), "is a plain string, and the row has images"),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_images_that_have_no_place_are_refused(tmp_path, model, tokenizer, wrong, words):
    with pytest.raises(DataError, match=rf"a\.parquet, row 0: .*{words}"):
        dataset(tmp_path, model, tokenizer, wrong).rows([0])


def test_a_template_that_takes_texts_alone_is_refused(tmp_path, model):
    plain = AutoTokenizer.from_pretrained(model)
    plain.chat_template = "{% for m in messages %}{{ '<user> ' + m.content }}{% endfor %}"
    with pytest.raises(DataError, match=r"chat template of .* refuses a prompt"):
        dataset(tmp_path, model, plain, row("<image>?", [PNG])).rows([0])


def test_the_tokens_of_images_count_for_the_longest_prompt(tmp_path, model, tokenizer):
    rows = [row("<image>?", [vision.png(100, 50, 2)]), row("<image>?", [PNG])]
    fits = len(dataset(tmp_path, model, tokenizer, *rows).rows([1])[0]["prompt_ids"])
    with pytest.raises(DataError, match=r"row 0: the prompt has 11 tokens, data.max_prompt_length is 8"):
        dataset(tmp_path, model, tokenizer, *rows, max_prompt_length=fits)
    kept = dataset(tmp_path, model, tokenizer, *rows, max_prompt_length=fits, filter_overlong=True)
    assert [one["sample_index"] for one in kept.rows(range(len(kept)))] == [1]


def test_a_run_of_vlm_data_loads_the_images_and_needs_their_column(tmp_path, model, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [row("<image>?", [PNG])] * 4)
    keys = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=2", f"data.train_files={file}"]
    keys += [f"data.val_files={file}", "data.max_prompt_length=16"]
    cfg = load_config([*keys, "data.dataset_type=vlm"])
    assert inspect_data(cfg)["train"] == 4
    for split in ("train", "val"):
        loaded = make_loader(cfg, split, tokenizer).next_batch()
        assert objects(loaded, "images") == [[TEXT]] * len(loaded)
    assert "images" not in make_loader(load_config(keys), "train", tokenizer).next_batch().keys()
    with pytest.raises(DataError, match=r"no column 'pictures' of images.*data\.image_key"):
        inspect_data(load_config([*keys, "data.dataset_type=vlm", "data.image_key=pictures"]))
    counts = write_parquet(tmp_path / "c.parquet", [row("?", 3)])
    with pytest.raises(DataError, match="'images' has type int64: an image is"):
        inspect_data(load_config([*keys, "data.dataset_type=vlm", f"data.val_files={counts}"]))


def test_a_prompt_with_images_is_not_cut():
    keys = ["data.dataset_type=vlm", "data.truncation=left"]
    assert [str(x) for x in contradictions(load_config(keys)) if "the middle of an image" in str(x)]
    assert not list(contradictions(load_config(keys[:1])))


def test_a_model_without_a_processor_of_images_is_refused(tmp_path, model):
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(DataError, match=r"no processor of images.*preprocessor_config\.json"):
        ImageReader(str(tmp_path))
    short = ["data.max_prompt_length=64", "data.max_response_length=64"]
    cfg = load_config(["data.dataset_type=vlm", f"actor_rollout_ref.model.path={tmp_path}", *short])
    with pytest.raises(
        DataError, match=r"no preprocessor_config\.json or .*Copy the model's processor files"
    ):
        check_model_files(cfg, "actor")


@pytest.mark.parametrize("other", ["size", "image_token_id"])
def test_a_critic_takes_as_many_tokens_for_an_image_as_the_policy(tmp_path, model, other):
    shutil.copytree(model, tmp_path / "critic")
    file = tmp_path / "critic" / ("preprocessor_config.json" if other == "size" else "config.json")
    short = ["data.max_prompt_length=64", "data.max_response_length=64", "data.dataset_type=vlm"]
    paths = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={tmp_path / 'critic'}"]
    check_model_files(load_config([*short, *paths]), "critic", trains=True)
    value = {"shortest_edge": 1024, "longest_edge": 4096} if other == "size" else 9
    file.write_text(json.dumps(json.loads(file.read_text()) | {other: value}))
    with pytest.raises(DataError, match=rf"critic\.model\.path.*: {other} is .* there, and .*, whose tokens"):
        check_model_files(load_config([*short, *paths]), "critic", trains=True)


def test_patches_of_images_are_kept_up_to_a_bound(model, monkeypatch):
    monkeypatch.setattr("siirl.data.image_reader.KEPT_BYTES", 20_000)
    reader = ImageReader(str(model))
    first = reader.read([vision.SMALL])
    assert reader.read([vision.SMALL]).grids == first.grids
    for one in (vision.WIDE, vision.TALL, vision.OTHER):
        reader.read([one])
        assert reader._kept_bytes == sum(kept.pixels_XC.nbytes for kept in reader._kept.values())
        assert reader._kept_bytes <= 20_000 or len(reader._kept) == 1
    assert reader.read([vision.SMALL]).pixels_XC.equal(first.pixels_XC)
