"""The plugin inside real NCCL, the one that torch brings: 2 and 3 ranks on one GPU.

    pytest -m gpu tests/gpu/test_plugin_nccl.py

It needs a GPU, a CUDA build of torch with NCCL 2.28 or later (the profiler tells what ran) and a
compiler; each mode takes two minutes.

One adaptive job, driven from outside: the artifact's table is there from call 0, a brain then
answers with another, and a kill file at last restores NCCL's own choice. And jobs in mode table,
whose ranks agree in `init`, by a word of shared memory.
"""

import secrets
import time
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.libraries import PROFILER_NAME
from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.gpu.ranks import (
    SYSTEM,
    Job,
    assert_ran,
    choices_of,
    nccl_code,
    run_job,
    skip_without_nccl,
    table_changes,
    write_bound_artifact,
)
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.setting import KEY
from tests.serve.jobs.thinking import answering, table_field

pytestmark = pytest.mark.gpu

FIRST: Final = Config(Algorithm.Ring, Protocol.Simple, 2)
SECOND: Final = Config(Algorithm.Ring, Protocol.LL, 2)
#: For the brain; a hand-over between processes takes milliseconds on one GPU.
ADAPTING_S: Final = 30
KILLED_S: Final = 15


def run_adaptive_job(root: Path, plugin: Path, ranks: int) -> Job:
    artifact = root / "artifact"
    write_bound_artifact(artifact, plugin, FIRST, ranks)
    leader = {
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_SYSTEMS": f"{nccl_code()}={SYSTEM}",
        "DYNAMICCL_KILL_FILE": str(artifact / "kill"),
        "DYNAMICCL_BRAIN": answering(table_field(SECOND, ranks, ranks)),
        "DYNAMICCL_ADAPT_INTERVAL_S": "1",
        "DYNAMICCL_PROBE_CALLS": "0",
        "DYNAMICCL_STOP_PERCENT": "100",
    }
    job = secrets.token_hex(8)

    def let_it_adapt_then_kill() -> None:
        time.sleep(ADAPTING_S)
        (artifact / "kill").touch(mode=0o600)
        time.sleep(KILLED_S)

    program = str(plugin.with_name("dynamiccl-arbiter"))
    with Arbiter([program], job, 10_000, leader) as arbiter:
        environment = {
            "NCCL_TUNER_PLUGIN": str(plugin),
            "NCCL_PROFILER_PLUGIN": str(plugin),
            "DYNAMICCL_MODE": "adaptive",
            "DYNAMICCL_STOP_PERCENT": "100",
            "DYNAMICCL_JOB": job,
            "DYNAMICCL_WORD": "0",
            "DYNAMICCL_ARBITER": arbiter.address,
            "DYNAMICCL_KEY": KEY,
        }
        return run_job(root, ranks, environment, let_it_adapt_then_kill)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_switch_at_the_same_calls(ranks: int, tmp_path: Path, adaptive_path: Path) -> None:
    skip_without_nccl((2, 28))
    job = run_adaptive_job(tmp_path, adaptive_path, ranks)
    job.assert_loaded()
    changes, *others = [table_changes(records) for records in job.records]
    assert all(other == changes for other in others)
    first, second, own = [table for _, table in changes]
    assert own == 0
    for records in job.records:
        assert_ran(records, first, FIRST)
        assert_ran(records, second, SECOND)
        sizes = set(choices_of(records, own))
        assert set(choices_of(records, first)) == sizes == set(choices_of(records, second))
        assert not records["decided"][records["table"] == own].any()
    # Of two ranks NCCL's own choice is Ring at every size, with the protocol of either table.
    assert_nccls_own(job, own, SECOND)


def assert_nccls_own(job: Job, table: int, ours: Config) -> None:
    """All ranks chose alike while that table was in force, and not ours everywhere."""
    chosen = [choices_of(records, table) for records in job.records]
    assert all(own == chosen[0] for own in chosen)
    assert any(cells != {(ours.algorithm, ours.protocol)} for cells in chosen[0].values())


#: NCCL has it everywhere, and does not choose it for the largest of these sizes.
TABLE: Final = Config(Algorithm.Ring, Protocol.LL, 2)
RUNNING_S: Final = 15


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_call_from_the_first_on_runs_what_the_table_says_without_a_kill_file(
    ranks: int, is_killed: bool, tmp_path: Path, plugin_path: Path
) -> None:
    skip_without_nccl((2, 28))
    write_bound_artifact(tmp_path / "artifact", plugin_path, TABLE, ranks)
    if is_killed:
        (tmp_path / "artifact" / "kill").touch(mode=0o600)
    environment = {
        "NCCL_TUNER_PLUGIN": str(plugin_path),
        "NCCL_PROFILER_PLUGIN": str(plugin_path.with_name(PROFILER_NAME)),
        "DYNAMICCL_MODE": "table",
    }
    job = run_job(tmp_path, ranks, environment, lambda: time.sleep(RUNNING_S))
    job.assert_loaded()
    said = "a kill file is there" if is_killed else "the artifact's table, from call 0"
    assert all(said in log for log in job.logs)
    if is_killed:
        assert_nccls_own(job, 0, TABLE)
        return
    for records in job.records:
        assert int(records["sequence"][0]) == 0
        assert_ran(records, 0, TABLE)
