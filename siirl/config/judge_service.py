"""Group reward_model.judge: a language model that grades responses in words."""

from dataclasses import dataclass

from siirl.config.keys import key


@dataclass(frozen=True)
class JudgeConfig:
    """A generative judge: it is asked about a response, and its answer is read."""

    name: str | None = key(
        None,
        "rollout engine of a judge, which reward_model.model.path then is; null: the model has a score head",
        choices=("hf", "vllm"),
    )
    url: str | None = key(
        None, "judge behind an OpenAI-compatible service instead: .../v1/chat/completions; see also remote"
    )
    served_model: str = key("default", "name of the model that the service is asked for", when="url")
    prompt: str | None = key(
        None,
        "what the judge is asked, or a file of it, in which {prompt}, {response}, {ground_truth} and "
        "{data_source} are filled in; null: to grade from 0 to 10",
    )
    pattern: str = key(
        r"(?i)score\W{0,5}?(-?\d+(?:\.\d+)?)",
        "regular expression whose last match in the answer has the grade in its first group",
    )
    parser: str | None = key(
        None, "function in place of pattern, file.py:fn or pkg.mod:fn: answer -> grade, or None"
    )
    low: float = key(0.0, "worst grade; a lower one is malformed")
    high: float = key(10.0, "best grade; the score is (grade - low) / (high - low)")
    default_score: float = key(0.0, "score of a response whose grade is malformed or missing")
    max_tokens: int = key(512, "longest answer, in tokens", low=1)
    temperature: float = key(0.0, "sampling temperature; 0: greedy, the same answer every time", low=0)
