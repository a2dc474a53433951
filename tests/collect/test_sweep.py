"""Sweep files: what they declare, which mistakes they name, sizes, walks, splits."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.grid import (
    Setting,
    chains,
    communicators,
    factor_ladder,
    parse_size,
    walks,
)
from dynamiccl.collect.sweep import Sizes, Sweep, load_sweep, parse_sweep, sweep_text
from dynamiccl.errors import InvalidSweep
from dynamiccl.nccl import ABSTAIN
from dynamiccl.sizes import size_bin
from tests.collect.parsed import INPUTS

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = """
name = "grid"
system = "box"
collectives = ["AllReduce"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "1M", max = "4M" }
"""


def parse(*changes: str) -> Sweep:
    """Parse the plain sweep with some keys written anew, and new ones added."""
    lines = HEAD.strip().splitlines()
    for change in changes:
        key = change.partition(" = ")[0]
        lines = [line for line in lines if line.partition(" = ")[0] != key]
        lines.append(change)
    return parse_sweep(
        "\n".join(sorted(lines, key=lambda line: line.startswith("["))), where="s.toml"
    )


def group(words: str) -> str:
    return f"groups = [{{ {words} }}]"


@pytest.mark.parametrize(("change", "said"), INPUTS["sweep_mistakes"])
def test_mistake_names_key_value_and_choices(change: str, said: str) -> None:
    with pytest.raises(InvalidSweep) as caught:
        parse(change)
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_example_is_a_sweep_and_survives_being_written_down(path: Path) -> None:
    sweep = load_sweep(path)
    feasible = [trial.config for trial in sweep.trials if trial.infeasible is None]
    assert any((config != ABSTAIN) is bool(sweep.file.algorithms) for config in feasible)
    assert sweep.text == path.read_text()
    assert parse_sweep(sweep_text(sweep.file), where="again").trials == sweep.trials


def test_only_leaves_single_trials_of_the_grid() -> None:
    keys = [f"AllReduce:4x8:{1 << 20}:{config}" for config in ("ABSTAIN", "Ring/LL")]
    sweep = parse(f"only = {keys}")
    assert [trial.key for trial in sweep.trials] == keys
    assert parse_sweep(sweep_text(sweep.file), where="again").trials == sweep.trials


def reasons(*changes: str) -> dict[str, str | None]:
    trials = parse(*changes, 'sizes = { min = "1M", max = "1M" }').trials
    return {trial.config.key: trial.infeasible for trial in trials}


def test_what_nccl_cannot_run_is_a_trial_with_the_reason() -> None:
    gather = 'collectives = ["AllGather"]'
    found = reasons(gather)
    assert len(found) == 1 + 7 * 3
    assert (found["ABSTAIN"], found["Ring/LL128"]) == (None, None)
    assert found["Tree/Simple"] == "AllGather has no Tree"
    assert found["NVLS/LL"] == "NVLS has no LL for AllGather"
    old, new = (
        reasons(gather, f'nccl_version = "{n}"')["PAT/Simple"] for n in ("2.22.3", "2.32.6")
    )
    assert (old, new) == ("PAT needs NCCL 2.23.0 and this is 2.22.3", None)
    one_node = group("num_nodes = 1, ranks_per_node = 8")
    assert reasons(one_node)["NVLSTree/Simple"] == "NVLSTree needs more than one node"
    small = parse(gather, "sizes = { list = [256, 512] }").trials
    left = {trial.size_bytes: trial.infeasible for trial in small if trial.config == ABSTAIN}
    assert left == {256: "256 bytes leave nothing to each of 32 ranks", 512: None}


def test_channel_count_and_chunk_size_0_are_auto() -> None:
    ring = ('algorithms = ["Ring"]', 'protocols = ["Simple"]')
    assert reasons("num_channels = [0, 8, 65]", *ring) == {
        "ABSTAIN": None,
        "Ring/Simple": None,
        "Ring/Simple/8ch": None,
        "Ring/Simple/65ch": "65 channels are outside 1..64",
    }
    found = reasons('chunk_sizes = [0, "512K"]', 'nccl_version = "2.29.7"', *ring)
    assert found["Ring/Simple/524288B"] == "a chunk size needs NCCL 2.30.0 and this is 2.29.7"


def test_profile_is_its_settings_and_part_of_the_trial() -> None:
    trials = parse(
        'profiles = [{ name = "default" }, { name = "net", transport = "NET", '
        'env = { NCCL_NTHREADS = "256" } }]',
        'interference = [{ kind = "none" }, { kind = "congestion", level = 2.0 }]',
    ).trials
    profiles = {trial.setting.profile.name: trial.setting.profile for trial in trials}
    assert profiles["default"].environment == ()
    assert dict(profiles["net"].environment) == {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NTHREADS": "256",
    }
    assert len({trial.key for trial in trials}) == len(trials) == 2 * 2 * 3 * 22


def setting_of(words: str) -> Setting:
    [setting] = {trial.setting for trial in parse(group(words)).trials}
    return setting


def test_hosts_may_differ_from_what_nccl_counts_as_nodes() -> None:
    setting = setting_of("num_nodes = 1, ranks_per_node = 72, num_hosts = 18")
    assert (setting.hosts, setting.ranks_per_host, setting.num_ranks) == (18, 4, 72)
    assert setting.key == "AllReduce:1x72:18hosts"


@pytest.mark.parametrize(
    ("text", "shape", "second"),
    [
        ("MOD 8", (4, 1), (1, 9, 17, 25)),
        ("AND 0x7", (4, 1), (1, 9, 17, 25)),
        ("DIV 8", (1, 8), tuple(range(8, 16))),
        ("OR 0x7", (1, 8), tuple(range(8, 16))),
        ("MOD 2", (4, 4), (*range(1, 32, 2),)),
    ],
)
def test_split_makes_communicators_of_one_shape(
    text: str, shape: tuple[int, int], second: tuple[int, ...]
) -> None:
    setting = setting_of(f"num_nodes = 4, ranks_per_node = 8, split = '{text}'")
    assert (setting.num_nodes, setting.ranks_per_node, setting.split) == (*shape, text)
    assert setting.comms is not None
    assert setting.comms[1] == second
    assert sorted(process for each in setting.comms for process in each) == [*range(32)]


def test_single_processes_may_be_left_over_where_that_is_said() -> None:
    job = ("AND 0x17", 3, 8)
    with pytest.raises(ValueError, match=r"'AND 0x17' makes no equal .*'DIV 8'"):
        communicators(*job)
    assert communicators(*job, spare=True) == tuple((k, k + 8) for k in range(8))


def test_sizes_are_read_with_binary_units_and_laddered_as_asked() -> None:
    texts = ("4096", "64K", "64k", "16M", "1GiB", "2 TB", 7)
    assert [*map(parse_size, texts)] == [4096, 65536, 65536, 16 << 20, 1 << 30, 2 << 40, 7]
    assert Sizes(min=1, max=64).ladder() == (16, 32, 64)
    assert Sizes(min=1000, max=27000, factor=3).ladder() == (1000, 3000, 9000, 27000)
    assert Sizes.model_validate({"list": ["1M", 12, 100, 12]}).ladder() == (12, 100, 1 << 20)


@given(low=st.integers(9, 27), octaves=st.integers(0, 10), steps=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=30)
def test_ladder_is_one_size_for_each_of_its_bins_in_a_walk_for_each_step(
    low: int, octaves: int, steps: int
) -> None:
    sizes = {"min": 1 << low, "max": 1 << (low + octaves), "steps_per_octave": steps}
    ladder = Sizes.model_validate(sizes).ladder()
    bins = range(4 * low, 4 * (low + octaves) + 1, 4 // steps)
    assert [size_bin(size) for size in ladder] == list(bins)
    assert (ladder[0], ladder[-1]) == (1 << low, 1 << (low + octaves))
    assert all(size % 16 == 0 for size in ladder)
    assert len(chains(ladder)) == (steps if octaves else 1)


@given(sizes=st.sets(st.integers(1, 4096), min_size=1, max_size=30))
@settings(deadline=None, max_examples=40)
def test_walks_pass_every_size_once_and_are_not_more_than_chains(sizes: set[int]) -> None:
    cut, plain = walks(sizes), chains(sizes)
    assert sorted(size for walk in plain for size in walk) == sorted(sizes)
    passed = [size for walk in cut for size in walk]
    assert sizes <= set(passed)
    assert sum(size in sizes for size in passed) == len(sizes)
    assert len(cut) <= len(plain)
    assert len(passed) <= 2 * len(sizes)
    for walk in (*cut, *plain):
        factor = walk[1] // walk[0] if len(walk) > 1 else 2
        assert walk == factor_ladder(walk[0], walk[-1], factor)
