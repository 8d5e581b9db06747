"""docs/tuning.md shows what its commands print today."""

import tuning_page


def test_the_page_shows_what_its_commands_print():
    """`make docs` writes it."""
    page = tuning_page.PAGE.read_text()
    assert tuning_page.with_outputs(page) == page
