import pytest

from dynamiccl.datasets.splits import SplitBy, Splits, with_split
from dynamiccl.errors import NotEnoughData, UnknownName
from dynamiccl.sizes import bin_center_bytes, size_bin
from tests.rows import default, frame, split_of


def test_octaves_are_split_as_data_sets_of_all_releases_are() -> None:
    found = "".join(split_of(1 << octave).value[:2] for octave in range(16, 24))
    assert found == "trvatrtetrvatrte"
    for octave in range(16, 24):  # each is held out whole
        quarters = {split_of(bin_center_bytes(4 * octave + each)) for each in range(4)}
        assert quarters == {split_of(1 << octave)}
    # The size alone decides, by the kernel's bin; without one a row is dropped.
    sizes = [0, 1, 100, 1 << 20, (1 << 20) - 16, 3 << 30, 1 << 62]
    rows = with_split(frame(*(default(size_bytes=size, system=f"s{size}") for size in sizes)))
    assert rows["bin"].to_list() == [size_bin(size) for size in sizes[1:-1]]
    assert rows["split"].to_list() == [split_of(size).value for size in sizes[1:-1]]
    rows = frame(*(default(size_bytes=1 << k) for k in range(10, 31)))
    assert Splits.of(rows, "size:0") == Splits()
    assert Splits.of(rows, "size:1").validation[0] == "12"


def shapes(*groups: tuple[int, int], system: str = "a") -> list[dict[str, object]]:
    return [
        default(num_nodes=nodes, ranks_per_node=ranks, num_ranks=nodes * ranks, system=system)
        for nodes, ranks in groups
    ]


def test_powers_of_four_and_six_sizes_are_split_by_turns() -> None:
    for exponents in (range(10, 31, 2), range(20, 26), (12, 16, 20, 24, 26, 28)):
        rows = frame(*(default(size_bytes=1 << k) for k in exponents))
        parts = Splits.of(rows)
        split = dict(parts.assign(rows).select("size_bytes", "split").iter_rows())
        assert set(split.values()) == {"train", "validation", "test"}
        # The smallest trains, so that nothing is asked below what was learned from.
        assert split[1 << min(exponents)] == "train"
        counts = [list(split.values()).count(each) for each in ("train", "validation", "test")]
        assert counts[0] >= max(counts[1:])
    # All powers of two are split as in every release, with the test octaves taken out, too.
    rows = frame(*(default(size_bytes=1 << k) for k in range(10, 31) if k % 4 != 3))
    assert Splits.of(rows) == Splits()
    rows = frame(*(default(size_bytes=1 << k) for k in range(10, 31)))
    assert Splits.of(rows) == Splits()


def test_whole_shapes_are_held_out_and_later_ones_are_for_test() -> None:
    rows = frame(*shapes((8, 8), (2, 8), (4, 8), (16, 8)))
    parts = Splits.of(rows, "shape")
    assert parts == Splits(SplitBy.SHAPE, ("2x8", "16x8"), ("4x8",))
    assert parts.assign(rows)["split"].to_list() == ["test", "train", "validation", "train"]
    assert parts.assign(frame(*shapes((32, 4))))["split"].to_list() == ["test"]
    assert parts.text() == "every shape but 2x8, 16x8, 4x8"
    rows = frame(*shapes((2, 8), (4, 8)))
    with pytest.raises(NotEnoughData, match=r"holds out shapes, and the data have 2 \(2x8, 4x8\)"):
        Splits.of(rows, "shape")


@pytest.mark.parametrize("count", [3, 4, 7])
def test_each_value_is_held_out_in_turn(count: int) -> None:
    rows = frame(*shapes(*((nodes, 8) for nodes in range(1, count + 1))))
    parts = [Splits.of(rows, f"shape:{turn}").assign(rows) for turn in range(count)]
    tests = [set(each.filter(split="test")["num_nodes"]) for each in parts]
    assert set.union(*tests) == set(range(1, count + 1))
    assert len({frozenset(each) for each in tests}) == count
    assert all({"train", "validation"} < set(each["split"]) for each in parts)
    with pytest.raises(NotEnoughData, match=f"or take a turn from 0 to {count - 1}"):
        Splits.of(rows, f"shape:{count}")
    with pytest.raises(UnknownName, match="shape:one"):
        Splits.of(rows, "shape:one")


def test_whole_systems_and_runs_are_held_out() -> None:
    rows = frame(
        *(
            default(system=name, run=f"cycle-{name}", size_bytes=size)
            for name in "cab"
            for size in (64, 256)
        )
    )
    expected = {"a": "train", "b": "validation", "c": "test"}
    for by in ("system", "run"):
        assigned = Splits.of(rows, by).assign(rows)
        assert dict(assigned.select("system", "split").unique().iter_rows()) == expected
        assert with_split(assigned) is assigned
