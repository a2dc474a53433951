from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.splits import Split, split_of, with_split
from dynamiccl.sizes import bin_center_bytes, size_bin
from tests.rows import default, frame


@given(octave=st.integers(2, 60))
@settings(deadline=None, max_examples=60)
def test_all_bins_of_an_octave_go_together(octave: int) -> None:
    splits = {split_of(bin_center_bytes(4 * octave + quarter)) for quarter in range(4)}
    assert len(splits) == 1


@given(octave=st.integers(2, 60))
@settings(deadline=None, max_examples=60)
def test_held_out_octaves_have_training_on_both_sides(octave: int) -> None:
    split = split_of(1 << octave)
    if split is not Split.TRAIN:
        assert {split_of(1 << (octave - 1)), split_of(1 << (octave + 1))} == {Split.TRAIN}
    else:
        around = {split_of(1 << (octave - 1)), split_of(1 << (octave + 1))}
        assert around == {Split.VALIDATION, Split.TEST}


def test_octaves_are_split_as_data_sets_of_all_releases_are() -> None:
    found = "".join(split_of(1 << octave).value[:2] for octave in range(16, 24))
    assert found == "trvatrtetrvatrte"


def test_size_alone_decides() -> None:
    one = frame(default(size_bytes=1 << 21, system="a"))
    other = frame(
        *(default(float(k), size_bytes=1 << k, system="b", collective="Reduce") for k in range(30))
    )
    split = dict(with_split(other).select("size_bytes", "split").iter_rows())
    assert with_split(one)["split"].to_list() == [split[1 << 21]]


def test_bin_is_the_kernel_s() -> None:
    sizes = [1, 100, 1 << 20, (1 << 20) - 16, 3 << 30]
    rows = with_split(frame(*(default(size_bytes=size) for size in sizes)))
    assert rows["bin"].to_list() == [size_bin(size) for size in sizes]
    assert rows["split"].to_list() == [split_of(size).value for size in sizes]


def test_sizes_without_a_bin_are_dropped() -> None:
    rows = frame(default(size_bytes=0), default(size_bytes=64), default(size_bytes=1 << 62))
    assert with_split(rows)["size_bytes"].to_list() == [64]
