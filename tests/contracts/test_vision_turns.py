"""Images that environments and tools show between turns: what an agent reads, says, and is trained on."""

import base64
import json
from pathlib import Path
from typing import ClassVar
from urllib.request import Request, urlopen

import pytest
import torch
import vision_cases as vision
from episode_cases import play, stage
from outside_cases import episode, game_of
from safetensors.torch import load_file

from siirl.agents.contexts import Limits
from siirl.agents.environments import load_environment
from siirl.agents.outside.endpoint import Endpoint, ProgramLimits
from siirl.agents.outside.programs import Programs, starter
from siirl.agents.renderer import ChatRenderer
from siirl.agents.runner import Speaker, run_all
from siirl.agents.shown import Shown
from siirl.agents.stream_client import StreamClient
from siirl.agents.tool_files import ToolUse
from siirl.agents.tools import Toolbox, ToolLimits
from siirl.compiler.plan import ModelPlan
from siirl.config import load_config
from siirl.data.completions import SamplingParams
from siirl.data.image_reader import ImageReader
from siirl.engines.engine_registry import make_rollout_engine
from siirl.parallel.dims import ParallelDims

ROLLOUT = "actor_rollout_ref.rollout"
HOT, NUM_EPISODES = 2.0, 6
TURNS = 3
WORLD = """
import base64, io
from PIL import Image
from siirl.agents.environments import Observation, StepResult
from siirl.agents.shown import Shown

class Gallery:
    '''Shows an image after each turn, in one of the forms that there are.'''

    def __init__(self, images):
        self.images = images

    def reset(self, task, seed):
        self.at = seed % 7
        return [{"type": "text", "text": "colour"}, {"type": "image", "image": self.next()}]

    def next(self):
        self.at += 1
        return base64.b64decode(self.images[self.at % len(self.images)])

    def step(self, actions):
        self.at += len(actions[0])
        forms = (
            {"text": "red <image> and <image> ?", "images": [self.next(), self.next()]},
            Shown("green", (Image.open(io.BytesIO(self.next())),)),
            "no image",
        )
        return forms[self.at % 3], 1.0, False
"""


@pytest.fixture(scope="module", params=vision.KINDS)
def folder(request, tmp_path_factory) -> Path:
    return vision.make_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def engine(request, folder, tmp_path_factory):
    keys = ["prompt_length=128", "response_length=128", "dtype=float32", f"name={request.param}"]
    output, model = tmp_path_factory.mktemp("run"), f"actor_rollout_ref.model.path={folder}"
    cfg = load_config(
        ["data.dataset_type=vlm", model, f"trainer.output_dir={output}", *(f"{ROLLOUT}.{k}" for k in keys)]
    )
    plan = ModelPlan(
        "agent_0.rollout",
        0,
        "rollout",
        request.param,
        "lm",
        False,
        (0,),
        ParallelDims(1),
        "rollout_actor",
        (),
    )
    made = make_rollout_engine(plan, cfg, None, torch.device("cpu"))
    made.load_weights(load_file(folder / "model.safetensors").items(), 3)
    yield made
    made.close()


def speaker_of(folder: Path, policy, tools=None) -> Speaker:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer = ChatRenderer(tokenizer, {}, (), ImageReader(str(folder)))
    params = SamplingParams(max_tokens=8, temperature=HOT, stop_token_ids=(vision.EOS,))
    return Speaker(policy, params, renderer, Limits(400, 400), tools=tools)


def check_rows(folder: Path, played) -> list[int]:
    """Each row is one context whose log-probs are Hugging Face's; how many images it has."""
    reference, reader, counts = vision.hf_model(folder), ImageReader(str(folder)), []
    for one in played:
        assert one.kind is None, one.episode.error
        (row,) = one.contexts[0].rows
        shown = [image for message in one.episode.messages for image in message.images]
        assert list(row.seen.images) == shown
        ids = row.prompt_ids + row.ids
        for image, start in zip(*row.seen, strict=True):
            end = start + reader.num_tokens(image)
            assert ids[start - 1] == 4 and ids[start:end] == [vision.IMAGE] * (end - start) and ids[end] == 5
        counts.append(len(shown))
        if vision.TWIN in row.ids[:-1]:
            continue
        with torch.no_grad():
            inputs = vision.hf_inputs(folder, row.prompt_ids, row.ids, *row.seen)
            logits = reference(**inputs).logits[0, len(row.prompt_ids) - 1 : -1]
        wanted = torch.log_softmax(logits / HOT, -1).gather(-1, torch.tensor(row.ids)[:, None])[:, 0]
        own = torch.tensor(row.assistant_mask)
        assert sum(row.assistant_mask) >= TURNS
        assert float((wanted - torch.tensor(row.log_probs))[own].abs().max()) < 1e-5
    return counts


def test_episodes_with_an_image_each_turn_are_what_hugging_face_says_of_the_whole(engine, folder, tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    images = [vision.SMALL, vision.WIDE, vision.TALL, vision.OTHER]
    make_env = load_environment(f"{tmp_path}/world.py:Gallery", "env_path", {"images": images})
    stages = [
        stage("talk", 0, following="game"),
        stage("game", None, back_to="talk", max_turns=TURNS - 1, following="last"),
        stage("last", 0),
    ]
    with StreamClient(engine.stream, engine.name, 60.0) as policy:
        speaker = speaker_of(folder, policy)
        speakers = {"talk": speaker, "last": speaker}
        played = play(stages, speakers, make_env=make_env, num_episodes=NUM_EPISODES)
    counts = check_rows(folder, played)
    assert len(set(counts)) > 1 and min(counts) >= 1
    spoken = [row.ids for one in played for row in one.contexts[0].rows]
    assert len({tuple(ids) for ids in spoken}) == NUM_EPISODES


class Camera:
    """A tool of two calls: an image beside a text, and one alone."""

    schema: ClassVar = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    num = 0

    def __call__(self, arguments, episode):
        self.num += 1
        image = base64.b64decode(vision.WIDE if self.num % 2 else vision.TALL)
        return Shown("white", (image,)) if self.num % 2 else [{"type": "image", "image": image}]


def test_a_tools_images_are_read_before_the_next_turn(engine, folder):
    calls = iter(range(10**6))

    class Calling:
        """Finds a call in the first turns of an episode, whatever they say."""

        def __call__(self, text):
            from siirl.dialect.tool_formats import Parsed, ToolCall

            return Parsed(text, [ToolCall("look", {})] if next(calls) % TURNS < TURNS - 1 else [])

    use = ToolUse(Toolbox({"look": Camera()}), Calling(), ToolLimits(sees=True), 9)
    with StreamClient(engine.stream, engine.name, 60.0) as policy:
        played = play([stage("talk", 0)], {"talk": speaker_of(folder, policy, use)}, num_episodes=1)
    assert check_rows(folder, played) == [TURNS - 1]


def asking(session) -> float:
    """A program whose messages have the images of its row, and others from turn to turn."""
    messages: list[dict] = []
    for turn in range(TURNS):
        shown = (vision.WIDE, vision.TALL, vision.OTHER)[(turn + session.task["seed"]) % 3 :]
        urls = [{"url": f"data:image/png;base64,{image}"} for image in shown]
        parts = [{"type": "image_url", "image_url": url} for url in urls]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": "colour ?"}]})
        head = {"Authorization": f"Bearer {session.api_key}"}
        body = json.dumps({"model": "a", "messages": messages}).encode()
        with urlopen(Request(f"{session.base_url}/chat/completions", body, head)) as answer:
            messages.append(json.load(answer)["choices"][0]["message"])
    return 1.0


def test_requests_of_a_program_with_images_are_what_hugging_face_says_of_the_whole(engine, folder):
    endpoint = Endpoint(starter(asking), ProgramLimits(120.0, 64, 8))
    try:
        with StreamClient(engine.stream, engine.name, 60.0) as policy:
            game = game_of({"a": speaker_of(folder, policy)}, Programs(endpoint, None, False))
            played = run_all(game, [episode(number) for number in range(3)], [[]] * 3)
    finally:
        endpoint.close()
    assert sorted(check_rows(folder, played)) == [6, 6, 6]
    assert all(sum(one.contexts[0].rows[0].rewards) == 1.0 for one in played)
