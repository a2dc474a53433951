"""Whole sweeps through real Slurm: the stand-in, the plugin, the command line, batch jobs."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.batch import script_path
from dynamiccl.collect.journal import COMPLETE, progress_on_disk
from dynamiccl.datasets import store
from dynamiccl.simulator.system import Group
from tests.cluster.slurm import Slurm, wait_until
from tests.collect.benchmark.stand_in import share_near_truth, text_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
#: Measurements of a cycle: 3 sizes x (the default twice, Ring x 2 protocols with
#: and without a number of channels, the reference default twice). The simulated machine has no
#: NVLSTree with two ranks on a node.
PICKS = 3 * (2 + 4 + 2)


def small(plugin: Path, launcher: str = 'kind = "srun"', **keys: str) -> str:
    """A sweep for what happens around it: little work, and no start-up of samplers."""
    fixed = "startup_timeout_s = 60, retry_after_s = 0.1, read_back = false"
    return text_of(
        groups="[{ num_nodes = 2, ranks_per_node = 1 }]",
        sizes='{ min = "1M", max = "4M", factor = 4 }',
        algorithms='["Ring"]',
        protocols='["LL128", "Simple"]',
        num_channels="[0]",
        iterations="2",
        warmup_iterations="1",
        runner=f'{{ plugin = "{plugin}", {fixed} }}',
        launcher=f"{{ {launcher} }}",
        **keys,
    )


#: Measurements of a cycle and a collective: 2 sizes x (the default twice, Ring x 2 protocols, the
#: reference default twice).
SMALL_PICKS = 2 * (2 + 2 + 2)


def command(folder: Path, *more: str) -> list[str]:
    head = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", str(folder / "sweep.toml")]
    return [*head, "--out", str(folder / "out"), "--nccl-tests-dir", str(folder / "bin"), *more]


def environment(**more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def check(folder: Path) -> pl.DataFrame:
    """Every pick is there once, verified, and its time is that of the simulated machine."""
    found = check_picks(folder, PICKS)
    lost = found.filter(pl.col("reason") == "NCCL's cost table has no such cell here")
    assert lost.height == 3 * 2
    timed = found.filter(pl.col("status") == "ok")
    forced = timed.filter(~pl.col("is_default"))
    assert forced["verified"].all()
    assert (forced["requested_algorithm"] == forced["actual_algorithm"]).all()
    assert (forced["requested_protocol"] == forced["actual_protocol"]).all()
    assert timed.select("num_nodes", "ranks_per_node", "num_ranks").unique().rows() == [(2, 2, 4)]
    assert share_near_truth(forced, Group(2, 2)) > 0.9
    return found


def check_picks(folder: Path, picks: int) -> pl.DataFrame:
    """What a sweep wrote; so many picks are there once, in place and out of place.

    What follows a launch that was cut off measures the default once more.
    """
    found = store.read(folder / "out")
    timed = found.filter(pl.col("status") == "ok")
    key = ["trial", "run", "repeat", "default_scope"]
    assert timed.select(key).unique().height == timed.height
    assert timed.filter(pl.col("repeat") < 2).height == 2 * picks
    return found


def test_sweep_inside_an_allocation(slurm: Slurm, folder: Path, sweep_path: Path) -> None:
    """By srun; by mpirun in tests/golden/sweeps.py, and its ranks on nodes in test_steps.py."""
    keys = {
        "groups": "[{ num_nodes = 2, ranks_per_node = 2 }]",
        "sizes": '{ min = "1M", max = "16M", factor = 4 }',
        "algorithms": '["Ring", "NVLSTree"]',
        "protocols": '["LL128", "Simple"]',
        "runner": f'{{ plugin = "{sweep_path}", startup_timeout_s = 60 }}',
        "launcher": '{ kind = "srun" }',
        "telemetry": "{ enabled = true }",
    }
    (folder / "sweep.toml").write_text(text_of(cycles="1", **keys))
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    slurm.run([*salloc, *command(folder)], environment(), timeout_s=120)
    found = check(folder)
    assert set(found["exclusive_node"].drop_nulls()) == {True}


#: What stands where a benchmark did: it dies on one node of two, as long as that one is broken.
#: Ranks on the other node are up and wait for those, as in MPI_Init, until srun ends them.
BROKEN_NODE = """#!/bin/sh
if [ "${{SLURM_STEP_NUM_TASKS:-1}}" -gt 1 ] && [ -e "{folder}/broken" ]; then
  [ "$SLURM_NODEID" = 1 ] || {{ touch "{folder}/$SLURM_STEP_ID"; exec sleep 60; }}
  while [ ! -e "{folder}/$SLURM_STEP_ID" ]; do sleep 0.1; done
  echo "NVML: Driver/library version mismatch" >&2
  sleep 0.5; exit 3  # srun may lose what a rank says as it dies
fi
exec "{folder}/good/${{0##*/}}" "$@"
"""


def test_a_broken_node_ends_the_sweep(slurm: Slurm, folder: Path, sweep_path: Path) -> None:
    """Each config was blamed, and `--resume` had nothing left to measure."""
    shutil.copytree(folder / "bin", folder / "good", symlinks=True)
    for program in (folder / "bin").glob("*_perf"):
        program.unlink()
        program.write_text(BROKEN_NODE.format(folder=folder))
        program.chmod(0o755)
    (folder / "broken").touch()
    (folder / "sweep.toml").write_text(small(sweep_path, cycles="1"))
    salloc = ["salloc", "-N2", "--ntasks-per-node=2", "--exclusive"]
    done = slurm.run([*salloc, *command(folder)], environment(), timeout_s=120, check=False)
    assert done.returncode == 4, done.stderr
    assert "NVML: Driver/library version mismatch" in done.stderr, done.stderr
    (folder / "broken").unlink()
    slurm.run([*salloc, *command(folder, "--resume")], environment(), timeout_s=120)
    assert "failed" not in check_picks(folder, SMALL_PICKS)["status"].to_list()


class Batch:
    """A sweep of the stand-in, submitted by the command line."""

    def __init__(self, slurm: Slurm, folder: Path, plugin: Path) -> None:
        self.slurm, self.folder, self.plugin = slurm, folder, plugin
        self.env: dict[str, str] = {}
        self.journal = folder / "out" / ".journal" / "system=box" / "sweep=grid"

    def begin(self, header: str = "[]", *, cycles: int = 3, **keys: str) -> str:
        """Submit it; the job's number."""
        launcher = f'kind = "sbatch", sbatch_header = {header}'
        text = small(self.plugin, launcher, cycles=str(cycles), **keys)
        (self.folder / "sweep.toml").write_text(text)
        self.picks = SMALL_PICKS * cycles
        return str(self.run()["job"])

    def play(self, **values: str) -> None:
        """What the stand-in's processes find in their environment from now on."""
        lines = "".join(f"export {name}={value}\n" for name, value in values.items())
        (self.folder / "settings.new").write_text(lines)
        (self.folder / "settings.new").replace(self.folder / "settings")

    def run(self) -> dict[str, Any]:
        """The same command again; its JSON."""
        path = f"{self.slurm.clients}:{os.environ['PATH']}"
        env = self.slurm.environ({**environment(PATH=path), **self.env})
        argv = command(self.folder, "--json")
        return dict(json.loads(subprocess.check_output(argv, env=env, text=True, timeout=60)))

    def owner(self) -> tuple[str, int] | None:
        """Job and attempt that the file says which stands for a lock."""
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found = json.loads((self.journal / "owner").read_text())
            return str(found["job"]), int(found["restart"])
        return None

    def measured(self) -> None:
        """Wait for one more launch than there are now."""
        before = progress_on_disk(self.journal)[0]
        wait_until(lambda: progress_on_disk(self.journal)[0] > before, "a launch has ended", 120)

    def ended(self) -> bool:
        """Whether the journal says how it ended, and no job is there any more."""
        alive = self.slurm.run(["squeue", "--noheader"]).stdout
        return not alive and (self.journal / COMPLETE).exists()

    def complete(self) -> pl.DataFrame:
        """Let it run to its end; what it measured."""
        self.play()
        wait_until(self.ended, "the sweep is done", 180)
        found = self.run()
        assert (found["job"], found["state"]) == (None, "done")
        assert found["trials_done"] == found["trials"]
        return check_picks(self.folder, self.picks)

    def logs(self) -> dict[str, str]:
        """What the jobs that have begun say, by their numbers."""
        found = script_path(self.folder / "out", "grid").parent.glob("*.out")
        return {path.stem.removeprefix("grid-"): path.read_text() for path in sorted(found)}

    def follower(self) -> str:
        """Wait for a second job, and return its number."""
        wait_until(lambda: len(self.logs()) == 2, "its follower runs", 60)
        return [*self.logs()][1]

    def facts(self, number: str) -> list[str]:
        return self.slurm.run(["scontrol", "show", "job", number]).stdout.split()

    def requeued(self, number: str) -> None:
        wait_until(lambda: "Restarts=1" in self.facts(number), f"{number} begins again", 150)

    def warn(self, number: str) -> None:
        """What --signal=B:USR1@120 sends two minutes before the limit."""
        self.slurm.run(["scancel", "--batch", "--signal=USR1", number])


@pytest.fixture
def batch(slurm: Slurm, folder: Path, sweep_path: Path) -> Batch:
    """A launch of 4 to 8 rows takes some seconds at first, so that something can happen to it."""
    for program in (folder / "bin").iterdir():
        text = program.read_text().replace("exec ", f". {folder}/settings\nexec ", 1)
        program.write_text(text)
    made = Batch(slurm, folder, sweep_path)
    made.play(FAKE_SECONDS_PER_ROW="0.25")
    return made


def test_a_job_is_submitted_once_and_followed_where_it_may_not_be_requeued(batch: Batch) -> None:
    first = batch.begin('["--no-requeue"]')
    batch.measured()
    assert batch.run()["job"] == first
    batch.warn(first)
    batch.follower()
    assert batch.complete()["job_id"].n_unique() == 2


def test_options_of_the_header_win_over_ours(batch: Batch) -> None:
    header = ["--begin=now+1hour", "-J mine", "--no-requeue", "--nodes=3", "-o /tmp/x-%j"]
    number = batch.begin(json.dumps(header))
    facts = batch.facts(number)
    for fact in ("JobName=mine", "Requeue=0", "NumNodes=3-3", f"StdOut=/tmp/x-{number}"):
        assert fact in facts
    assert "PENDING" in batch.run()["state"]


def test_after_a_dead_node_it_is_queued_again_to_the_end(batch: Batch) -> None:
    number = batch.begin()
    batch.measured()
    node = batch.slurm.run(["squeue", f"--jobs={number}", "-h", "-o", "%B"]).stdout.strip()
    batch.slurm.set_node(node, "down")  # it comes back by itself (ReturnToService=2)
    batch.requeued(number)
    found = batch.complete()
    assert [*batch.logs()] == [number]
    assert "work is left: queueing job" not in batch.logs()[number]
    assert set(found["exclusive_node"]) == {False}  # it did not ask for --exclusive


def test_jobs_without_locks_spend_a_budget_once(batch: Batch, tmp_path: Path) -> None:
    """What is preloaded makes flock fail in every process, as on Lustre without `-o flock`.

    The first job is requeued; then it may no longer be, and another follows. Each takes over from
    the one before, which Slurm says is over.
    """
    made, source = tmp_path / "no_locks.so", tmp_path / "no_locks.c"
    source.write_text(
        "#include <errno.h>\nint flock(int d, int o) { errno = ENOSYS; return -1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
    batch.env.update(LD_PRELOAD=str(made))
    number = batch.begin(cycles=8, budget="{ max_measurements = 30 }")
    batch.measured()
    assert batch.owner() == (number, 0)
    batch.warn(number)
    batch.requeued(number)
    assert batch.logs()[number].count("work is left: queueing job") == 1
    batch.slurm.run(["scontrol", "update", f"JobId={number}", "Requeue=0"])
    batch.measured()
    assert batch.owner() == (number, 1)
    batch.warn(number)
    follower = batch.follower()
    wait_until(lambda: batch.owner() == (follower, 0), "its follower holds the sweep", 60)
    batch.play()
    wait_until(batch.ended, "the budget is spent", 120)
    assert batch.run()["state"] == "budget"
    out = batch.folder / "out"
    timed = store.read(out).filter(pl.col("status") == "ok", pl.col("default_scope") == "profile")
    assert 0 < timed.height <= 2 * 30  # each measurement is two rows: in place and out of place
