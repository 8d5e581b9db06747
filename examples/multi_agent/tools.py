"""The tool of planner_worker, how its calls are written, and what the worker gets to see."""

from siirl.agents.tool_parsers import MalformedCall, Parsed, ToolCall

OPERATIONS = {
    "plus": lambda a, b: a + b,
    "minus": lambda a, b: a - b,
    "times": lambda a, b: a * b,
    "over": lambda a, b: a // b,
}


def compute(operation, episode):
    """The operation on the two numbers of the task."""
    a, b = episode.task["extra_info"]["numbers"]
    result = OPERATIONS[operation](a, b)
    episode.state["result"] = result
    return str(result)


def first_word_is_a_call(text):
    """A turn "call times" calls the tool; any other first word than "call" is just said."""
    words = text.split()
    if not words or words[0] != "call":
        return Parsed(text)
    if len(words) == 1:
        return Parsed("", (MalformedCall("write: call OPERATION"),))
    return Parsed("", (ToolCall("compute", {"operation": words[1]}),))


def pre_process(messages, episode):
    """The worker does not see the story, only what the planner makes of it, and its own turns."""
    return messages[1:]
