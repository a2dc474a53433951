"""What fits in given hours: the command, the file that it writes, what it says is left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.planning.adaptive import ADAPTIVE, play, with_strategy
from dynamiccl.collect.planning.fewer import ORDER
from dynamiccl.collect.planning.fitting import fit_to_hours
from dynamiccl.collect.planning.plan import make_plan
from dynamiccl.collect.planning.times import CallTimes
from dynamiccl.collect.sweep.load import Sweep, load_sweep, parse_sweep
from dynamiccl.collect.sweep.text import sweep_text
from tests.cli.conftest import Shell
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
from tests.collect.benchmark.sweeps import sweep

WIDE = {
    "groups": "[{ num_nodes = 2, ranks_per_node = 8 }]",
    "sizes": '{ min = "16M", max = "4G", steps_per_octave = 2 }',
    "algorithms": '["Ring", "Tree", "NVLS", "NVLSTree", "PAT"]',
    "protocols": '["LL", "LL128", "Simple"]',
    "num_channels": "[0, 4, 16]",
    "cycles": "5",
    "iterations": "100",
}


@pytest.fixture(scope="module")
def wide() -> Sweep:
    return sweep(**WIDE)


def fitted_at(made: Sweep, hours: float) -> tuple[dict[str, Any], tuple[str, ...]]:
    times = CallTimes("h100-ib")
    found = fit_to_hours(made, hours, times, play(with_strategy(made, ADAPTIVE), times))
    return make_plan(found.sweep, played=found.played).to_json(), found.left_out


def test_a_sweep_that_fits_stays_as_it_is() -> None:
    made = sweep()
    plan, left_out = fitted_at(made, 1.0)
    assert left_out == ()
    assert plan["hours"] == make_plan(made).hours


def test_fewer_hours_leave_out_more_and_are_kept(wide: Sweep) -> None:
    whole = make_plan(wide).hours
    shorter, less = fitted_at(wide, whole / 2)
    shortest, least = fitted_at(wide, whole / 8)
    assert shorter["hours"] <= whole / 2
    assert shortest["hours"] <= whole / 8
    assert shortest["measurements"] < shorter["measurements"]
    assert len(least) > len(less) > 0
    # The least loss first: what is far from the best, not what the model knows nothing of.
    assert least[0].startswith("protocols LL: by h100-ib")


def test_each_reduction_tells_what_it_takes_and_comes_to_an_end(wide: Sweep) -> None:
    times = CallTimes("h100-ib")
    file = wide.file
    words = []
    for reduction in ORDER:
        found = reduction(parse_sweep(sweep_text(file), where="s.toml"), times)
        if found is not None:
            less, why = found
            made = parse_sweep(sweep_text(less), where="s.toml")
            assert len(made.trials) * less.cycles < len(wide.trials) * file.cycles
            words.append(why)
            file = less
    assert "algorithms NVLS: h100-ib has no such call" in words[2:]
    assert file.num_channels == (0,)
    assert file.cycles == 2
    assert file.sizes.ladder()[-1] < wide.file.sizes.ladder()[-1]


@pytest.mark.parametrize("name", ["h100_4x8.toml", "slurm_h100.toml"])
def test_text_of_a_sweep_reads_back_as_the_sweep(name: str) -> None:
    made = load_sweep(Path(__file__).parents[3] / "examples" / name)
    assert parse_sweep(sweep_text(made.file, head="of\nits own"), where="s.toml").file == made.file


def write(**keys: str) -> None:
    text = sweep(**(WIDE | keys)).text
    Path("wide.toml").write_text(text)


def test_command_writes_what_fits_and_it_can_be_planned_and_run(shell: Shell) -> None:
    write(sizes='{ min = "64M", max = "1G" }', iterations="400")
    whole = shell("dynamiccl-collect", "plan", "wide.toml", "--json").json
    assert whole["fitted"] is None
    hours = f"{whole['hours'] / 3:.3f}"
    done = shell("dynamiccl-collect", "plan", "wide.toml", "--hours", hours, "--write", "less.toml")
    assert done.code == 0, done.err
    assert "leaves out:" in done.out
    assert "-> less.toml" in done.out
    less = shell("dynamiccl-collect", "plan", "less.toml", "--json").json
    assert less["hours"] <= float(hours)
    assert less["max_hours"] == pytest.approx(float(hours))
    head = [line for line in Path("less.toml").read_text().splitlines() if line.startswith("#")]
    assert head[0].startswith(f"# What fits in {float(hours):g} hours of sweep grid")
    ran = shell("dynamiccl-collect", "run", "less.toml", "--runner", "simulator", "--out", "out")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--hours", "0"), "is no time"),
        (("--hours", "nan"), "is no time"),
        (("--hours", "0.00001"), "is too little for sweep 'grid'"),
        (("--write", "less.toml"), "add e.g. --hours 2"),
        (("--hours", "1", "--write", "wide.toml"), "it exists already"),
        (("--hours", "1", "--write", "nowhere/less.toml"), "nowhere"),
    ],
)
def test_what_cannot_be_planned_says_what_would_do(
    arguments: tuple[str, ...], says: str, shell: Shell
) -> None:
    write(sizes='{ min = "1M", max = "2M" }', num_channels="[0]")
    done = shell("dynamiccl-collect", "plan", "wide.toml", *arguments)
    assert done.code != 0
    assert says in " ".join(done.err.split())
    assert not Path("less.toml").exists()


def test_too_few_hours_name_those_that_do(shell: Shell) -> None:
    write(sizes='{ min = "1M", max = "2M" }', num_channels="[0]")
    said = " ".join(shell("dynamiccl-collect", "plan", "wide.toml", "--hours", "1e-5").err.split())
    enough = said.split("give --hours ")[1].split(",")[0]
    done = shell("dynamiccl-collect", "plan", "wide.toml", "--hours", enough, "--json")
    assert json.loads(done.out)["hours"] > 0
    assert done.code == 0
