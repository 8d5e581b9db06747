"""What check says of a policy's turns."""

from siirl.dialect.dialect import Dialect, StopToken
from siirl.show.dialect_text import dialect_lines


def test_a_stop_token_of_white_space_is_seen():
    stops = (
        StopToken(1, "<eos>", ("tokenizer",)),
        StopToken(107, "\n", ("key",)),
        StopToken(9, "", ("key",)),
    )
    first, *_ = dialect_lines("agent_0", Dialect("name", stops))
    assert first == "agent_0 ends a turn by: <eos> (tokenizer), '\\n' (key), 9 (key)"
