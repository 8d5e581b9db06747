"""What a chat template writes of calls reads back as it was given, for every template that we know."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from siirl.dialect.call_style import IDS, CallStyle, call_style, told_format, turn_of
from siirl.dialect.template import ChatTemplate
from siirl.dialect.tool_formats import TOOL_FORMATS, reads

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "chat_templates"
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Speller:
    """A tokenizer that has a chat template, and no tokens."""

    eos_token_id = None

    def __init__(self, source: str) -> None:
        self.chat_template = source

    def apply_chat_template(self, conversation: Any, tools: Any = None, **options: Any) -> str:
        del options["tokenize"]
        given = {**SPECIAL, **options}
        texts, _ = render_jinja_template(
            [conversation], tools=tools, chat_template=self.chat_template, **given
        )
        return texts[0]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(Speller(source), {})


EACH = "{% for call in m.tool_calls %}{% set f = call.function %}"
SINGLE = "{{ raise_exception('one call') if m.tool_calls | length > 1 }}"
TAGGED = "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
NINE = IDS[0]
OWN = {
    "mapping": (
        "{{ m.content }}" + EACH + '<tool_call>{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}</tool_call>{% endfor %}",
        CallStyle("hermes", True, False, True, NINE, True),
    ),
    "spelled": (
        "{{ m.content }}" + EACH + "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments }}{% endfor %}",
        CallStyle("mistral", True, True, True, NINE, True),
    ),
    "single, without text": (
        SINGLE + EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
        CallStyle("llama3_json", False, False, False, NINE, True),
    ),
    "tags": (
        "{{ m.content }}" + EACH + TAGGED + "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}"
        "</tool_call>{% endfor %}",
        CallStyle("glm", True, False, True, NINE, True),
    ),
    "tags that lose escapes": (
        "{{ m.content }}" + EACH + TAGGED + "{{ v | string | replace('\\n', ' ') }}</arg_value>{% endfor %}"
        "</tool_call>{% endfor %}",
        CallStyle("glm", True, False, True, NINE, False),
    ),
    "the name stands in the id": (
        "{{ m.content }}" + EACH + "{{ '[TOOL_CALLS]' + call.id.split('.')[1].split(':')[0] + '[ARGS]' }}"
        "{{ f.arguments | tojson }}{% endfor %}",
        CallStyle("mistral", True, False, True, IDS[1], True),
    ),
    "text only": ("{{ m.content }}", None),
    "calls that no format reads": (EACH + "CALL {{ f.name }} WITH {{ f.arguments }}{% endfor %}", None),
}  # fmt: skip


def own(turn: str) -> str:
    return (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}" + turn + "{% else %}{{ m.content }}"
        "{% endif %}<|end|>{% endfor %}"
    )


@pytest.mark.parametrize("name", OWN)
def test_the_style_of_a_template_is_found_by_what_it_writes(name):
    turn, style = OWN[name]
    assert call_style(template(own(turn))) == style


@pytest.mark.parametrize("name", [name for name, (_, style) in OWN.items() if style and style.exact])
def test_random_calls_read_back_as_a_template_was_given_them(name):
    check_calls(template(own(OWN[name][0])), OWN[name][1], name, 30)


def test_where_a_template_writes_no_calls_the_prompt_or_a_token_tells_of_the_format():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tells = "{% if tools %}Write <|tool_call|> and a list.{% endif %}" + plain
    assert told_format(template(tells), ["<tool_call>"]) == "granite"
    assert told_format(template(plain), ["<tool_call>", "<pad>"]) == "hermes"
    assert told_format(template(plain + "{{ x.append('[TOOL_CALLS]') if x }}"), ["<tool_call>"]) == "mistral"
    assert told_format(template(plain), ["<pad>"]) is None


PIECES = [
    "a",
    "two words",
    '"',
    "'",
    "\n",
    "  ",
    "\\",
    "\\n",
    "ü",
    "漢",
    "😀",
    '{"a": [1]}',
    "[1, 2]",
    "3",
    "true",
]
PIECES += [
    "null",
    "None",
    "<b>",
    "</b>",
    "&amp;",
    "`",
    "```",
    ", ",
    "=",
    ":",
    "(x)",
    "#",
    "{",
    "}",
    "\t",
    "it's",
    "%",
]
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def value(draw: random.Random, depth: int = 0) -> Any:
    match draw.randrange(7 if depth < 2 else 5):
        case 0:
            return "".join(draw.choices(PIECES, k=draw.choice((0, 1, 1, 2, 3, 5))))
        case 1:
            return draw.choice((0, 1, -7, 10**12, draw.randrange(1000)))
        case 2:
            return draw.choice((0.5, -1.25, 1e-7, 3.0, 1e22))
        case 3:
            return draw.choice((True, False))
        case 4:
            return None
        case 5:
            return [value(draw, depth + 1) for _ in range(draw.randrange(3))]
        case _:
            return {
                draw.choice(("k", "key_2", "x-y")): value(draw, depth + 1) for _ in range(draw.randrange(3))
            }


def a_call(draw: random.Random, number: int) -> tuple[tuple[str, dict[str, Any]], dict[str, Any]]:
    """A call, and the schema of its tool."""
    name = draw.choice(("f", "look_up", "get-it", "Find2")) + str(number)
    names = draw.sample(("q", "n", "some_arg", "l", "o"), draw.randrange(5))
    arguments = {key: value(draw) for key in names}
    more = {list: {"items": {}}, dict: {"additionalProperties": {"type": "string"}}}
    properties = {
        key: {"type": KINDS.get(type(item), "integer"), "description": ".", **more.get(type(item), {})}
        for key, item in arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": ".", "parameters": parameters}
    return (name, arguments), {"type": "function", "function": function}


def check_calls(chat: ChatTemplate, style: CallStyle, seed: str, count: int) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        drawn = [a_call(draw, number) for number in range(draw.randint(1, 3) if style.several else 1)]
        calls, tools = [call for call, _ in drawn], [tool for _, tool in drawn]
        written = turn_of(chat, style.message(calls, draw.choice(("", "Let me see."))), tools)
        parsed = TOOL_FORMATS[style.format](written)
        assert reads(parsed, calls, {tool["function"]["name"]: tool for tool in tools}), (
            calls,
            written,
            parsed,
        )
        assert ("Let me see." in parsed.content) == (style.keeps_text and "Let me see." in written)


WRITTEN = {
    "apertus": "llamacpp/Apertus-8B-Instruct",
    "command_a": (
        "axolotl/command_a_rag axolotl/command_a_tool_use llamacpp/Cohere2MoE "
        "llamacpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use"
    ),
    "command_r": "llamacpp/CohereForAI-c4ai-command-r-plus-tool_use",
    "deepseek_dsml": (
        "llamacpp/deepseek-ai-DeepSeek-V3.2 llamacpp/deepseek-ai-DeepSeek-V4 "
        "llamacpp/deepseek-ai-DeepSeek-V4-Flash-0731"
    ),
    "deepseek_v3": (
        "axolotl/deepseek_v3 llamacpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B "
        "llamacpp/deepseek-ai-DeepSeek-V3.1 llamacpp/llama-cpp-deepseek-r1 trl/deepseekv3"
    ),
    "functionary_v31": "llamacpp/meetkai-functionary-medium-v3.1",
    "functionary_v32": "llamacpp/meetkai-functionary-medium-v3.2",
    "gemma4": (
        "axolotl/gemma4 axolotl/gemma4_unified llamacpp/google-gemma-4-31B-it "
        "llamacpp/google-gemma-4-31B-it-interleaved trl/diffusion_gemma trl/gemma4 trl/gemma4_v2 "
        "trl/gemma4_v3 trl/gemma4_v4 trl/gemma4_v5"
    ),
    "gigachat": "llamacpp/GigaChat3-10B-A1.8B llamacpp/GigaChat3.1-10B-A1.8B",
    "glm": (
        "llamacpp/GLM-4.6 llamacpp/GLM-4.7-Flash llamacpp/Spark2.5 llamacpp/inclusionai-ling-3.0-flash "
        "llamacpp/poolside-Laguna-S-2.1 llamacpp/poolside-Laguna-XS-2.1 llamacpp/poolside-Laguna-XS.2 "
        "trl/glm4moe"
    ),
    "gpt_oss": "llamacpp/openai-gpt-oss-120b trl/gptoss",
    "hermes": (
        "axolotl/exaone4 axolotl/qwen3 axolotl/qwen3_5 axolotl/qwen_25 llamacpp/Bielik-11B-v3.0-Instruct "
        "llamacpp/MiMo-VL llamacpp/NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use llamacpp/Qwen-QwQ-32B "
        "llamacpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use llamacpp/Qwen-Qwen2.5-7B-Instruct "
        "llamacpp/Qwen-Qwen3-0.6B llamacpp/Reka-Edge llamacpp/ibm-granite-granite-4.0 "
        "llamacpp/ibm-granite-granite-4.1 trl/qwen2_5 trl/qwen3 trl/qwen3_instruct_2507 trl/qwen3_vl"
    ),
    "hy3": "llamacpp/tencent-Hy3",
    "kimi_k2": "llamacpp/moonshotai-Kimi-K2",
    "kimi_k3": "llamacpp/Kimi-K3",
    "lfm2": "llamacpp/LFM2.5-8B-A1B trl/lfm2_2_5 trl/lfm2_2_5_v2 trl/lfm2_2_5_vl trl/lfm2_v2",
    "llama3_json": (
        "axolotl/llama3_2_vision axolotl/llama4 llamacpp/meta-llama-Llama-3.1-8B-Instruct "
        "llamacpp/meta-llama-Llama-3.2-3B-Instruct llamacpp/meta-llama-Llama-3.3-70B-Instruct "
        "trl/llama3_1 trl/llama3_2"
    ),
    "minicpm": "llamacpp/openbmb-MiniCPM5-1B",
    "minimax_m2": "llamacpp/MiniMax-M2",
    "minimax_m3": "llamacpp/MiniMax-M3",
    "mistral": (
        "axolotl/mistral_v2v3 axolotl/mistral_v3_tekken llamacpp/Mistral-Small-3.2-24B-Instruct-2506 "
        "llamacpp/mistralai-Ministral-3-14B-Reasoning-2512 llamacpp/mistralai-Mistral-Nemo-Instruct-2407 "
        "llamacpp/unsloth-mistral-Devstral-Small-2507"
    ),
    "muse": "llamacpp/muse-glimmer trl/muse_glimmer",
    "nemotron": "llamacpp/NVIDIA-Nemotron-Nano-v2",
    "qwen3_coder": (
        "llamacpp/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 llamacpp/Qwen3-Coder llamacpp/Qwen3.5-4B "
        "llamacpp/StepFun3.5-Flash trl/nemotron_3_5_lightning trl/nemotron_3_nano trl/nemotron_3_super "
        "trl/nemotron_3_ultra trl/qwen3_5_nothink trl/qwen3_5_think trl/qwen3_6 trl/qwen3_8"
    ),
    "seed_oss": "llamacpp/ByteDance-Seed-OSS",
    "solar": "llamacpp/upstage-Solar-Open-100B",
    "tool_calls": (
        "axolotl/jamba llamacpp/Apriel-1.6-15b-Thinker-fixed llamacpp/MiniMax-M1 llamacpp/unsloth-Apriel-1.5"
    ),
}
"""Format -> the templates that write it."""
SILENT = {
    "they write the text of a turn only": (
        "axolotl/alpaca axolotl/aya axolotl/chatml axolotl/cohere axolotl/command_a axolotl/deepseek_v2 "
        "axolotl/exaone axolotl/falcon_h1 axolotl/gemma axolotl/gemma3 axolotl/gemma3n axolotl/llama3 "
        "axolotl/llava axolotl/metharme axolotl/mistral_v1 axolotl/mistral_v7_tekken axolotl/nemotron_h "
        "axolotl/phi_3 axolotl/phi_35 axolotl/phi_4 axolotl/pixtral axolotl/qwen2_vl "
        "llamacpp/HuggingFaceTB-SmolLM3-3B llamacpp/LFM2-8B-A1B llamacpp/LFM2.5-Instruct "
        "llamacpp/deepseek-ai-DeepSeek-R1-Distill-Llama-8B llamacpp/google-gemma-2-2b-it "
        "llamacpp/ibm-granite-granite-3.3-2B-Instruct llamacpp/llama-cpp-rwkv-world "
        "llamacpp/microsoft-Phi-3.5-mini-instruct trl/cohere trl/cohere2 trl/deepseek_r1_distill "
        "trl/gemma trl/gemma3 trl/idefics3 trl/lfm2 trl/llama3 trl/llava_next trl/phi3 trl/phi3_5 "
        "trl/qwen2_5_vl trl/smolvlm"
    ),
    "transformers refuses them: they append to a list": "llamacpp/Kimi-K2-Instruct llamacpp/Kimi-K2-Thinking",
    "it needs arguments of its own, functions and datetime": "llamacpp/fireworks-ai-llama-3-firefunction-v2",
}
"""Why -> templates that write no calls."""
INEXACT = {
    "llamacpp/LFM2.5-8B-A1B": "a text stands in quotes without escapes",
    "trl/lfm2_2_5": "a text stands in quotes without escapes",
    "trl/lfm2_2_5_v2": "a text stands in quotes without escapes",
    "llamacpp/MiniMax-M3": "null is left out, and nested values have no types",
}
"""Templates whose calls lose something."""
FORMAT = {name: form for form, names in WRITTEN.items() for name in names.split()}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the templates are not there")
def test_every_template_is_known_to_write_a_format_or_none():
    found = {f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.jinja")}
    silent = [name for names in SILENT.values() for name in names.split()]
    assert len(silent) + len(FORMAT) == len({*silent, *FORMAT}) == 147
    assert found == {*silent, *FORMAT}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the templates are not there")
@pytest.mark.parametrize("name", [name for names in SILENT.values() for name in names.split()])
def test_a_template_that_writes_no_calls_is_found_to_write_none(name):
    assert call_style(template((FOLDER / f"{name}.jinja").read_text())) is None


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the templates are not there")
@pytest.mark.parametrize("name", FORMAT)
def test_random_calls_read_back_as_a_real_template_was_given_them(name):
    chat = template((FOLDER / f"{name}.jinja").read_text())
    style = call_style(chat)
    assert style is not None and (style.format, style.exact) == (FORMAT[name], name not in INEXACT)
    if style.exact:
        check_calls(chat, style, name, 30)
