"""docs/constructs.md says what the table says."""

from .page import PAGE, page


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "run `python -m tests.constructs.page`"
