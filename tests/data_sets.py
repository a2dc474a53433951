"""Small simulated data sets for tests of training, evaluation and deployment."""

import re
from pathlib import Path

import pytest

from dynamiccl.collect.simulated import simulate
from tests.once import once

SWEEP = """
name = "tiny"
system = "sim-4x8"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "64K", max = "1G" }
nccl_version = "2.27.5"
cycles = 3
[simulator]
seed = 3
"""
SYSTEM = "sim-4x8"


def sweep_text(**lines: object) -> str:
    """SWEEP with other lines: `cycles=8`, or one with more behind it, after a line break."""
    text = SWEEP
    for key, value in lines.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
        assert count == 1, key
    return text


def make_data(out: Path, text: str = SWEEP) -> Path:
    return simulate(text, out)


def with_few_channels(example: Path) -> None:
    """Write a smaller variant of examples/slurm_h100.toml."""
    text = example.read_text(encoding="utf-8")
    channels = "0, 1, 2, 4, 8, 12, 16, 24, 32"
    assert channels in text
    example.write_text(text.replace(channels, "0, 2, 8, 32"), encoding="utf-8")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "data", lambda folder: make_data(folder / "store")) / "store"
