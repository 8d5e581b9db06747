"""Problems that were found: in which order they are told."""

from siirl.errors import ConfigError, DagError, Place
from siirl.findings import Findings


def test_problems_are_told_by_place_then_by_node_in_the_order_in_which_they_were_found():
    found = Findings()
    found.add(ConfigError("a full disk"), Place.MACHINE)
    for text in ("node 'b': no model", "node 'a': no role", "node 'b': no reward"):
        found.add(DagError(text), Place.WORKFLOW)
    found.add(ConfigError("a=1: no key"), Place.COMMAND_LINE)
    found.add(ConfigError("a=1: no key"), Place.CONFIGURATION)
    assert [str(problem) for problem in found.problems] == [
        "a=1: no key",
        "node 'b': no model",
        "node 'b': no reward",
        "node 'a': no role",
        "a full disk",
    ]
