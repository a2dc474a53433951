"""However bytes arrive, the lines are the same."""

from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.processes.output_lines import Line, LineSplitter

PIECES = st.lists(st.binary(max_size=12) | st.sampled_from([b"\n", b"\r\n", b"a\nb", b"\xc3"]))


def lines(chunks: list[bytes], max_bytes: int) -> list[str]:
    splitter = LineSplitter(max_bytes)
    found = [line.text for chunk in chunks for line in splitter.feed(chunk, 1.0)]
    return found + [line.text for line in splitter.close(2.0)]


@given(PIECES, st.integers(1, 30))
def test_how_bytes_are_cut_into_chunks_does_not_matter(chunks: list[bytes], most: int) -> None:
    assert lines(chunks, most) == lines([b"".join(chunks)], most)


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"))))
def test_text_comes_back_as_it_was(texts: list[str]) -> None:
    whole = "".join(f"{text}\n" for text in texts).encode()
    assert lines([whole], 1 << 20) == texts


@given(st.lists(st.integers(0, 40)), st.integers(1, 20))
def test_what_is_dropped_is_counted(lengths: list[int], most: int) -> None:
    whole = b"".join(b"a" * length + b"\n" for length in lengths)
    wanted = ["a" * n if n <= most else f"{'a' * most} [{n - most} more bytes]" for n in lengths]
    assert lines([whole], most) == wanted


def test_a_line_has_the_time_at_which_its_end_arrived() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw", 1.0) == [Line("one", 1.0)]
    assert splitter.feed(b"o\nthree", 2.0) == [Line("two", 2.0)]
    assert splitter.close(3.0) == [Line("three", 3.0)]
