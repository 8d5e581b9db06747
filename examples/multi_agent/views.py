"""What an agent gets to read of a conversation in which others see more."""


def pre_process(messages, episode, request=True, others=True):
    """request: whether it reads the prompt. others: whether it hears what they say, or only that they do."""
    seen = messages[:1] if request else []
    for message in messages[1:]:
        silent = message["role"] == "user" and not others
        seen.append({"role": "user", "content": "?"} if silent else message)
    return seen
