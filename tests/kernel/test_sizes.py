from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.sizes import MAX_SIZE_BITS, bin_center_bytes, bin_first_byte, size_bin

TOP = (1 << MAX_SIZE_BITS) - 1
LAST_BIN = size_bin(TOP)


def in_bin(size: int, index: int) -> bool:
    """Whether 2^((index-1/2)/4) <= size < 2^((index+1/2)/4), in whole numbers only."""
    if index == 0:
        return size**8 < 2
    return 1 << (2 * index - 1) <= size**8 < 1 << (2 * index + 1)


def test_small_sizes_centres_and_powers_of_two_one_by_one() -> None:
    assert all(in_bin(size, size_bin(size)) for size in range(1, 5000))
    assert all(size_bin(bin_center_bytes(index)) == index for index in range(8, LAST_BIN))
    assert all(size_bin(1 << power) == 4 * power for power in range(MAX_SIZE_BITS))
    # As NCCL's rounding to 16 bytes makes of it.
    assert all(size_bin((1 << power) - 16) == 4 * power for power in range(8, 33))


@given(index=st.integers(1, 4 * 33 - 1), step=st.integers(-2, 2))
@settings(deadline=None, max_examples=300)
def test_edges_are_exact_up_to_8_gib(index: int, step: int) -> None:
    size = bin_first_byte(index) + step
    assert size < 1 or in_bin(size, size_bin(size))


@given(size=st.integers(1, TOP - 1), step=st.integers(1, 1 << 40))
@settings(deadline=None, max_examples=200)
def test_bins_never_fall_as_sizes_grow(size: int, step: int) -> None:
    assert size_bin(size) <= size_bin(min(size + step, TOP))


@given(index=st.integers(1, LAST_BIN))
@settings(deadline=None, max_examples=250)
def test_first_byte_is_where_a_bin_begins(index: int) -> None:
    first = bin_first_byte(index)
    assert size_bin(first) >= index
    assert size_bin(first - 1) < index or first == 1


def test_absurd_sizes_have_no_bin() -> None:
    for size in [0, -1, -(1 << 70), 1 << 62, 1 << 80]:
        assert size_bin(size) == -1
