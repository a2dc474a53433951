"""What commands say as JSON, and the files that they leave: keys, kinds, and what data decide."""

import re
from pathlib import Path
from typing import Any, Final

from dynamiccl.datasets import store
from dynamiccl.libraries import TUNER_NAME
from tests.calls import calls_table, traced
from tests.data_sets import SWEEP, sweep_text
from tests.golden.command import dynamiccl, library, shape
from tests.golden.golden import Golden
from tests.published import ROOT, SAMPLE
from tests.stores import new_store

#: A machine that is not this one.
_MACHINE: Final = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22907"
_RUN: Final = ("trials", "rounds_done", "rows_written", "rows_by_status", "ended")
#: Command lines, in an order in which one makes what another needs; where it is not 0 the exit code
#: that is right, too; and the keys whose values are kept.
LINES: Final[tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...]] = (
    ("collect plan ROOT/examples/h100_4x8.toml", (), ("*",)),
    ("collect run tiny.toml --runner simulator --out data", (), _RUN),
    ("collect run fresh.toml --runner simulator --out fresh", (), _RUN),
    ("collect doctor tiny.toml", (4,), ()),
    ("collect import SAMPLE --out sample --systems SAMPLE/systems.toml", (), ("rows_read",)),
    ("collect describe sample", (), ("*",)),
    ("collect describe data --plots plots", (), ("*",)),
    ("collect health INPUTS/health", (1,), ("*",)),
    ("collect jobs --out calls --workload ddp --jobs 1 --calls 500 --explore 0", (), ("calls",)),
    ("collect fit-simulator --data b300 --base b300-nvlink --out mine.toml", (), ()),
    ("collect compare data fresh", (1,), ("cells",)),
    ("evaluate job calls --data data", (), ("verdict", "calls", "nccl_version", "modelled")),
    ("train list", (), ("*",)),
    ("train fit --data data --recipe gaussian-process --set alpha=0.2", (), ("recipe", "counts")),
    ("evaluate report --data data --policy POLICY --out report", (), ("tasks", "split")),
    ("evaluate gate --policy POLICY --data fresh --known data --out gated", (), ("q", "test")),
    ("evaluate gate --policy POLICY --plan p.toml --sweep tiny.toml --known data", (), ()),
    (
        "evaluate explain gated --collective AllReduce --size 4M --group 4x8",
        (),
        ("system", "first_byte"),
    ),
    ("evaluate simulate --policy POLICY --out simulate --calls 300 --seeds 1", (), ()),
    ("deploy export gated --out artifact", (), ("recipe", "machines")),
    ("deploy table artifact --group 4x8", (), ("system", "num_nodes", "num_ranks")),
    ("deploy explain artifact --calls seen", (), ("calls",)),
    ("deploy bind artifact --fingerprint MACHINE", (), ()),
    ("deploy install artifact --to there PLUGIN", (), ("key_kept", "killed")),
    ("deploy install artifact --to there PLUGIN", (), ("key_kept", "killed")),
    ("deploy doctor artifact PLUGIN", (4,), ()),
)


def _make(folder: Path) -> Any:
    new_store(folder)
    (folder / "tiny.toml").write_text(SWEEP)
    (folder / "fresh.toml").write_text(sweep_text(name='"fresh"', cycles=8, seed=11))
    rows = [traced(i, size_bytes=4 << 20) for i in range(100)]
    store.write_part(folder / "seen", calls_table(*rows), kind="calls", provenance={})
    csv, systems = SAMPLE / "b300_nvlink_allreduce.csv", SAMPLE / "systems.toml"
    b300 = ("import", csv, "--out", "b300", "--systems", systems)
    assert dynamiccl("collect", *b300, directory=folder)[0] == 0
    words: dict[str, list[Any]] = {
        "SAMPLE": sorted(SAMPLE.glob("*.csv")),
        "PLUGIN": ["--plugin", library(TUNER_NAME)],
        "MACHINE": [_MACHINE],
    }
    found: dict[str, Any] = {}
    for line, codes, kept in LINES:
        program, *typed = line.split()
        asked = [there for word in typed for there in words.get(word, [_place(word)])]
        json = () if typed[0] == "bind" else ("--json",)
        code, said = dynamiccl(program, *asked, *json, directory=folder)
        assert code in {0, *codes}, f"{line}: exit code {code}"
        if typed[0] == "fit":
            words["POLICY"] = [said["run_directory"].replace("HERE", str(folder))]
        again = " again" if line in found else ""
        found[line + again] = shape(said, kept)
    outs = ("plots", "report", "gated", "simulate", "artifact", "there")
    return {"said": found, "files": {out: _files(folder / out) for out in outs}}


def _place(word: str) -> str:
    places = {"ROOT": ROOT, "SAMPLE": SAMPLE, "INPUTS": Path(__file__).with_name("inputs")}
    top, slash, below = word.partition("/")
    return f"{places.get(top, top)}{slash}{below}"


def _files(folder: Path) -> list[str]:
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"\b[0-9a-f]{16}\b", "HASH", name) for name in names)


GOLDENS: Final = (Golden("commands", _make, 1e-6),)
