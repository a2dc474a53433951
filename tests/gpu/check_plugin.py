"""The plugin inside real NCCL: two ranks on one GPU. Run by hand where a GPU is:

    python tests/gpu/check_plugin.py

It needs a CUDA build of torch (NCCL 2.21 or newer) and a compiler, and takes a minute. Its two
processes get different NCCL_HOSTIDs, so that NCCL accepts both on one GPU and connects them through
sockets on the loopback interface: good for seeing what NCCL chose, not for timing.

Three jobs run the same all-reduces: without the plugin, with a table that always abstains, and with
a table that forces Ring/Simple/2 channels. NCCL's log (of rank 0, the only one that prints it) says
what ran; the sums, and that nothing hangs, say that the ranks agreed. It fails unless abstaining
changes nothing and forcing changes every call.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from dynamiccl.collect.nccl_tests.tuning import TuningLog
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.serve.build import build_plugin
from dynamiccl.serve.table import MAX_BINS, DecisionTable, relative_path

RANKS: Final = 2
SIZES: Final = [1 << power for power in range(12, 25, 2)]
SYSTEM: Final = "gpu-check"
FORCED: Final = Config(Algorithm.Ring, Protocol.Simple, 2)
NO_DEVICE: Final = 77


def main() -> int:
    """Run the three jobs and compare; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return worker(arguments.rank)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return NO_DEVICE
    plugin = build_plugin(Path("out/plugin"))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bare = job(root / "bare", {"NCCL_TUNER_PLUGIN": "libnccl-tuner-absent.so"})
        idle = job(root / "idle", settings(plugin, root / "idle-artifact", None))
        forced = job(root / "forced", settings(plugin, root / "forced-artifact", FORCED))
    problems = [
        f"{size} bytes: abstaining changed {choice} to {idle.get(size)}"
        for size, choice in bare.items()
        if choice != idle.get(size)
    ]
    problems += [
        f"{size} bytes: forced, and yet {choice}"
        for size, choice in forced.items()
        if not fits(choice)
    ]
    if not bare or forced.keys() != bare.keys():
        problems.append(f"choices logged: {len(bare)} bare, {len(idle)} idle, {len(forced)} forced")
    print(json.dumps({"bare": len(bare), "forced": len(forced), "problems": problems}, indent=1))
    return 1 if problems else 0


def fits(choice: str) -> bool:
    """Whether a choice is the forced one; small messages use fewer channels than asked."""
    return choice.startswith("Ring/Simple/")


def settings(plugin: Path, artifact: Path, config: Config | None) -> dict[str, str]:
    """Write an artifact's table that always says `config`; return the job's environment."""
    path = artifact / relative_path(SYSTEM, RANKS, RANKS)
    path.parent.mkdir(parents=True)
    rows: list[list[Config | None]] = [[None] * MAX_BINS for _ in range(5)]
    rows[4] = [config] * MAX_BINS
    table = DecisionTable.from_configs(rows, num_nodes=RANKS, num_ranks=RANKS)
    path.write_bytes(table.to_bytes())
    return {
        "NCCL_TUNER_PLUGIN": str(plugin.resolve()),
        "DYNAMICCL_ARTIFACT": str(artifact),
        "DYNAMICCL_SYSTEM": SYSTEM,
    }


def job(folder: Path, environment: dict[str, str]) -> dict[int, str]:
    """Run both ranks; return size -> choice as rank 0 of NCCL logged it."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank)],
            env={
                **common,
                "NCCL_HOSTID": f"rank{rank}",
                "NCCL_DEBUG_FILE": str(folder / f"rank{rank}.log"),
            },
        )
        for rank in range(RANKS)
    ]
    try:
        codes = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    if any(codes):
        raise SystemExit(f"a rank failed: exit codes {codes}; logs in {folder}")
    log = (folder / "rank0.log").read_text(encoding="utf-8", errors="replace")
    if "DYNAMICCL_SYSTEM" in environment and "DYNAMICCL:" not in log:
        raise SystemExit("NCCL did not load the plugin; its log has no DYNAMICCL line")
    return choices(log)


def choices(log: str) -> dict[int, str]:
    """What NCCL chose, by message size in bytes."""
    lines = TuningLog()
    for line in log.splitlines():
        lines.add(line)
    agreed, _ = lines.resolve(Collective.AllReduce, RANKS)
    return {size: Config(c.algorithm, c.protocol, c.num_channels).key for size, c in agreed.items()}


def worker(rank: int) -> int:
    """One rank: all-reduce every size and check the sum."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS)
    for size in SIZES:
        data = torch.full((size // 4,), float(rank + 1), device="cuda")
        dist.all_reduce(data)
        torch.cuda.synchronize()
        if not bool((data == 3.0).all()):
            return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
