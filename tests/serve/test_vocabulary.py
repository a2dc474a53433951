from tests import vocabulary


def test_committed_header_is_what_would_be_generated() -> None:
    vocabulary.check()
