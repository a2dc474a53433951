"""A brain process for jobs in adaptive mode."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dynamiccl.serve.brain_policies import POLICIES as BUILT_IN
from tests.serve.jobs.setting import Setting

ROOT: Final = Path(__file__).parents[3]
#: Policies, whose names say what they answer.
POLICIES: Final = """
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.table import MAX_BINS, DecisionTable


class Brain:
    def __init__(self, configs, ranks):
        self.configs, self.ranks, self.asked = configs, ranks, 0

    def decide(self, config, history):
        assert history.tasks and history.table is not None
        chosen = self.configs[self.asked % len(self.configs)]
        self.asked += 1
        return DecisionTable.from_configs(
            [[chosen] * MAX_BINS] * 5,
            num_nodes=config.num_nodes,
            num_ranks=self.ranks or config.num_ranks,
        )


ONE, OTHER = Config(Algorithm.Ring, Protocol.Simple, 4), Config(Algorithm.Ring, Protocol.LL, 2)


def once(artifact):
    return Brain([ONE], None)


def restless(artifact):
    return Brain([ONE, OTHER], None)


class Counting(Brain):
    # Fails where what is told of a key's number of calls does not fit its windows.
    seen, overlaps = {}, 0

    def decide(self, config, history):
        for task in history.tasks:
            key = task.collective, task.bin
            before = self.seen.get(key)
            assert task.num_timed is not None
            if before is not None:
                new = (task.num_timed - before.num_timed) % 256
                kept = max(len(task.calls) - new, 0)
                self.overlaps += 0 < kept < 8
                assert task.calls[:kept] == before.calls[len(before.calls) - kept :]
            self.seen[key] = task
        assert self.asked < 30 or self.overlaps > 0
        return super().decide(config, history)


def counting(artifact):
    return Counting([ONE], None)


def elsewhere(artifact):
    return Brain([ONE], 6)


def fails(artifact):
    return Brain([], None)
"""


@contextmanager
def brain(setting: Setting, artifact: Path, policy: str) -> Iterator[subprocess.Popen[str]]:
    """`dynamiccl-deploy brain`, listening."""
    (setting.root / "policies_of_test.py").write_text(POLICIES)
    name = policy if policy in BUILT_IN else f"policies_of_test:{policy}"
    operands = ["--policy", name, "--artifact", artifact, "--socket", socket_of(setting), "--json"]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import dynamiccl.serve.cli as c; c.main()",
            "brain",
            *map(str, operands),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{setting.root}"},
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["socket"] == str(socket_of(setting))
        yield process
    finally:
        process.kill()
        process.communicate()


def socket_of(setting: Setting) -> Path:
    return setting.run_dir / "brain.sock"
