from tests import vocabulary


def test_committed_header_is_what_would_be_generated() -> None:
    assert vocabulary.HEADER_PATH.read_text("utf-8") == vocabulary.header_text()
