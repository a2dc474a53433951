"""A fake sweep: units of work that take a while, committed one by one as `run` does.

Usage: fake_sweep.py OUT UNITS SECONDS [--shard I/K]. Leaves a file for each unit.
With HANG_AT=UNIT it hangs there, once, whatever it is told.
"""

import os
import sys
import time
from pathlib import Path

from dynamiccl.collect.processes.interrupt import Interrupt


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def main() -> int:
    out, units, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    shard, shards = (int(word) for word in (sys.argv[5] if len(sys.argv) > 5 else "0/1").split("/"))
    say(f"start {os.environ['SLURM_JOB_NUM_NODES']} nodes")
    with Interrupt() as interrupt:
        for unit in range(shard, units, shards):
            done = out / f"unit-{unit}"
            if done.exists():
                continue
            if str(unit) == os.environ.get("HANG_AT") and not (out / "hung").exists():
                (out / "hung").touch()
                time.sleep(600)
            time.sleep(seconds)
            # Made exclusively: a unit that is done twice ends the job.
            with done.open("x") as file:
                file.write(f"{os.environ['SLURM_JOB_ID']}\n")
            if interrupt.requested:
                say(f"clean stop after {interrupt.cause}")
                return 0
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
