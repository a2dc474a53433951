"""Jobs of several hosts under real Slurm and Open MPI: how their ranks come to one arbiter."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl.serve.install import install
from tests.cli.conftest import artifact_fixture as artifact_fixture  # noqa: PLC0414
from tests.cli.conftest import exported_fixture as exported_fixture  # noqa: PLC0414
from tests.cli.conftest import policy_fixture as policy_fixture  # noqa: PLC0414
from tests.cluster.slurm import Slurm
from tests.serve.conftest import libnccl_fixture as libnccl_fixture  # noqa: PLC0414
from tests.serve.jobs.arbiter import is_gone
from tests.serve.jobs.setting import FIRST, write_artifact, write_machine

#: Until four ranks are in the folder MET, if given: the arbiter ends with the first host's ranks.
STAY = """
import os, time
folder, until = os.environ.get("MET"), time.monotonic() + 60
if folder:
    open(folder + "/" + os.uname().nodename + str(os.getpid()), "w").close()
    while len(os.listdir(folder)) < 4 and time.monotonic() < until:
        time.sleep(0.05)
"""
#: What a rank shows. It waits for all of its children, of which it has none.
SHOW = f"""
import os
names = ("JOB", "HOST", "ARBITER")
print(os.uname().nodename, *(os.environ.get("DYNAMICCL_" + name) for name in names))
{STAY}
try:
    os.wait()
except ChildProcessError:
    pass
"""
#: A rank of one communicator, which calls the tuner as NCCL does, and says what that logged.
MAKE = f"""
import ctypes, os, sys
from pathlib import Path
from tests.serve.abi import TunerPlugin
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # whose release the tuner asks for
with TunerPlugin(Path(os.environ["NCCL_TUNER_PLUGIN"])).communicator(4, 2) as made:
    print("|".join(made.lines))
{STAY}
"""
Start = Callable[..., list[list[str]]]


@pytest.fixture(name="program")
def program_fixture(artifact: Path, plugin_path: Path, tmp_path: Path) -> str:
    return f"{install(artifact, tmp_path / 'home', plugin_path)['directory']}/bin/dynamiccl-run"


@pytest.fixture(name="start")
def start_fixture(slurm: Slurm) -> Start:
    def start(*command: str, **env: str) -> list[list[str]]:
        """The lines that ranks show, sorted; what the launcher prints is read to its end."""
        done = slurm.run(command, {"MASTER_ADDR": "10.78.0.1", **env})
        return shown_in(done.stdout)

    return start


def shown_in(text: str) -> list[list[str]]:
    """The ranks' lines, sorted: launchers say something of their own between."""
    return sorted(words for line in text.splitlines() if len(words := line.split()) == 4)


def meets(shown: list[list[str]]) -> bool:
    """Whether two ranks of each of two nodes know one arbiter, on the node of the first rank."""
    nodes = [line[0] for line in shown]
    ports = {line[3].rpartition(":")[2] for line in shown}
    addresses = {line[3].rpartition(":")[0] for line in shown}
    return (
        nodes == [line[2] for line in shown] == ["n1", "n1", "n2", "n2"]
        and len({line[1] for line in shown}) == len(ports) == 1
        and addresses in ({"127.0.0.1", "10.78.0.1"}, {"127.0.0.1", "10.78.0.2"})
    )


def test_ranks_of_srun_meet_at_the_first_node(
    start: Start, program: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    srun = ("srun", "-N2", "--ntasks-per-node=2", program, "python3", "-c", SHOW)
    first = start(*srun, MET=str(tmp_path_factory.mktemp("met")))
    assert meets(first), first
    assert is_gone(program.replace("dynamiccl-run", "dynamiccl-arbiter"), 1)
    again = start(*srun, MET=str(tmp_path_factory.mktemp("met")))
    assert meets(again), again
    assert again[0][1] != first[0][1]  # another step


@pytest.mark.parametrize("spoilt", [False, True], ids=["all", "one cannot"])
def test_ranks_of_two_nodes_take_one_table_or_none(
    spoilt: bool, slurm: Slurm, program: str, libnccl: Path, tmp_path: Path
) -> None:
    """The whole way: srun, preparation, arbiter, the tuner's `init`, the table."""
    env = {
        "MASTER_ADDR": "10.78.0.1",
        "DYNAMICCL_ARTIFACT": str(write_artifact(tmp_path / "tables", FIRST, [(2, 4)])),
        "DYNAMICCL_TEST_ROOT": str(write_machine(tmp_path / "machine")),
        "MET": str(tmp_path / "met"),
    }
    (tmp_path / "met").mkdir()
    spoil = '[ "$SLURM_PROCID" != 3 ] || export DYNAMICCL_ARTIFACT=/none; ' if spoilt else ""
    rank = ("sh", "-c", f'{spoil}exec "$0" "$@"', program, sys.executable, "-c", MAKE, str(libnccl))
    done = slurm.run(("srun", "-N2", "--ntasks-per-node=2", *rank), env)
    said = [line for line in done.stdout.splitlines() if "DYNAMICCL: " in line]
    verdict = "NCCL's own choice stands" if spoilt else "the artifact's table, from call 0"
    assert len(said) == 4
    assert all(f"4 ranks on 2 nodes: {verdict}" in line for line in said), said
    if spoilt:
        assert all("/none/plugin.index" in line or "rank 3" in line for line in said), said
    assert is_gone(program.replace("dynamiccl-run", "dynamiccl-arbiter"), 1)


def test_ranks_of_mpirun_meet_where_master_addr_says(
    start: Start, program: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Two ranks may share a line of what mpirun hands on, so each has a file.
    place = f"open('{tmp_path}/' + os.environ['OMPI_COMM_WORLD_RANK'] + '.txt', 'w')"
    show = f"import os, sys\nsys.stdout = {place}\n{SHOW}"
    start(
        *("salloc", "--quiet", "-N2", "--ntasks-per-node=2", "mpirun", "--allow-run-as-root"),
        *("--mca", "btl_tcp_if_include", "eth0", "-x", "MASTER_ADDR", "-x", "MET"),
        *(program, "python3", "-c", show),
        MET=str(tmp_path_factory.mktemp("met")),
    )
    shown = shown_in("".join(path.read_text() for path in tmp_path.glob("*.txt")))
    assert meets(shown), shown
    assert is_gone(program.replace("dynamiccl-run", "dynamiccl-arbiter"), 1)


def test_a_batch_script_is_no_rank(slurm: Slurm, program: str, tmp_path: Path) -> None:
    """Around srun it prepares one host, and the others' ranks see that they were not."""
    script, out, show = tmp_path / "job.sh", tmp_path / "out", SHOW.replace("'", '"')
    options = ("--wait", "-N2", "--ntasks-per-node=2", f"--output={out}", f"--chdir={tmp_path}")
    for line in (f"srun -n4 {program}", program, f"{program} srun -n4"):
        script.write_text(f"#!/bin/sh\nMASTER_ADDR=10.78.0.1 {line} python3 -c '{show}'\n")
        slurm.run(("sbatch", *options, str(script)), dict(os.environ))
        shown = shown_in(out.read_text())
        if line.startswith("srun"):
            assert meets(shown), shown
            continue
        assert "start each rank through dynamiccl-run" in out.read_text()
        assert {line[3] for line in shown} == {"None"}
        assert len({line[2] for line in shown}) == 1  # where the script runs
