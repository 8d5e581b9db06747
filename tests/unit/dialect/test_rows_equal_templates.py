"""Rows are what a chat template makes of their messages: random conversations under real templates.

Every prompt that an agent reads equals the template's own rendering of the conversation, in the same row or
in a new one where the template rewrites what the row holds; or the template refuses it, as listed.
"""

import logging
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pytest
from template_cases import OWN, TemplateTokenizer, dialect_of
from test_dialect import CHATML, tokenizer_of
from transformers import AutoTokenizer

from siirl.agents.contexts import Context, Limits
from siirl.agents.message_form import MessageForm
from siirl.agents.renderer import IMAGES, ChatRenderer
from siirl.agents.shown import content_of, images_in
from siirl.config import load_config
from siirl.data.completions import Completion
from siirl.data.image_reader import ImageReader
from siirl.data.prompt_lengths import PromptLengths
from siirl.dialect.template import SHOW_TOOLS, ChatTemplate, TemplateRefused
from siirl.dialect.tool_formats import tool_parser
from siirl.errors import DataError, EpisodeFailed

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "chat_templates"
REAL = {str(path.relative_to(FOLDER))[:-6]: path for path in sorted(FOLDER.glob("*/*.jinja"))}
TEMPLATES = {**OWN, **REAL}
GEMMA = Path(os.environ.get("SIIRL_TEST_GEMMA") or FOLDER.parent / "gemma_tokenizer")
"""A directory with the tokenizer of Gemma 3."""
IMAGE_MARK = re.compile(
    r"<\|(?:image|image_pad|patch|media_pad|IMG_PATCH|kimi_image_placeholder)\|>|\[IMG\]|<image>|<im_patch>"
    r"|<start_of_image>|<image_soft_token>|\]<\]image\[>\[|<REKA_IMG_TOKEN>"
)
"""What templates write where an image is."""
WITHOUT = {
    "llamacpp/CohereForAI-c4ai-command-r-plus-tool_use": "'NoneType' object is not iterable",
    "llamacpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "'NoneType' object is not iterable",
    "llamacpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "'NoneType' object is not iterable",
    "llamacpp/fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
}
"""Templates that refuse every conversation without tools, and what they say."""
WITH = {
    "llamacpp/fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "llamacpp/llama-cpp-deepseek-r1": "not JSON serializable",
}
"""Those that refuse every one with tools."""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string", "description": "what"},
                "n": {"type": "integer", "description": "how many"},
            },
            "required": ["q"],
        },
    },
}
THOUGHT = "I think so."


class Talk:
    """A conversation of a user, tools, and a model that says what its template would write."""

    def __init__(self, name, seed, tools, options, mark=None, tokenizer=None):
        """mark: of an image; None: there are none. tokenizer: None: of the characters of the template."""
        self.rng, more = random.Random(seed), () if mark is None else (mark,)
        self.tokenizer = tokenizer or TemplateTokenizer(source_of(name), name, more)
        self.dialect = dialect_of(self.tokenizer, options)
        self.places = None if mark is None else Places(*self.tokens_of(mark))
        self.renderer = ChatRenderer(self.tokenizer, options, tools, self.places, self.dialect)
        self.tools, self.parse = tools, tool_parser("auto", dialect=self.dialect.tool_format)
        self.context = Context(self.renderer, Limits(100_000, 100_000))
        system = [{"role": "system", "content": "Be brief."}] * self.rng.randrange(2)
        self.num_seen = self.num_refused = 0
        self.truth = [*system, {"role": "user", "content": self.with_images("What is 2+2?")}]
        self.shown = [dict(message) for message in self.truth]
        self.written: dict[int, str | None] = {}
        """Of each turn what the template writes; None: it writes another beginning than the prompt."""
        self.num_equal = self.num_same = 0
        """Prompts whose text is the template's, and whose tokens are those of its text."""

    def tokens_of(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def with_images(self, text):
        """A text, with images of one to three tokens in it where the model sees any."""
        count = self.rng.choice([0, 1, 1, 2]) if self.places else 0
        images = [f"{self.rng.randrange(1, 4)}" for _ in range(count)]
        for _ in images:
            at = self.rng.choice([0, len(text), text.find(" ") + 1])
            text = f"{text[:at]}<image>{text[at:]}"
        return content_of(text, images)

    def rendered(self, messages, generation):
        """What the template itself makes of messages; roles that it does not know are the user's."""
        return self.renderer.form.text(self.renderer._roles(messages), generation)

    def check(self, opening):
        """The prompt is the template's; words that were not canonical count as those that are."""
        try:
            wanted = self.rendered(self.truth, True)
        except TemplateRefused:
            return  # read as users and assistants in turn, which the log says
        row, read = opening.row, opening.read.tokens
        tokens, turns = opening.tokens, [*[-1] * len(row.prompt_ids), *row.turn_ids, *[-1] * len(read)]
        if self.places:
            assert list(opening.seen.images) == images_in(self.truth)
            tokens, turns = self.places.once(tokens, turns, opening.seen)
            self.num_seen += len(opening.seen.images)
        self.num_same += tokens == self.tokens_of(wanted)
        pattern, at = "", 0
        while at < len(tokens):
            end = next((i for i in range(at, len(tokens)) if turns[i] != turns[at]), len(tokens))
            text = self.written[turns[at]] if turns[at] >= 0 else self.tokenizer.decode(tokens[at:end])
            pattern += ".*?" if text is None else re.escape(text)
            at = end
        if re.fullmatch(pattern, wanted, re.DOTALL) is None:
            got = self.tokenizer.decode(opening.tokens)
            same = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(got))
            got, wanted = (text[max(0, same - 60) : same + 99] for text in (got, wanted))
            raise AssertionError(f"got ...{got!r}, wanted ...{wanted!r}")
        self.num_equal += 1

    def speak(self, opening, calls):
        """One turn; the number of its calls."""
        turn = len(self.written)
        message = self.message(opening, calls, turn)
        whole = self.accepted(message)
        calls = len(message.get("tool_calls", ()))
        prompt = opening.text or self.renderer.opened(opening.spelled)
        said, exact = self.said(whole, prompt, message)
        tokens = self.tokens_of(said)
        stops = [i for i, token in enumerate(tokens) if token in self.dialect.stop_ids]
        if stops:
            tokens = tokens[: stops[0] + 1]
            text = self.tokenizer.decode(tokens)
        else:  # no token ends turns in the template
            text = said.removesuffix(self.renderer._turn_end_text())
            tokens = [*self.tokens_of(text), self.tokenizer.eos_token_id]
        raw = self.tokenizer.decode(tokens[:-1])
        if calls and self.renderer.takes_calls and "look" not in raw:  # it has stopped before
            del message["tool_calls"]
            calls = 0
        elif calls and message["content"] not in raw:
            message["content"] = ""
        if calls and self.rng.random() < 0.3:  # as models write JSON
            tokens = [*self.tokens_of(raw.replace('": ', '":  ')), tokens[-1]]
        self.written[turn] = text if exact else None
        generated = Completion(tokens, [0.0] * len(tokens), "stop", 0)
        self.context.speak(opening, generated, turn, parse=self.parse if self.tools else None)
        for call, id in zip(message.get("tool_calls", ()), self.context.own_turns[turn].ids, strict=False):
            call["id"] = id  # some models name their calls
        self.truth.append(message)
        self.shown = list(opening.row.shown)
        return calls

    def message(self, opening, calls, turn):
        """What the model means to say."""
        message = {
            "role": "assistant",
            "content": self.rng.choice(["It is 4.", "ok", "{4}", "Four\n\nor so"]),
        }
        marks, prompt = self.dialect.reasoning, self.tokenizer.decode(opening.tokens).rstrip()
        if marks and marks.key and not prompt.endswith(marks.end) and self.rng.random() < 0.6:
            message[marks.key] = THOUGHT
        if calls and self.renderer.takes_calls:
            message["content"] = self.rng.choice(["", "", "Let me see."])
            message["tool_calls"] = [
                {
                    "id": f"c{turn:06d}{index:02d}",
                    "type": "function",
                    "function": {
                        "name": "look",
                        "arguments": {"q": self.rng.choice(["x y", "ü"]), "n": turn},
                    },
                }
                for index in range(calls)
            ]
        elif calls:
            message["content"] = f'<tool_call>{{"name": "look", "arguments": {{"n": {turn}}}}}</tool_call>'
        return message

    def accepted(self, message):
        """The conversation with a message, which loses what the template does not take beside calls."""
        for lost in (None, "content", "tool_calls"):
            if lost == "content":
                message["content"] = ""
            elif lost in message:
                message["content"] = "No."
                del message[lost]
            try:
                whole = self.rendered([*self.truth, message], False)
            except TemplateRefused:
                continue
            if message["content"] in whole:
                return whole
        return None

    def said(self, whole, prompt, message):
        """What the model writes, and whether the template writes just that behind the prompt."""
        end = self.tokenizer.decode([self.dialect.end_id])
        if whole is None:
            return message["content"] + end, False
        if whole.startswith(prompt):
            return whole[len(prompt) :], True
        one, other = self.tokens_of(whole), self.tokens_of(prompt)
        pairs = enumerate(zip(one, other, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
        said, marks = self.tokenizer.decode(one[same:]), self.dialect.reasoning
        if (tail := prompt[-8:]) in said:
            said = said.rpartition(tail)[2] or message["content"] + end
        if marks and prompt.rstrip().endswith(marks.begin) and marks.end not in said:
            said = f"{THOUGHT if marks.key in message else ''}\n{marks.end}{said}"
        return said, False

    def hear(self, message):
        """Somebody else's message, without its images if the template has no places for them."""
        if self.places and not isinstance(message["content"], str):
            whole = self.renderer.opened([*self.truth, message])
            if self.tokens_of(whole).count(self.places.image_token_id) != len(
                images_in([*self.truth, message])
            ):
                with pytest.raises(EpisodeFailed) as refused:
                    self.context.begin([*self.shown, message])
                assert refused.value.kind == IMAGES
                self.num_refused += 1
                message = {**message, "content": "no image"}
        self.truth.append(message)
        self.shown.append(dict(message))


class Places(ImageReader):
    """The places of images that take as many tokens as their names say."""

    def __init__(self, image_token_id):
        self.image_token_id = image_token_id

    def num_tokens(self, image):
        return int(image)

    def once(self, tokens, turns, seen):
        """Tokens and their turns with one token for each image, of which each has its own."""
        kept = [True] * len(tokens)
        for start, image in zip(seen.starts, seen.images, strict=True):
            end = start + int(image)
            assert set(tokens[start:end]) == {self.image_token_id}
            kept[start + 1 : end] = [False] * (end - start - 1)
        pairs = [pair for pair, keep in zip(zip(tokens, turns, strict=True), kept, strict=True) if keep]
        assert [token for token, _ in pairs].count(self.image_token_id) == len(seen.images)
        return [token for token, _ in pairs], [turn for _, turn in pairs]


def source_of(name):
    source = TEMPLATES[name]
    return source if isinstance(source, str) else source.read_text()


def image_marks(name):
    """What a template writes for one image; Reka's has all its tokens, as no other does."""
    form = MessageForm(ChatTemplate(TemplateTokenizer(source_of(name), name), {}))
    text = {"type": "text", "text": THOUGHT}
    try:
        with_one, without = (
            form.text([{"role": "user", "content": [*parts, text]}]) for parts in ([{"type": "image"}], [])
        )
    except TemplateRefused:
        return []
    before = with_one.partition(THOUGHT)[0]
    return IMAGE_MARK.findall(before[-60:]) if THOUGHT in without and with_one != without else []


def converse(name, seed, tools, options=MappingProxyType({}), **more):
    """A whole conversation; how often the prompt was the template's, and how many rows restarted."""
    talk = talked(name, seed, tools, options, **more)
    return talk.num_equal, talk.context.num_rewritten


def talked(name, seed, tools, options=MappingProxyType({}), **more):
    """A whole conversation under a template."""
    talk = Talk(name, seed, tools, options, **more)
    for _ in range(talk.rng.randrange(2, 4)):
        rounds = talk.rng.randrange(3) if tools else 0
        for left in range(rounds, -1, -1):
            opening = talk.context.begin(talk.shown)
            talk.check(opening)
            calls = talk.speak(opening, talk.rng.choice([1, 1, 2]) if left else 0)
            own = talk.context.own_turns[len(talk.written) - 1]
            for id in own.ids[: calls or None] if left else ():
                answer = talk.with_images(talk.rng.choice(["4", "it is\nfour", '{"a": 1}']))
                talk.hear({"role": "tool", "content": answer, "name": "look", "tool_call_id": id})
            if not own.ids:
                break
        for _ in range(talk.rng.choice([1, 1, 1, 2])):
            talk.hear({"role": "user", "content": talk.with_images(talk.rng.choice(["And 3+3?", "go on"]))})
    talk.check(talk.context.begin(talk.shown))
    return talk


def test_check_refuses_the_pairs_that_have_no_rows_and_no_others(tmp_path):
    tokenizer = tokenizer_of(CHATML)
    tokenizer.add_special_tokens({"bos_token": "<BOS>"})
    tokenizer.save_pretrained(tmp_path)
    keys = ["actor_rollout_ref.rollout.multi_turn.enable=true", "data.max_prompt_length=100000"]
    cfg = load_config([f"actor_rollout_ref.model.path={tmp_path}", *keys])
    prompts, said = pa.chunked_array([[[{"role": "user", "content": "?"}]]]), {}
    for name in TEMPLATES:
        (tmp_path / "chat_template.jinja").write_text(source_of(name))
        told = PromptLengths.of(cfg)
        assert told is not None and told.tools
        for lengths in (told, replace(told, tools=())):
            try:
                assert not lengths.overlong(prompts)
            except DataError as error:
                said[name, bool(lengths.tools)] = str(error)
    refused = {(name, tools): why for tools in (False, True) for name, why in (WITHOUT, WITH)[tools].items()}
    refused = {pair: why for pair, why in refused.items() if pair[0] in TEMPLATES}
    assert said.keys() == refused.keys()
    for (name, tools), why in refused.items():
        assert f"refuses the prompt{' beside tools' * tools}: " in said[name, tools]
        assert why in said[name, tools]


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_prompt_is_what_the_template_makes_of_the_conversation(name, tools):
    logging.getLogger("siirl.agents.renderer").disabled = True
    refused = (WITH if tools else WITHOUT).get(name)
    if refused is not None:
        with pytest.raises(DataError, match=re.escape(refused)):
            converse(name, 0, [LOOK] if tools else [])
        return
    counts = [converse(name, seed, [LOOK] if tools else []) for seed in range(3 if name in REAL else 8)]
    assert sum(equal for equal, _ in counts) >= 3


@pytest.mark.parametrize("name", OWN)
def test_rows_with_tools_in_the_system_message_are_what_the_template_makes_of_them(name):
    logging.getLogger("siirl.agents.renderer").disabled = True
    counts = [converse(name, seed, [LOOK], {SHOW_TOOLS: "system"}) for seed in range(4)]
    assert sum(equal for equal, _ in counts) >= 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_images_stand_where_the_template_writes_them_or_are_refused(name):
    logging.getLogger("siirl.agents.renderer").disabled = True
    marks = image_marks(name)
    if len(marks) != 1:
        tokenizer = TemplateTokenizer(source_of(name), name, ((marks or ["<image>"])[0],))
        renderer = ChatRenderer(tokenizer, {}, sight=Places(*tokenizer.encode((marks or ["<image>"])[0])))
        with pytest.raises((EpisodeFailed, DataError)):
            renderer.start([{"role": "user", "content": content_of("<image>What?", ["2"])}])
        return
    talks = [talked(name, seed, [LOOK] * seed, mark=marks[0]) for seed in (0, 1)]
    assert sum(talk.num_equal for talk in talks) >= 2
    assert sum(talk.num_seen for talk in talks) >= 1


@pytest.mark.parametrize("name", [*OWN, *(name for name in REAL if "inistral" in name)])
def test_a_turn_that_says_nothing_has_a_row_after_it_and_a_new_one(name):
    logging.getLogger("siirl.agents.renderer").disabled = True
    for most in (100_000, 1):
        talk = Talk(name, 0, [], {})
        talk.context = Context(talk.renderer, Limits(100_000, most))
        opening, end = talk.context.begin(talk.shown), talk.dialect.end_id
        talk.context.speak(opening, Completion([end], [0.0], "stop", 0), 0)
        shown = [*opening.row.shown, {"role": "user", "content": "go on"}]
        text = talk.tokenizer.decode(talk.context.begin(shown).tokens)
        assert text.find("What is 2+2?") < text.find("go on")


GEMMAS = [name for name in TEMPLATES if "<start_of_turn>" in source_of(name)]


@pytest.fixture(scope="module")
def gemma():
    if not GEMMA.is_dir():
        pytest.skip("there is no tokenizer of Gemma")
    return AutoTokenizer.from_pretrained(GEMMA)


@pytest.mark.parametrize("name", GEMMAS)
def test_rows_of_gemma_are_the_very_tokens_of_what_its_templates_make_of_them(name, gemma):
    logging.getLogger("siirl.agents.renderer").disabled = True
    gemma.chat_template = source_of(name)
    talks = [talked(name, seed, [LOOK] * (seed % 2), tokenizer=gemma) for seed in range(8)]
    assert "<end_of_turn>" in {stop.text for stop in talks[0].dialect.stops}
    assert sum(talk.num_same for talk in talks) == sum(talk.num_equal for talk in talks) >= 3
