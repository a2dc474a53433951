from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dynamiccl.collect.grid import (
    DATATYPE_BYTES,
    benchmark_bytes,
    chains,
    factor_ladder,
    parse_size,
    walks,
)
from dynamiccl.collect.sweep import Sizes, Sweep, load_sweep, parse_sweep
from dynamiccl.errors import InvalidSweep, MissingPath
from dynamiccl.nccl import ABSTAIN, Collective
from dynamiccl.sizes import size_bin

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


def refused(*changes: str) -> str:
    with pytest.raises(InvalidSweep) as caught:
        parse(*changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_sweep_is_the_default_and_every_algorithm_and_protocol() -> None:
    sweep = parse()
    assert len(sweep.trials) == 3 * (1 + 7 * 3)
    assert [t.size_bytes for t in sweep.trials if t.config == ABSTAIN] == [
        1 << k for k in (20, 21, 22)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('name = "A b"', "sweep name 'A b' cannot be a directory name"),
        ('system = "/"', "system name '/' cannot be a directory name"),
        ("name = 3", "name: Input should be a valid string (got 3)"),
        ('collectives = ["AllReduc"]', "unknown collective 'AllReduc' in s.toml: collectives"),
        ('collectives = "AllReduce"', "collectives: Input should be a valid tuple"),
        ("collectives = []", "collectives: Tuple should have at least 1 item"),
        ("groups = []", "groups: Tuple should have at least 1 item"),
        ("groups = [{ num_nodes = 0, ranks_per_node = 8 }]", "groups.0.num_nodes: Input should be"),
        (
            "groups = [{ nodes = 1, ranks_per_node = 8 }]",
            "groups.0.nodes: Extra inputs are not permitted; known keys are num_nodes, "
            "ranks_per_node, num_hosts, split, spare",
        ),
        ('algorithms = ["Rign"]', "did you mean 'Ring'?"),
        ('protocols = ["LL127"]', "choose from LL, LL128, Simple"),
        ('num_channels = ["x"]', "num_channels.0: Input should be a valid integer"),
        ('sizes = { min = "1.5M", max = "4M" }', "'1.5M' is no size; write 4096, '64K', '16M'"),
        ('sizes = { min = 0, max = "4M" }', "sizes.min: Value error, '0' is no size"),
        ('sizes = { min = -8, max = "4M" }', "sizes.min: Value error, '-8' is no size"),
        ('sizes = { min = true, max = "4M" }', "sizes.min: Value error, 'True' is no size"),
        ('sizes = { min = "8M", max = "4M" }', "ladder lies from 8388608 to 4194304 bytes"),
        ('sizes = { min = "1M", max = "9999999T" }', "less than 2^62 bytes"),
        ('sizes = { min = "1M" }', "sizes: Value error, max is missing; add it"),
        ("sizes = {}", "give either min and max, or list = [sizes]"),
        ("sizes = { list = [] }", "give either min and max, or list = [sizes]"),
        ("sizes = { list = [64], min = 1, max = 2 }", "give either min and max, or list"),
        ("sizes = { min = 1, max = 8, factor = 2, steps_per_octave = 1 }", "give one of factor"),
        ("sizes = { min = 1, max = 8, factor = 1 }", "sizes.factor: Input should be greater"),
        ('datatypes = ["flot"]', "unknown datatype 'flot'; choose from int8, uint8"),
        ('[[profiles]]\nname = "x y"', "profile name 'x y' cannot be a directory name"),
        ('[[profiles]]\nname = "shm"\ntransport = "SMH"', "transport: Input should be 'P2P'"),
        ('[[profiles]]\nname = "a"\nthreads = 65', "threads: Input should be 64, 128, 256 or 512"),
        ('[[profiles]]\nname = "a"\nenv = { FOO = "1" }', "'FOO' is no NCCL_* variable"),
        ('[[profiles]]\nname = "a"\nenv = { NCCL_ALGO = "Ring" }', "use algorithms and protocols"),
        (
            '[[profiles]]\nname = "a"\nenv = { NCCL_SYM_NOWIN_ENABLE = "1" }',
            "symmetric kernels run, and these ask no tuner",
        ),
        ('[[profiles]]\nname = "default"\nthreads = 64', "is the user's untouched environment"),
        ('[[interference]]\nkind = "cpu"', "every other kind a level above 0"),
        ('[[interference]]\nkind = "cpu"\nlevel = 2', "the level of 'cpu' is a share"),
        ('[[interference]]\nkind = "noise"', "unknown interference 'noise'; choose from none, "),
        ('[strategy]\nkind = "clever"', "kind: Input should be 'exhaustive', 'random'"),
        ('[runner]\narguments = ["-m", "4"]', "'-m' makes one call of many"),
        ('[runner]\narguments = ["-R", "2"]', "'-R' with 2 makes NCCL's symmetric kernels run"),
        ('[runner]\narguments = ["-R2"]', "'-R2' with 2 makes NCCL's symmetric kernels run"),
        ('[runner]\narguments = ["-D", "1"]', "'-D' with 1 runs a kernel of nccl-tests' own"),
        ('[runner]\narguments = ["-r", "-1"]', "'-r' with -1 measures each size once for every"),
        ('[runner]\narguments = ["--local", "2"]', "'--local' with 2 makes NCCL's symmetric"),
        ('[runner]\narguments = ["--iter=50"]', "'--iter=50' is set by the sweep; change the"),
        ('[runner]\narguments = ["--op=all"]', "'--op=all' with all measures each size once for"),
        ('[runner]\narguments = ["-C", "1"]', "'-C' with 1 reports the CPU's time in place of"),
        ('[runner]\narguments = ["-h"]', "'-h' prints its help and measures nothing"),
        ('[runner]\narguments = ["--cudagraph=2"]', "'--cudagraph=2' asks for configs while a"),
        ('[runner]\narguments = ["-z", "3", "-n50"]', "'-n50' is set by the sweep; change the"),
        ("[budget]\nmax_hours = 0", "max_hours: Input should be greater than 0"),
        ('[launcher]\nkind = "pbs"', "unknown launcher 'pbs'; choose from local, mpirun, srun, sb"),
        ('[launcher]\ncontainer = { image = "x" }', "launcher.container.runtime: Field required"),
        (
            '[launcher]\ncontainer = { runtime = "pyxis", image = "x", mount = [] }',
            "launcher.container.mount: Extra inputs are not permitted; known keys are runtime,",
        ),
        ('sizes = { min = 1, max = 8, steps_per_octave = 3 }', "Input should be 1, 2 or 4 (got 3)"),
        ("cycles = 0", "cycles: Input should be greater than or equal to 1 (got 0)"),
        ("iterations = 1.5", "iterations: Input should be a valid integer"),
        ('nccl_version = "2.99"', "nccl_version: NCCL 2.99.0 is newer than the newest whose"),
        ('nccl_version = "2.99"', "leave the key out, and what runs is read from NCCL's log"),
        ('nccl_version = "new"', "unknown NCCL version 'new'"),
        ("cycels = 5", "cycels: Extra inputs are not permitted; known keys are name, system"),
        ("[simulator]\nsead = 1", "sead: Extra inputs are not permitted; known keys are system,"),
        ("[simulator]\nnoise_sigma = 2", "noise_sigma: Input should be less than or equal to 1"),
        ("[simulator]\nnoise_sigma = nan", "noise_sigma: Input should be a finite number"),
        ('[[interference]]\nkind = "cpu"\nlevel = -1', "level: Input should be greater than"),
        ('[[interference]]\nkind = "cpu"\nlevel = nan', "level: Input should be a finite number"),
        ("num_channels = [0, 0]", "trial AllReduce:4x8:1048576:Tree/LL is declared twice"),
        ('collectives = ["AllReduce", "all_reduce"]', "1048576:ABSTAIN is declared twice"),
        ("name =", "s.toml is not TOML: Invalid value"),
    ],
)  # fmt: skip
def test_mistake_names_key_value_and_choices(change: str, said: str) -> None:
    assert said in refused(change)


@pytest.mark.parametrize("key", ["name", "system", "collectives", "groups", "sizes"])
def test_missing_key_is_named(key: str) -> None:
    lines = [line for line in HEAD.splitlines() if not line.startswith(key)]
    with pytest.raises(InvalidSweep, match=rf"^s\.toml: {key}: Field required; add it$"):
        parse_sweep("\n".join(lines), where="s.toml")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name = '\x80'", b"\x00", b""])
def test_file_that_is_no_text_is_no_sweep(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(content)
    with pytest.raises(InvalidSweep, match=r"s\.toml"):
        load_sweep(tmp_path / "s.toml")


def test_missing_file_and_folder_say_where_examples_are(tmp_path: Path) -> None:
    for path in (tmp_path / "s.toml", tmp_path):
        with pytest.raises(MissingPath, match="examples/ holds some"):
            load_sweep(path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_example_is_a_sweep(path: Path) -> None:
    sweep = load_sweep(path)
    feasible = [trial.config for trial in sweep.trials if trial.infeasible is None]
    assert any((config != ABSTAIN) is bool(sweep.file.algorithms) for config in feasible)
    assert sweep.text == path.read_text()


def test_size_is_read_with_binary_units() -> None:
    texts = ("4096", "64K", "64k", "16M", "1GiB", "2 TB", 7)
    assert [*map(parse_size, texts)] == [4096, 65536, 65536, 16 << 20, 1 << 30, 2 << 40, 7]


def test_ladder_has_the_asked_steps_in_an_octave() -> None:
    ladders = {n: Sizes(min=1 << 20, max=1 << 21, steps_per_octave=n).ladder() for n in (1, 2, 4)}
    assert ladders[1] == (1 << 20, 1 << 21)
    assert ladders[2] == (1 << 20, 23 << 16, 1 << 21)
    assert ladders[4] == (1 << 20, 19 << 16, 23 << 16, 27 << 16, 1 << 21)
    assert Sizes(min=1, max=64).ladder() == (16, 32, 64)


@given(low=st.integers(9, 46), octaves=st.integers(0, 10), steps=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=60)
def test_ladder_is_one_size_for_each_of_its_bins(low: int, octaves: int, steps: int) -> None:
    sizes = {"min": 1 << low, "max": 1 << (low + octaves), "steps_per_octave": steps}
    ladder = Sizes.model_validate(sizes).ladder()
    bins = range(4 * low, 4 * (low + octaves) + 1, 4 // steps)
    assert [size_bin(size) for size in ladder] == list(bins)
    assert (ladder[0], ladder[-1]) == (1 << low, 1 << (low + octaves))


@given(low=st.integers(1, 5000), factor=st.integers(2, 50), steps=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=60)
def test_small_ladder_ascends_in_multiples_of_16(low: int, factor: int, steps: int) -> None:
    sizes = {"min": low, "max": low * factor, "steps_per_octave": steps}
    try:
        ladder = Sizes.model_validate(sizes).ladder()
    except ValidationError:
        return  # no multiple of 16 lies between the two
    assert list(ladder) == sorted(set(ladder))
    assert all(size % 16 == 0 for size in ladder)


@given(
    channels=st.sets(st.integers(0, 64), min_size=1, max_size=3),
    algorithms=st.sets(st.sampled_from(["Ring", "Tree", "PAT"]), min_size=1),
    nodes=st.sets(st.integers(1, 9), min_size=1, max_size=2),
    congestion=st.sets(st.sampled_from([0.0, 0.5, 1.0]), min_size=1),
)
@settings(deadline=None, max_examples=30)
def test_trial_keys_are_unique(
    channels: set[int], algorithms: set[str], nodes: set[int], congestion: set[float]
) -> None:
    groups = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = 2 }}" for n in nodes)
    beside = ", ".join(
        f'{{ kind = "{"congestion" if level else "none"}", level = {level} }}'
        for level in congestion
    )
    trials = parse(
        f"num_channels = {list(channels)}",
        f"algorithms = {sorted(algorithms)}",
        f"groups = [{groups}]",
        f"interference = [{beside}]",
    ).trials
    configs = 1 + len(algorithms) * 3 * len(channels)
    assert len(trials) == 3 * len(nodes) * len(congestion) * configs
    assert len({trial.key for trial in trials}) == len(trials)


def reasons(*changes: str) -> dict[str, str | None]:
    trials = parse(*changes, 'sizes = { min = "1M", max = "1M" }').trials
    return {trial.config.key: trial.infeasible for trial in trials}


def test_what_nccl_cannot_run_is_a_trial_with_the_reason() -> None:
    found = reasons('collectives = ["AllGather"]')
    assert len(found) == 1 + 7 * 3
    assert found["ABSTAIN"] is None
    assert found["Ring/LL128"] is None
    assert found["Tree/Simple"] == "AllGather has no Tree"
    assert found["NVLS/LL"] == "NVLS has no LL for AllGather"


def test_nccl_version_and_nodes_decide_what_can_run() -> None:
    gather = 'collectives = ["AllGather"]'
    assert reasons(gather, 'nccl_version = "2.22.3"')["PAT/Simple"] == (
        "PAT needs NCCL 2.23.0 and this is 2.22.3"
    )
    for known in ("2.23.4", "2.32.6"):
        assert reasons(gather, f'nccl_version = "{known}"')["PAT/Simple"] is None
    one_node = "groups = [{ num_nodes = 1, ranks_per_node = 8 }]"
    assert reasons(one_node)["NVLSTree/Simple"] == "NVLSTree needs more than one node"


def test_channel_count_0_is_auto() -> None:
    found = reasons("num_channels = [0, 8, 65]", 'algorithms = ["Ring"]', 'protocols = ["LL"]')
    assert found == {
        "ABSTAIN": None,
        "Ring/LL": None,
        "Ring/LL/8ch": None,
        "Ring/LL/65ch": "65 channels are outside 1..64",
    }


def test_range_by_a_factor_and_a_list_are_taken_as_written() -> None:
    assert Sizes(min=1000, max=27000, factor=3).ladder() == (1000, 3000, 9000, 27000)
    assert Sizes.model_validate({"list": ["1M", 12, 100, 12]}).ladder() == (12, 100, 1 << 20)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_ladder_needs_one_process_for_each_of_its_steps(steps: int) -> None:
    ladder = Sizes.model_validate({"min": "1K", "max": "4G", "steps_per_octave": steps}).ladder()
    assert len(chains(ladder)) == steps


@given(sizes=st.sets(st.integers(1, 4096), min_size=1, max_size=30))
@settings(deadline=None, max_examples=100)
def test_walks_pass_every_size_once_and_are_not_more_than_chains(sizes: set[int]) -> None:
    cut, plain = walks(sizes), chains(sizes)
    assert sorted(size for chain in plain for size in chain.sizes) == sorted(sizes)
    passed = [size for walk in cut for size in walk.sizes]
    assert sizes <= set(passed)
    assert sum(size in sizes for size in passed) == len(sizes)
    assert len(cut) <= len(plain)
    assert len(passed) <= 2 * len(sizes)
    for walk in (*cut, *plain):
        assert walk.sizes == factor_ladder(walk.sizes[0], walk.sizes[-1], walk.factor)


def test_walk_of_a_chain_as_arguments() -> None:
    [long] = chains([8, 24, 72])
    assert long.arguments == ("-b", "8", "-e", "72", "-f", "3")
    [single] = chains([100])
    assert single.arguments == ("-b", "100", "-e", "100")


@given(
    size=st.integers(1, 1 << 40),
    ranks=st.integers(1, 4096),
    datatype=st.sampled_from(sorted(DATATYPE_BYTES)),
)
def test_benchmark_rounds_down_to_whole_shares(size: int, ranks: int, datatype: str) -> None:
    gather = benchmark_bytes(Collective.AllGather, size, ranks, datatype)
    assert 0 <= size - gather < 16 * ranks
    assert gather % (16 * ranks) == 0
    reduce = benchmark_bytes(Collective.AllReduce, size, ranks, datatype)
    assert 0 <= size - reduce < DATATYPE_BYTES[datatype]


def test_profile_is_its_settings_and_part_of_the_trial() -> None:
    trials = parse(
        'profiles = [{ name = "default" }, { name = "net", transport = "NET", threads = 256, '
        'buffer_bytes = "1M", env = { NCCL_NET = "Socket" } }]',
    ).trials
    profiles = {trial.setting.profile.name: trial.setting.profile for trial in trials}
    assert profiles["default"].environment == ()
    assert dict(profiles["net"].environment) == {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NTHREADS": "256",
        "NCCL_BUFFSIZE": "1048576",
        "NCCL_NET": "Socket",
    }
    assert len({trial.key for trial in trials}) == len(trials) == 2 * 3 * 22


def test_collective_that_nobody_tunes_has_its_default_only() -> None:
    trials = parse('collectives = ["AlltoAll", "SendRecv"]').trials
    assert {trial.config for trial in trials} == {ABSTAIN}
    assert len(trials) == 2 * 3


def test_size_that_leaves_nothing_to_a_rank_is_infeasible() -> None:
    small = parse('collectives = ["AllGather"]', "sizes = { list = [256, 512] }").trials
    found = {trial.size_bytes: trial.infeasible for trial in small if trial.config == ABSTAIN}
    assert found == {256: "256 bytes leave nothing to each of 32 ranks", 512: None}


def test_chunk_size_needs_a_new_nccl() -> None:
    found = reasons(
        'chunk_sizes = [0, "512K"]',
        'algorithms = ["Ring"]',
        'protocols = ["Simple"]',
        'nccl_version = "2.29.7"',
    )
    assert found["Ring/Simple"] is None
    assert found["Ring/Simple/524288B"] == "a chunk size needs NCCL 2.30.0 and this is 2.29.7"


def test_hosts_may_differ_from_what_nccl_counts_as_nodes() -> None:
    [setting] = {
        trial.setting
        for trial in parse(
            "groups = [{ num_nodes = 1, ranks_per_node = 72, num_hosts = 18 }]"
        ).trials
    }
    assert (setting.hosts, setting.ranks_per_host, setting.num_ranks) == (18, 4, 72)
    assert setting.key == "AllReduce:1x72:18hosts"
    assert "8 ranks cannot be shared out evenly to 3 hosts" in refused(
        "groups = [{ num_nodes = 1, ranks_per_node = 8, num_hosts = 3 }]"
    )


def test_options_with_other_values_are_the_users_own() -> None:
    words = ("-R", "1", "-D", "0", "-o", "max", "-r", "3", "-C", "0", "-z", "3")
    made = parse(f"[runner]\narguments = {list(words)}")
    assert made.file.runner.arguments == words
