"""What a tokenizer, the files of a model and its chat template say of how it speaks."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from siirl.agents.contexts import Context, Limits
from siirl.agents.renderer import ChatRenderer
from siirl.config import load_config
from siirl.data.completions import Completion
from siirl.data.said import raw_texts
from siirl.dialect.dialect import derive, dialect_of, tool_findings, untold_tools
from siirl.dialect.file_vocabulary import FileVocabulary
from siirl.dialect.marks import KNOWN, ReasoningMarks
from siirl.dialect.parts import opens_reasoning, raw_text, read_turn
from siirl.dialect.template import ChatTemplate, clock, template_options
from siirl.dialect.tool_formats import tool_parser
from siirl.errors import ConfigError

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
CLOSED = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
KEYED = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}",
)
NEXT_ROLE = (  # a turn has no end of its own: the next one's begins
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}<|call_begin|>{{ c.function.arguments.q }}<|call|>{% endfor %}"
    "{% else %}{{ m.content }}{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>"
    "{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WORDS_ONLY = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"
DATED = "{{ strftime_now('%d %B %Y') }}" + CHATML
DROPS = CHATML.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
)


def tokenizer_of(template, added=("<|im_start|>", "<|im_end|>"), eos="<eos>"):
    """Bytes, and tokens of marks; eos None: no end of a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.model = models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    core.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("<eos>", *added)])
    found = PreTrainedTokenizerFast(tokenizer_object=core, **({"eos_token": eos} if eos else {}))
    found.chat_template = template
    return found


def derived(template, *, files=None, **options):
    tokenizer = tokenizer_of(template, **options)
    return derive(tokenizer, ChatTemplate(tokenizer, {}) if template else None, files or {})


def stops_of(dialect):
    return {stop.text: stop.sources for stop in dialect.stops}


@pytest.mark.parametrize(
    ("template", "added", "stops", "end"),
    [
        (None, (), {"<eos>": ("tokenizer",)}, "<eos>"),
        (
            CHATML,
            ("<|im_start|>", "<|im_end|>"),
            {"<eos>": ("tokenizer",), "<|im_end|>": ("template",)},
            "<|im_end|>",
        ),
        (
            NEXT_ROLE,
            ("<|user|>", "<|assistant|>"),
            {"<eos>": ("tokenizer",), "<|user|>": ("template",)},
            "<|user|>",
        ),
        (
            CALLS,
            ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|call_begin|>"),
            {"<eos>": ("tokenizer",), "<|return|>": ("template",), "<|call|>": ("family",)},
            "<|return|>",
        ),
        (WORDS_ONLY, (), {"<eos>": ("tokenizer",)}, "<eos>"),
    ],
    ids=["no_template", "chatml", "next_role", "calls", "words_only"],
)
def test_a_turn_ends_where_the_template_ends_it(template, added, stops, end):
    dialect = derived(template, added=added)
    assert stops_of(dialect) == stops
    assert next(stop.text for stop in dialect.stops if stop.id == dialect.end_id) == end


def test_a_template_whose_own_end_is_the_tokenizers_adds_no_stop():
    dialect = derived(CHATML, eos="<|im_end|>")
    assert stops_of(dialect) == {"<|im_end|>": ("tokenizer",)}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"config.json": {"eos_token_id": 3}}, {3}),
        ({"config.json": {"eos_token_id": [3, 5]}}, {3, 5}),
        ({"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": 7}}}, {7}),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [4]}}, {3, 4}),
        ({"config.json": {}, "generation_config.json": {"eos_token_id": -1}}, set()),
        ({"config.json": {"eos_token_id": True}}, set()),
    ],
)
def test_the_files_of_a_model_name_stops_one_or_several_or_none(files, ids):
    assert set(derived(None, files=files, eos=None).stop_ids) == ids


def test_a_model_without_any_end_is_a_finding():
    assert "no token ends a response" in derived(WORDS_ONLY, eos=None).findings[0]
    assert "is no token" in derived(WORDS_ONLY).findings[0]
    assert derived(CHATML).findings == ()


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (None, ReasoningMarks("<think>", "</think>")),
        (CHATML, ReasoningMarks("<think>", "</think>")),
        (THINKS, ReasoningMarks("<think>", "</think>", opened=True)),
        (CLOSED, ReasoningMarks("<think>", "</think>", closed=True)),
        (KEYED, ReasoningMarks("[THINK]", "[/THINK]", key="reasoning_content")),
    ],
    ids=["no_template", "none", "opened", "closed", "keyed"],
)
def test_reasoning_is_found_by_probing_the_template(template, marks):
    assert derived(template).reasoning == marks


@pytest.mark.parametrize(("template", "drops"), [(DROPS, True), (CHATML, False), (KEYED, False)])
def test_a_template_that_drops_earlier_reasoning_is_found(template, drops):
    assert derived(template).drops_reasoning == drops


@pytest.mark.parametrize("name", ["tools", "xml_tools", "functions"])
def test_a_template_that_shows_tools_by_any_of_their_names_is_known_and_one_that_does_not_is_said(name):
    shows = f"{{% if {name} %}}{{{{ {name}[0].function.name }}}}{{% endif %}}" + CHATML
    assert untold_tools(derived(shows)) == ""
    assert "shows no tools" in untold_tools(derived(CHATML))


def test_a_template_that_writes_the_date_is_found_and_writes_that_of_the_run():
    assert derived(DATED).dated and not derived(CHATML).dated
    options = template_options(load_config(["data.template_date=2024-02-29"]))
    text = ChatTemplate(tokenizer_of(DATED), options).render([{"role": "user", "content": "x"}])
    assert text.startswith("29 February 2024") and clock("2024-02-29")("%j") == "060"


def test_keys_add_stops_leave_sources_out_and_name_marks(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": [5, 6]}))
    rollout = "actor_rollout_ref.rollout"
    keys = [f"actor_rollout_ref.model.path={tmp_path}", f"{rollout}.stop_token_ids=[9]"]
    tokenizer = tokenizer_of(CHATML)
    everything = dialect_of(load_config(keys), tokenizer)
    assert set(everything.stop_ids) == {
        tokenizer.eos_token_id,
        5,
        6,
        9,
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    few = dialect_of(load_config([*keys, f"{rollout}.stop_sources=[config]"]), tokenizer)
    assert set(few.stop_ids) == {5, 6, 9}
    named = dialect_of(load_config([*keys, f"{rollout}.reasoning_marks=[(,)]"]), tokenizer)
    assert named.reasoning == ReasoningMarks("(", ")")
    assert dialect_of(load_config([*keys, f"{rollout}.reasoning_marks=[]"]), tokenizer).reasoning is None


@pytest.mark.parametrize("sources", ["[tokenizer,config,generation_config,template]", "[]", "[config]"])
def test_a_token_that_the_key_alone_names_is_said_and_the_models_own_end_is_not(tmp_path, sources):
    """`</answer>` is what a reward looks for; the model's own end is none of its words, whoever names it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = tokenizer_of(CHATML)
    seven, own = tokenizer.convert_tokens_to_ids("7"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    rollout = "actor_rollout_ref.rollout"
    keys = [f"actor_rollout_ref.model.path={tmp_path}", f"{rollout}.stop_sources={sources}"]
    dialect = dialect_of(load_config([*keys, f"{rollout}.stop_token_ids=[{seven},{own}]"]), tokenizer)
    asked = [{"role": "user", "content": "3"}]
    for end, text in {seven: "57", own: "5"}.items():
        ids = [tokenizer.convert_tokens_to_ids("5"), end]
        assert raw_text(dialect, tokenizer, ids) == text
        assert raw_texts(dialect, tokenizer, [ids]) == [text]
        context = Context(ChatRenderer(tokenizer, {}, dialect=dialect), Limits(50, 50))
        assert context.speak(context.begin(asked), Completion(ids, [-1.0, -1.0], "stop", 0), 0) == text
        chat = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": "4"}]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert context.begin(chat).tokens == whole  # the row goes on as the template writes it


THINK, GPT_OSS = KNOWN[0], next(x for x in KNOWN if x.begin.startswith("<|channel|>"))
COHERE = next(x for x in KNOWN if x.answer[0] == "<|START_RESPONSE|>")
THOUGHT = "<|END_THINKING|><|START_RESPONSE|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("marks", "text", "opened", "reasoning", "answer", "closed"),
    [
        (THINK, "4", False, None, "4", True),
        (THINK, "<think>5</think>4", False, "5", "4", True),
        (THINK, "5</think>4", True, "5", "4", True),
        (THINK, "<think>5</think>4", True, "5", "4", True),  # writes the mark once more
        (THINK, "5</think>4", None, "5", "4", True),  # perhaps the prompt has opened it
        (THINK, "<think>5</think>4", None, "5", "4", True),
        (THINK, "4", None, None, "4", True),
        (THINK, "5</think>4", False, None, "5</think>4", True),
        (THINK, r"<think>\boxed{4}", False, r"\boxed{4}", "", False),
        (THINK, r"\boxed{4}", True, r"\boxed{4}", "", False),
        (THINK, "", True, "", "", False),
        (THINK, "a<think>b</think>c", False, "b", "a\n\nc", True),
        (THINK, "<think>a</think>4<think>b", False, "a\n\nb", "", False),
        (ReasoningMarks("[THINK]", "[/THINK]"), "[THINK]5[/THINK]4", False, "5", "4", True),
        (GPT_OSS, f"<|channel|>analysis<|message|>x is 5<|end|>{FINAL}4", False, "x is 5", "4", True),
        (GPT_OSS, "<|channel|>final<|message|>4", False, None, "4", True),
        (GPT_OSS, "<|channel|>analysis<|message|>x", False, "x", "", False),
        (
            COHERE,
            "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
            False,
            "x",
            "4",
            True,
        ),
        (None, "<think>5</think>4", False, None, "<think>5</think>4", True),
    ],
)
def test_a_turn_is_split_into_reasoning_and_answer(marks, text, opened, reasoning, answer, closed):
    said = read_turn(dataclasses.replace(derived(None), reasoning=marks), text, opened)
    assert (said.raw, said.reasoning, said.answer, said.closed) == (text, reasoning, answer, closed)


@pytest.mark.parametrize(
    ("marks", "prompt_end", "opens"),
    [
        (THINK, "assistant\n<think>", True),
        (THINK, "assistant\n<think>\n\n", True),
        (THINK, "<think>a</think>b assistant\n<think>\n", True),
        (THINK, "assistant\n", False),
        (THINK, "assistant\n<think>\n\n</think>\n\n", False),
        (THINK, "user says <think> and </think> assistant\n", False),
        (THINK, "user says <think> assistant\n", None),
        (THINK, "", False),
        (ReasoningMarks("[THINK]", "[/THINK]"), "assistant\n<think>\n", False),
        (None, "assistant\n<think>\n", False),
    ],
)
def test_a_prompt_opens_reasoning_by_a_mark_at_its_end_alone(marks, prompt_end, opens):
    assert opens_reasoning(dataclasses.replace(derived(None), reasoning=marks), prompt_end) is opens


def test_calls_that_reasoning_mentions_are_none():
    dialect, call = derived(THINKS), '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    hermes = tool_parser("hermes")
    assert read_turn(dialect, f"{call}</think>4", dialect.opens, hermes).calls == ()
    assert [x.name for x in read_turn(dialect, f"no</think>{call}", dialect.opens, hermes).calls] == ["look"]
    assert read_turn(dialect, f"cut off {call}", dialect.opens, hermes).calls == ()


def test_only_the_stop_token_that_ended_a_turn_is_skipped_of_its_text():
    tokenizer = tokenizer_of(CHATML, added=("<|im_start|>", "<|im_end|>", "[THINK]", "[/THINK]"))
    dialect = derive(tokenizer, ChatTemplate(tokenizer, {}), {})
    ids = tokenizer.encode("[THINK]5[/THINK]4<|im_end|>", add_special_tokens=False)
    assert raw_text(dialect, tokenizer, ids) == "[THINK]5[/THINK]4"
    assert raw_text(dialect, tokenizer, ids[:-1]) == "[THINK]5[/THINK]4"
    assert raw_text(dialect, tokenizer, [*ids, ids[-1]]) == "[THINK]5[/THINK]4<|im_end|>"


@pytest.mark.parametrize(
    "template", [CHATML, THINKS, CLOSED, KEYED, NEXT_ROLE, CALLS, WORDS_ONLY, DATED, DROPS, None]
)
def test_the_files_alone_say_what_transformers_says(template, tmp_path):
    tokenizer = tokenizer_of(
        template, added=("<|im_start|>", "<|im_end|>", "<|user|>", "<|return|>", "<|call|>")
    )
    tokenizer.save_pretrained(tmp_path)
    files = FileVocabulary(tmp_path)
    both = [derive(x, ChatTemplate(x, {}) if template else None, {}) for x in (tokenizer, files)]
    assert dataclasses.replace(both[0], name="") == dataclasses.replace(both[1], name="")
    assert files.encode("a<|im_end|>") == tokenizer.encode("a<|im_end|>")


STOPS_OF_FAMILIES = {
    "qwen3": {"<|im_end|>"},
    "gemma2": {"<eos>", "<end_of_turn>"},
    "gemma3": {"<eos>", "<end_of_turn>"},
    "gemma4": {"<eos>", "<turn|>", "<|tool_response>"},
    "phi3.5": {"<|endoftext|>", "<|end|>"},
    "glm-4.5/4.6": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "glm-4.7": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "gpt-oss": {"<|return|>", "<|call|>"},
    "llama3.1": {"<|eot_id|>", "<|eom_id|>"},
    "kimi-k2": {"[EOS]", "<|im_end|>"},
    "falcon-h1": {"<|end_of_text|>", "<|im_end|>"},
    "mistral-nemo": {"</s>"},
    "minimax-m2": {"[e~["},
    "command-r7b": {"<|END_OF_TURN_TOKEN|>"},
}
"""What ends a turn of these families, by their published files."""
OPENED = {
    "qwen3.5-think",
    "qwen3.6",
    "r1-distill",
    "deepseek-v3",
    "glm-4.7",
    "minimax-m2",
    "nemotron3",
    "ling3",
}


@pytest.mark.skipif(
    not (CASES / "families.py").is_file(), reason="the folder of real chat templates is not here"
)
def test_real_families_stop_where_they_do_and_open_reasoning_where_they_do(tmp_path):
    spec = importlib.util.spec_from_file_location("families", CASES / "families.py")
    families = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    opened = set()
    for name in families.F:
        tokenizer = families.tok(name)
        dialect = derive(tokenizer, ChatTemplate(tokenizer, {}), {})
        if name in STOPS_OF_FAMILIES:
            assert {stop.text for stop in dialect.stops} == STOPS_OF_FAMILIES[name], name
        opened |= {name} if dialect.reasoning.opened else set()
    assert opened == OPENED


STRICT = CHATML.replace(
    "<|im_start|>", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<|im_start|>", 1
)
LOOK = {"type": "function", "function": {"name": "look", "description": "Über", "parameters": {}}}
BE_BRIEF = {"role": "system", "content": "Be brief."}
IN_PARTS = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "messages", "before"),
    [
        (CHATML, [{"role": "user", "content": "?"}], "<|im_start|>system\n# Tools"),
        (CHATML, [BE_BRIEF, {"role": "user", "content": "?"}], "<|im_start|>system\nBe brief.\n\n# Tools"),
        (STRICT, [{"role": "user", "content": "?"}], "<|im_start|>user\n# Tools"),
        (
            IN_PARTS,
            [{"role": "user", "content": [{"type": "text", "text": "?"}]}],
            "<|im_start|>system\n# Tools",
        ),
    ],
)
def test_tools_that_no_template_shows_are_told_of_in_the_system_message(template, messages, before):
    cfg = load_config(["actor_rollout_ref.rollout.multi_turn.show_tools=system"])
    told = ChatTemplate(tokenizer_of(template), template_options(cfg))
    text = told.prompt(messages, [LOOK])
    assert text.startswith(before) and '"name": "look"' in text and "Über" in text and "?<|im_end|>" in text
    dialect = derive(told.tokenizer, told, {})
    assert (dialect.tools_by, dialect.tool_format, untold_tools(dialect)) == ("system message", "hermes", "")
    assert told.prompt(messages) == ChatTemplate(told.tokenizer, {}).prompt(messages)  # of no tools: nothing
    example = text[text.rindex("<tool_call>") : text.rindex("</tool_call>") + len("</tool_call>")]
    (call,) = tool_parser("hermes")(example).calls
    assert set(call.arguments) == {"the name of an argument"}


WRITES = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}</tool_call>{% endfor %}{% endif %}'
)
EXACT = WRITES.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
LOSSY = WRITES.replace(
    "ARGUMENTS", '{{ "{" }}"q": "{{ c.function.arguments.q }}", "n": {{ c.function.arguments.n }}{{ "}" }}'
)


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ("{{ m.content }}" + EXACT, []),
        ("{{ m.content }}" + LOSSY, ["lose some arguments"]),
        ("{% if not m.tool_calls %}{{ m.content }}{% endif %}" + EXACT, ["calls without what is said"]),
        (
            "{{ m.content }}" + EXACT.replace("m.tool_calls %}<", "m.tool_calls[:1] %}<"),
            ["turns of one call alone"],
        ),
    ],
    ids=["exact", "lossy", "no_text", "one"],
)
def test_what_a_template_loses_of_calls_is_told_to_who_has_tools(turn, told):
    found = list(tool_findings(derived("{{ tools }}" + CHATML.replace("{{ m.content }}", turn))))
    assert len(found) == len(told) and all(x in y for x, y in zip(told, found, strict=True)), found


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("Parsed(text, [ToolCall('look_up', {})])", None),
        ("Parsed(text)", "reads no call"),
        ("{}['no']", "raised KeyError: 'no' for a call"),
        ("[text]", "returned list, not a Parsed"),
    ],
)
def test_a_format_that_does_not_read_what_the_template_writes_is_told(tmp_path, returned, told):
    (tmp_path / "mine.py").write_text(
        f"from siirl.dialect.tool_formats import Parsed, ToolCall\n\ndef read(text):\n    return {returned}\n"
    )
    dialect = derived("{{ tools }}" + CHATML.replace("{{ m.content }}", "{{ m.content }}" + EXACT))
    try:
        found = list(tool_findings(dialect, f"{tmp_path}/mine.py:read"))
    except ConfigError as error:
        found = [str(error)]
    assert found == [] if told is None else told in found[0], found
    assert "reads hermes" in next(tool_findings(dialect, "mistral"))
    assert not list(tool_findings(dialect, "hermes"))
