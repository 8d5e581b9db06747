"""Parameters of requests, by name: which act, which change nothing, which are refused and why. Pure.

Sources of the names: the API references of OpenAI and Anthropic, and vLLM's, whose servers take more. A name
that stands in no table is refused: nobody could say what it would have changed.
"""

import json
from collections.abc import Mapping
from typing import Any

from siirl.agents.outside.content import BadRequest


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


TEMPLATE = "the run says what its chat template is given (data.apply_chat_template_kwargs)"
ENDS = "a turn ends where the policy ends it, or at `stop`"
CONSTRAINED = "what is sampled is trained on as the policy's own, without a mask"
SAMPLED_ALONE = "of each token the log-prob of the one that was sampled is known, and no other's"
NOT_HERE = "there is no such thing here"
AS_READ = "what is read is trained on as it is"
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty")
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed", *PENALTIES)
"""Parameters that the run's configuration says, whatever a program asks: the log says so once."""
FREE = names(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options "
    "prompt_cache_retention prediction request_id priority cache_salt session_id stream_interval "
    "stream_options skip_special_tokens spaces_between_special_tokens inference_geo cache_control betas "
    "diagnostics workspace_id user_profile_id billing_policy access_programs"
)
"""Parameters on which no token and no part of an answer hangs."""
REFUSED: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("chat_template_kwargs", "documents", "mm_processor_kwargs"), ({}, TEMPLATE)),
    **dict.fromkeys(("chat_template", "reasoning_effort", "media_io_kwargs", "image"), (None, TEMPLATE)),
    "verbosity": ("medium", TEMPLATE),
    "add_generation_prompt": (True, TEMPLATE),
    "add_special_tokens": (False, TEMPLATE),
    "include_reasoning": (True, "reasoning is a part of the answer"),
    "continue_final_message": (False, "each answer is a turn of its own"),
    **dict.fromkeys(("stop_token_ids", "bad_words"), ([], ENDS)),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output"), (False, ENDS)),
    **dict.fromkeys(("thinking_token_budget", "repetition_detection", "max_tool_calls"), (None, ENDS)),
    "min_tokens": (0, ENDS),
    **dict.fromkeys(("structured_outputs", "allowed_token_ids", "logits_processors"), (None, CONSTRAINED)),
    **{f"guided_{kind}": (None, CONSTRAINED) for kind in ("json", "regex", "choice", "grammar")},
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), (None, CONSTRAINED)),
    "response_format": ({"type": "text"}, CONSTRAINED),
    "output_config": (None, CONSTRAINED),
    "logit_bias": ({}, "log-probs would not be the policy's"),
    **dict.fromkeys(("watermarking", "vllm_xargs"), (None, "log-probs would not be the policy's")),
    "parallel_tool_calls": (True, "the policy decides how often it calls"),
    "best_of": (1, "as many answers are sampled as are given: `n`"),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (False, "answers are sampled")),
    "echo": (False, "an answer is what was sampled"),
    "suffix": (None, "an answer follows its prompt"),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side", "context_management"), (None, AS_READ)),
    **dict.fromkeys(("compaction", "mm_payload", "prompt_embeds"), (None, AS_READ)),
    "truncation": ("disabled", AS_READ),
    "top_logprobs": (0, SAMPLED_ALONE),
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids"), (None, SAMPLED_ALONE)),
    **dict.fromkeys(("functions", "function_call"), (None, "write tools and tool_choice")),
    "modalities": (["text"], "there is text only"),
    "audio": (None, "there is text only"),
    "speed": ("standard", NOT_HERE),
    "mcp_servers": ([], NOT_HERE),
    **dict.fromkeys(
        names(
            "web_search_options moderation background_options container fallbacks fallback_credit_token "
            "thread kv_transfer_params ec_transfer_params routed_experts_prompt_start "
            "previous_input_messages"
        ),
        (None, NOT_HERE),
    ),
    **dict.fromkeys(
        names(
            "enable_response_messages return_mm_kwargs return_prompt_text return_token_offsets "
            "return_tokens_as_token_ids"
        ),
        (False, NOT_HERE),
    ),
}
"""Parameter -> (the value besides null that is taken, why no other)."""


def given(
    body: Mapping[str, Any], acts: frozenset[str], own: Mapping[str, tuple[Any, str]]
) -> tuple[str, ...]:
    """The parameters of a request that are the run's, and so change nothing.

    acts: names that the wire acts on. own: refused there, in the place of what REFUSED has. BadRequest for a
    value that is not taken, and for a name that nobody knows.
    """
    refused, unused = REFUSED | dict(own), []
    for name, value in body.items():
        if value is None or name in acts or name in FREE:
            continue
        if name in refused:
            taken, why = refused[name]
            if value != taken or isinstance(value, bool) != isinstance(taken, bool):
                raise BadRequest(f"{name} = {shown(value)}: {why}", "unsupported_parameter")
        elif name in OF_THE_RUN:
            unused.append(name)
        else:
            raise BadRequest(
                f"{shown(name)} = {shown(value)}: no parameter of this name is known here. Leave it out",
                "unknown_parameter",
            )
    return tuple(unused)


def whole_number(body: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    """The value of a parameter that is a whole number of at least 1; None: it is not given. BadRequest."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
        bound = f"from 1 to {most}" if most else "of at least 1"
        raise BadRequest(f"{name} = {shown(value)} is no whole number {bound}")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """The value of a parameter that is true or false, which is what it is by default. BadRequest."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} = {shown(value)} is neither true nor false")
    return bool(value)


MOST_STOPS = 16


def stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The texts that end a turn: one, or a list of up to MOST_STOPS. BadRequest."""
    value = body.get(name)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(x, str) and x for x in stops)
    ):
        raise BadRequest(f"{name} = {shown(value)} is neither a text nor a list of up to {MOST_STOPS} texts")
    return tuple(stops)


def shown(value: Any) -> str:
    """A value of a request in a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
