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


@pytest.fixture(scope="module", params=[2, 3])
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, adaptive_path: Path
) -> Job:
    skip_without_nccl((2, 28))
    return run_adaptive_job(tmp_path_factory.mktemp("job"), adaptive_path, int(request.param))


def test_every_size_runs_what_its_table_says(job: Job) -> None:
    job.assert_loaded()
    for records in job.records:
        first, second, own = [table for _, table in table_changes(records)]
        assert own == 0
        assert_ran(records, first, FIRST)
        assert_ran(records, second, SECOND)
        sizes = set(choices_of(records, own))
        assert set(choices_of(records, first)) == sizes == set(choices_of(records, second))


def test_ranks_switch_at_the_same_calls(job: Job) -> None:
    first, *others = [table_changes(records) for records in job.records]
    assert all(other == first for other in others)


def test_kill_file_restores_the_choice_of_nccl(job: Job) -> None:
    own = [choices_of(records, 0) for records in job.records]
    assert all(other == own[0] for other in own)
    # Of two ranks NCCL's own choice is Ring at every size, with the protocol of either table.
    assert any(cells != {(SECOND.algorithm, SECOND.protocol)} for cells in own[0].values())
    for records in job.records:
        assert not records["decided"][records["table"] == 0].any()


#: NCCL has it everywhere, and does not choose it for the largest of these sizes.
TABLE: Final = Config(Algorithm.Ring, Protocol.LL, 2)
RUNNING_S: Final = 15


@pytest.fixture(scope="module", params=[2, 3])
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, plugin_path: Path
) -> list[Job]:
    """The same job under the table, and with a kill file from the beginning."""
    skip_without_nccl((2, 28))
    ranks = int(request.param)
    environment = {
        "NCCL_TUNER_PLUGIN": str(plugin_path),
        "NCCL_PROFILER_PLUGIN": str(plugin_path.with_name(PROFILER_NAME)),
        "DYNAMICCL_MODE": "table",
    }
    found = []
    for name in ("tuned", "killed"):
        root = tmp_path_factory.mktemp(name)
        write_bound_artifact(root / "artifact", plugin_path, TABLE, ranks)
        if name == "killed":
            (root / "artifact" / "kill").touch(mode=0o600)
        found.append(run_job(root, ranks, environment, lambda: time.sleep(RUNNING_S)))
    return found


def test_every_call_from_the_first_on_runs_what_the_table_says(jobs: list[Job]) -> None:
    tuned, _ = jobs
    tuned.assert_loaded()
    assert all("the artifact's table, from call 0" in log for log in tuned.logs)
    for records in tuned.records:
        assert int(records["sequence"][0]) == 0
        assert_ran(records, 0, TABLE)


def test_a_kill_file_leaves_nccls_own_choice_on_every_rank(jobs: list[Job]) -> None:
    _, killed = jobs
    killed.assert_loaded()
    assert all("a kill file is there" in log for log in killed.logs)
    chosen = [choices_of(records, 0) for records in killed.records]
    assert all(own == chosen[0] for own in chosen)
    assert any(cells != {(TABLE.algorithm, TABLE.protocol)} for cells in chosen[0].values())
