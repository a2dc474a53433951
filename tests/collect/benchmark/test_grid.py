from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.benchmark.grid import deal, slow_seconds
from dynamiccl.collect.runner import Pick
from dynamiccl.nccl import ABSTAIN
from tests.collect.benchmark.sweeps import launch_of, sweep

TRIALS = [trial for trial in sweep().trials if trial.infeasible is None]


def test_every_pick_has_a_block_and_each_cycle_walks_all_sizes() -> None:
    launch = launch_of(TRIALS, repeats=2)
    grid = deal(launch, max_blocks=1000)
    assert grid.chain.sizes == (1 << 20, 1 << 21, 1 << 22)
    assert len(grid.cycles) == 2 * 9
    for cycle in grid.cycles:
        assert [pick.trial.size_bytes for pick in cycle] == list(grid.chain.sizes)
    assert Counter(grid.blocks) == Counter(launch.picks)
    assert grid.left_over == ()


def test_order_is_shuffled_within_a_size_and_the_same_again() -> None:
    launch = launch_of(TRIALS)
    grid = deal(launch, max_blocks=1000)
    orders = [[c.key for c in column] for column in zip(*grid.configs, strict=True)]
    assert orders[0] != orders[1]
    assert grid == deal(launch, max_blocks=1000)
    other = deal(replace(launch, id="1:x"), max_blocks=1000)
    assert other.cycles != grid.cycles


def test_gaps_are_filled_with_further_repeats_of_the_default() -> None:
    few = [trial for trial in TRIALS if trial.size_bytes == 1 << 20][:2]
    launch = launch_of([*TRIALS[9:], *few])
    grid = deal(launch, max_blocks=1000)
    extra = Counter(grid.blocks) - Counter(launch.picks)
    assert {pick.trial.config for pick in extra} == {ABSTAIN}
    assert all(pick.trial.size_bytes == 1 << 20 for pick in extra)
    assert len(grid.blocks) == 3 * 9
    # No measurement has the number of another one of its trial.
    assert len(set(grid.blocks)) == len(grid.blocks)


def test_gap_of_a_forced_launch_is_filled_with_its_own_config() -> None:
    ring = [trial for trial in TRIALS if trial.config.key == "Ring/LL"]
    launch = launch_of([*ring, *ring[1:]], scheduled=False)
    picks = (*launch.picks[:3], *(Pick(pick.trial, 1) for pick in launch.picks[3:]))
    grid = deal(replace(launch, picks=picks), max_blocks=1000)
    assert {config.key for cycle in grid.configs for config in cycle} == {"Ring/LL"}
    assert len(set(grid.blocks)) == len(grid.blocks) == 6


def test_too_many_blocks_are_left_over_whole_cycles_at_a_time() -> None:
    launch = launch_of(TRIALS)
    grid = deal(launch, max_blocks=10)
    assert len(grid.cycles) == 3
    assert Counter(grid.blocks) + Counter(grid.left_over) == Counter(launch.picks)


@given(data=st.data(), count=st.integers(1, 40), limit=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_nothing_is_lost_whatever_is_picked(data: st.DataObject, count: int, limit: int) -> None:
    chosen = [Pick(data.draw(st.sampled_from(TRIALS)), number) for number in range(count)]
    launch = replace(launch_of(TRIALS), picks=tuple(chosen))
    grid = deal(launch, max_blocks=limit)
    kept = Counter(grid.blocks) & Counter(chosen)
    assert kept + Counter(grid.left_over) == Counter(chosen)
    assert kept, "a launch must make progress"
    assert len(set(grid.blocks)) == len(grid.blocks)


def test_size_that_was_settled_is_walked_over_with_the_default() -> None:
    outer = [trial for trial in TRIALS if trial.size_bytes != 1 << 21]
    more = [trial for trial in sweep(sizes='{ list = ["8M"] }').trials if trial.infeasible is None]
    grid = deal(launch_of([*outer, *more]), max_blocks=1000)
    assert grid.chain.sizes == (1 << 20, 1 << 21, 1 << 22, 1 << 23)
    assert {cycle[1].trial.config for cycle in grid.cycles} == {ABSTAIN}
    assert grid.left_over == ()


def test_large_messages_of_slow_configs_have_longer_before_they_count_as_hung() -> None:
    text = {
        "sizes": '{ list = ["64K", "4G"] }',
        "protocols": '["LL", "Simple"]',
        "num_channels": "[1, 16]",
    }
    trials = [trial for trial in sweep(**text).trials if trial.infeasible is None]
    grid = deal(launch_of(trials), max_blocks=1000)
    allowed = {
        (pick.trial.size_bytes, pick.trial.config.key): seconds
        for pick, seconds in zip(grid.blocks, slow_seconds(grid, 22), strict=True)
    }
    assert allowed[4 << 30, "Ring/LL/1ch"] > 126  # as measured on two nodes of H100
    assert allowed[4 << 30, "Ring/Simple/1ch"] == allowed[4 << 30, "Ring/LL/16ch"]
    assert allowed[4 << 30, "Ring/Simple/16ch"] == allowed[4 << 30, ABSTAIN.key]
    assert allowed[4 << 30, ABSTAIN.key] < allowed[4 << 30, "Ring/LL/1ch"] / 2
    assert max(s for (size, _), s in allowed.items() if size == 1 << 16) < 0.1
