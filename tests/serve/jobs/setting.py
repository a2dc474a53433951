"""The surroundings of a job under the plugin: artifacts, machine, environment."""

import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.serve.abi import prepared_environment, write_bare_artifact
from tests.serve.tables import uniform

SYSTEM: Final = "test-system"
#: Two decisions that NCCL has for every collective, and that its own choice rarely is.
FIRST: Final = Config(Algorithm.Ring, Protocol.LL128, 8)
SECOND: Final = Config(Algorithm.Ring, Protocol.Simple, 4)

#: Paced as a job is, and long enough for ranks on a busy machine to agree in the background.
JOB: Final[dict[str, Any]] = {"release": "2.30", "rate": 4000, "calls": 6000}

NCCL_CODES: Final = {
    "2.24": 22403,
    "2.25": 22501,
    "2.26": 22606,
    "2.27": 22707,
    "2.28": 22809,
    "2.29": 22907,
    "2.30": 23007,
}
#: And the harness's "2.31", a release whose source was not read.
CODES: Final = (*NCCL_CODES.values(), 23102)
GPU: Final = "NVIDIA Test GPU"
NUM_GPUS: Final = 8
#: Of messages between ranks and arbiters. It marks the arbiters of this process.
KEY: Final = secrets.token_hex(16)


def shapes_of(num_ranks: int, num_nodes: int = 1) -> list[tuple[int, int]]:
    """Every (nodes, ranks) that a job's groups can have."""
    return [
        (nodes, ranks)
        for nodes in range(1, num_nodes + 1)
        for ranks in range(2, num_ranks + 1)
        if ranks % nodes == 0
    ]


def write_artifact(directory: Path, config: Config, shapes: Iterable[tuple[int, int]]) -> Path:
    """An artifact that decides `config` for everything, on every release of NCCL."""
    tables = [uniform(config, *shape) for shape in shapes]
    machines = {fingerprint(code): SYSTEM for code in CODES}
    write_bare_artifact(directory, SYSTEM, *tables, machines=machines)
    return directory


def fingerprint(nccl_code: int) -> str:
    return f"gpu={GPU}*{NUM_GPUS};mig=0;nic=infiniband*{NUM_GPUS};nccl={nccl_code}"


def write_machine(root: Path) -> Path:
    """The files that a node's driver and kernel show; see DYNAMICCL_TEST_ROOT."""
    for i in range(NUM_GPUS):
        information = root / f"proc/driver/nvidia/gpus/0000:{i:02x}:00.0/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t {GPU}\nIRQ:   \t\t 100\n")
        port = root / f"sys/class/infiniband/mlx5_{i}/ports/1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return root


def prepared(artifact: Path) -> dict[str, str]:
    """What dynamiccl-run says of an artifact and of this machine."""
    return prepared_environment(artifact, SYSTEM, *CODES) | {
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_MACHINE": fingerprint(0).removesuffix(";nccl=0"),
        "DYNAMICCL_KILL_FILE": str(artifact / "kill"),
    }


@dataclass(frozen=True, slots=True)
class Setting:
    """The files of one job under `root`: two artifacts and one machine."""

    root: Path
    #: 16 hex digits: which run of which job.
    job: str
    artifact: Path
    other_artifact: Path
    machine: Path

    def sweep(self) -> None:
        """Remove the words that ranks have waited at in vain, as dynamiccl-run does."""
        for word in Path("/dev/shm").glob(f"dynamiccl-{os.geteuid()}-{self.job}-*"):
            word.unlink()

    def by_arbiter(self, address: str) -> dict[str, str]:
        """Environment of ranks that may all be on several hosts."""
        return self.environment() | {
            "DYNAMICCL_ARBITER": address,
            "DYNAMICCL_KEY": KEY,
            "DYNAMICCL_WORD": "0",
        }

    def environment(self) -> dict[str, str]:
        """Environment of the ranks."""
        return prepared(self.artifact) | {"DYNAMICCL_JOB": self.job}


def make_setting(root: Path, *, num_ranks: int, num_nodes: int = 1) -> Setting:
    """Create the files of a job of this size under `root`."""
    shapes = shapes_of(num_ranks, num_nodes)
    return Setting(
        root=root,
        job=secrets.token_hex(8),
        artifact=write_artifact(root / "artifact", FIRST, shapes),
        other_artifact=write_artifact(root / "other-artifact", SECOND, shapes),
        machine=write_machine(root / "machine"),
    )
