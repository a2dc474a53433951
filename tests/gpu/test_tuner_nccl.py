"""The tuner of jobs inside real NCCL, the one that torch brings: 2 and 3 ranks on one GPU.

    pytest -m gpu tests/gpu/test_tuner_nccl.py

It needs a GPU, a CUDA build of torch with NCCL 2.28 or later (the recorder tells what ran) and a
compiler; it takes two minutes. The ranks agree in `init`, by a word of shared memory.
"""

import time
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.libraries import PROFILER_NAME
from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.gpu.ranks import (
    Job,
    assert_ran,
    choices_of,
    run_job,
    skip_without_nccl,
    write_bound_artifact,
)

pytestmark = pytest.mark.gpu

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
