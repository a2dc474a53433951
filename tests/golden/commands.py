"""What the commands say as JSON, and what they leave on disk.

Figures that data alone decide are kept, those of a trained network as the kinds of values that they
are: `tables` keeps its decisions.
"""

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from dynamiccl.datasets import store
from dynamiccl.libraries import TUNER_NAME
from tests.calls import calls_table, traced
from tests.data_sets import SWEEP
from tests.golden.command import Done, dynamiccl, shape
from tests.golden.frames import equal_frames, packed, read, tables
from tests.golden.golden import Comparer, Golden, close_values
from tests.plugin_build import built
from tests.published import ROOT, SAMPLE, WHOLE
from tests.stores import new_store, uri_of

_INPUTS: Final = Path(__file__).with_name("inputs")
_FRESH: Final = {'"tiny"': '"fresh"', "cycles = 3": "cycles = 8", "seed = 3": "seed = 11"}
_ASK: Final = ("--collective", "AllReduce", "--size", "4M", "--ranks", "32", "--nodes", "4")
_SHAPE: Final = ("--group", "4x8")
#: A machine that is not this one.
_MACHINE: Final = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22907"


class Scene:
    """Simulated data, a policy of little training on it, the gate's verdict and an artifact."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="golden-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        new_store(self.folder)
        fresh = SWEEP
        for old, new in _FRESH.items():
            fresh = fresh.replace(old, new)
        (self.folder / "tiny.toml").write_text(SWEEP)
        (self.folder / "fresh.toml").write_text(fresh)
        for name, out in (("tiny", "data"), ("fresh", "fresh")):
            words = ("run", f"{name}.toml", "--runner", "simulator", "--out", out, "--json")
            assert self.run("collect", *words).code == 0

    def run(self, program: str, *words: object) -> Done:
        """Run a command in the folder."""
        return dynamiccl(program, *words, directory=self.folder)


@cache
def scene() -> Scene:
    """The scene of this process: data."""
    return Scene()


@cache
def fitted(steps: int = 90) -> Any:
    """What `fit` says of a short training on it."""
    words = ("--set", f"steps={steps}", "--set", f"steps_per_epoch={steps // 9}", "--seed", "0")
    uri = uri_of(scene().folder)
    return (
        scene().run("train", "fit", "--data", "data", *words, "--tracking-uri", uri, "--json").json
    )


#: Gives the run directory of as long a training as `_policy` has, where tests made one already.
trained: Callable[[], Path] | None = None


def _policy() -> Path:
    """The run directory of a policy that gains."""
    return _run_directory(fitted(900)) if trained is None else trained()


def _run_directory(said: Any) -> Path:
    return scene().folder / str(said["run_directory"]).removeprefix("HERE/")


@cache
def gated() -> Any:
    """What `gate` says of that policy and fresh runs."""
    words = ("--policy", _policy(), "--data", "fresh", "--known", "data", "--out", "gated")
    return scene().run("evaluate", "gate", *words, "--json").json


@cache
def exported() -> Any:
    """What `export` says of what the gate let through."""
    gated()
    return scene().run("deploy", "export", "gated", "--out", "artifact", "--json").json


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _some(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The document's keys and kinds, and the values of some keys."""
    return {"kinds": shape(document), **{key: document[key] for key in keys}}


def _plan(directory: Path) -> Any:
    small = directory / "small.toml"
    text = (ROOT / "examples" / "slurm_h100.toml").read_text(encoding="utf-8")
    channels = "0, 1, 2, 4, 8, 12, 16, 24, 32"
    assert channels in text
    small.write_text(text.replace(channels, "0, 2, 8, 32"), encoding="utf-8")
    files = (ROOT / "examples" / "h100_4x8.toml", small)
    return [dynamiccl("collect", "plan", f, "--json", directory=directory).json for f in files]


def _doctor(directory: Path) -> Any:
    """The checks by name; how this machine does is not kept."""
    (directory / "s.toml").write_text(SWEEP)
    asked = (("doctor", "--json"), ("doctor", "s.toml", "--json"))
    return [_checks(dynamiccl("collect", *words, directory=directory)) for words in asked]


def _checks(done: Done) -> Any:
    found = done.document(0, 4)
    return {"names": [check["name"] for check in found], "kinds": shape(found)}


def _describe(directory: Path) -> Any:
    words = (*sorted(SAMPLE.glob("*.csv")), "--out", "sample", "--systems", SAMPLE / "systems.toml")
    sample = dynamiccl("collect", "import", *words, directory=directory)
    assert sample.code == 0, sample.err
    said = dynamiccl("collect", "describe", "sample", "--json", directory=directory).json
    plots = scene().run("collect", "describe", "data", "--plots", "plots", "--json")
    return {"sample": said, "simulated": plots.json, "files": _files(scene().folder / "plots")}


def _health(directory: Path) -> Any:
    """Pairs of four simulated nodes, one NIC of which takes half as long again."""
    done = dynamiccl("collect", "health", _INPUTS / "health", "--json", directory=directory)
    return {"exit": done.code, "said": done.document(1)}


def _health_pairs(directory: Path) -> Any:
    """Logs of pairs of nodes, as clusters publish them."""
    logs = sorted((WHOLE / "public-cases").glob("pair_*.log"))
    if not logs:
        pytest.skip(f"{WHOLE} is not here")
    words = ("import", *logs, "--out", "data", "--system", "x")
    assert dynamiccl("collect", *words, directory=directory).code == 0
    done = dynamiccl("collect", "health", "data", "--json", directory=directory)
    return {"exit": done.code, "said": done.document(1) if done.code in {0, 1} else None}


def _shapes(directory: Path) -> Any:
    words = ("shapes", "--system", "lab", "--machine", "h100-ib", "--nccl", "2.29.7")
    groups = ("--group", "16x8", "--group", "1x8", "--out", "data")
    done = dynamiccl("collect", *words, *groups, directory=directory)
    assert done.code == 0, done.err
    order = ("num_ranks", "collective", "algorithm", "protocol")
    return tables(directory / "data", order=order)


def _jobs(directory: Path) -> Any:
    words = ("jobs", "--out", "data", "--jobs", "2", "--calls", "400", "--hold", "4", "--json")
    kinds = ("--workload", "moe", "--workload", "decode")
    said = dynamiccl("collect", *words, *kinds, directory=directory).json
    calls = read(directory / "data", "calls", order=("run", "comm", "sequence"))
    return {"calls": said["calls"], "rows": packed(calls)}


def _fit_simulator(directory: Path) -> Any:
    sample = SAMPLE / "b300_nvlink_allreduce.csv"
    words = ("import", sample, "--out", "data", "--systems", SAMPLE / "systems.toml")
    assert dynamiccl("collect", *words, directory=directory).code == 0
    fit = ("fit-simulator", "--data", "data", "--base", "b300-nvlink", "--out", "mine.toml")
    said = dynamiccl("collect", *fit, "--json", directory=directory).json
    plan = ROOT / "examples" / "h100_4x8.toml"
    text = plan.read_text().replace("seed = 1", 'seed = 1\nsystem = "mine.toml"')
    text = text.replace("num_nodes = 4", "num_nodes = 1").replace('"AllGather", "Reduce', '"Reduce')
    (directory / "s.toml").write_text(text)
    planned = dynamiccl("collect", "plan", "s.toml", "--json", directory=directory)
    return {"said": said, "plan_on_it": planned.json if planned.code == 0 else planned.code}


def _compare(directory: Path) -> Any:
    """Ring became slower from 16 MiB on, and NCCL's own choice faster from 1 to 8 MiB."""
    head = "system,collective,size_bytes,num_nodes,ranks_per_node,nccl_version,algorithm,protocol"
    draw = random.Random(1)
    for name, version, slow, own in (("old", "2.27.5", 1.0, 1.0), ("new", "2.29.7", 1.3, 0.8)):
        lines = [f"{head},is_default,run,statistic,in_place,time_us"]
        for run, k in product(range(5), range(12, 30)):
            base_us = 20 + (1 << k) / 1e5
            times_us = {
                ",,true": base_us * (own if 20 <= k < 24 else 1.0),
                "Ring,Simple,false": 0.9 * base_us * (slow if k >= 24 else 1.0),
                "Tree,LL,false": 1.1 * base_us,
            }
            lines += [
                f"box,allreduce,{1 << k},1,8,{version},{config},r{run},mean,false,"
                f"{time_us * draw.gauss(1.0, 0.004):.3f}"
                for config, time_us in times_us.items()
            ]
        (directory / f"{name}.csv").write_text("\n".join(lines) + "\n")
        words = ("import", f"{name}.csv", "--out", name, "--sweep", name)
        done = dynamiccl("collect", *words, directory=directory)
        assert done.code == 0, done.err
    done = dynamiccl("collect", "compare", "old", "new", "--json", directory=directory)
    # Exit code 1: something is slower.
    said = done.document(1)
    keys = ("config", "first_bytes", "last_bytes", "is_confirmed")
    changes = [
        {**{key: one[key] for key in keys}, "change": round(one["change"], 2)}
        for one in said["changes"]
    ]
    cells = [system["cells"] for system in said["systems"]]
    whole = {key: said[key] for key in ("is_slower", "is_changed", "other_changes")}
    return {**whole, "cells": cells, "changes": changes}


def _job(_: Path) -> Any:
    """Simulated jobs against the simulated sweep: one that gains nothing, one that may."""
    return {workload: _job_of(workload) for workload in ("ddp", "decode")}


def _job_of(workload: str) -> Any:
    at = scene()
    out = f"job-{workload}"
    words = ("--workload", workload, "--jobs", "1", "--calls", "500", "--explore", "0")
    assert at.run("collect", "jobs", "--out", out, *words).code == 0
    said = at.run("evaluate", "job", out, "--data", "data", "--json").json
    shares = [key for key in said if "_share" in key]
    keys = ("verdict", "calls", "nccl_version", "modelled", "arms", "whole_us", *shares)
    return {key: said[key] for key in keys}


def _list(directory: Path) -> Any:
    """Recipes by name."""
    said = dynamiccl("train", "list", "--json", directory=directory).json
    return {one["name"]: one for one in said}


def _fit(_: Path) -> Any:
    said = fitted()
    keys = ("recipe", "steps", "validation_default_regret", "validation_tasks", "num_actions")
    return {**_some(said, *keys, "counts"), "files": _files(_run_directory(said))}


#: What a report draws, or learns step by step: it follows the order of parts, so the clock decides.
_DRAWN: Final = (
    *("crossfit", "interval", "gain_crossfit", "gain_interval", "probes", "verdicts"),
    *("headline", "ddqn-dueling", "coordinate-descent"),
)


def _report(_: Path) -> Any:
    at = scene()
    words = ("--data", "data", "--policy", _policy(), "--out", "report", "--no-log", "--json")
    said = at.run("evaluate", "report", *words).json
    return {"said": _without_drawn(said), "files": _files(at.folder / "report")}


def _without_drawn(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: shape(v) if k in _DRAWN else _without_drawn(v) for k, v in value.items()}


def _gate(_: Path) -> Any:
    said = gated()
    at = scene()
    words = ("--policy", _policy(), "--plan", "p.toml", "--sweep", "tiny.toml", "--known", "data")
    plan = at.run("evaluate", "gate", *words, "--json").json
    return {
        "keys": sorted(said),
        "q": said["q"],
        "bins": sum(said["counts"].values()),
        "cell": shape(said["cells"]),
        "collectives": sorted({cell["collective"] for cell in said["cells"]}),
        "plan": {"keys": sorted(plan), "sweep": sorted(plan["sweep"])},
        "files": _files(at.folder / "gated"),
    }


def _explain(_: Path) -> Any:
    gated()
    said = scene().run("evaluate", "explain", "gated", *_ASK, "--json").json
    configs = sorted(one["config"] for one in said["predictions"])
    gate = sorted(said.pop("gate"))
    return {**_some(said, "system", "first_byte", "last_byte"), "configs": configs, "gate": gate}


def _simulate(_: Path) -> Any:
    """Figures of what needs no network; the policy's as kinds of values."""
    at = scene()
    words = ("--calls", "300", "--jobs", "1", "--seeds", "2", "--json")
    said = at.run("evaluate", "simulate", "--policy", _policy(), "--out", "simulate", *words).json
    fixed = ("nccl-default", "best fixed config", "oracle")
    rows = {row["name"]: row for row in said.pop("rows")}
    return {
        **{key: value for key, value in said.items() if key not in {"scenario", "verdicts"}},
        "names": sorted(rows),
        "rows": {name: rows[name] if name in fixed else shape(rows[name]) for name in rows},
        "files": _files(at.folder / "simulate"),
    }


def _export(_: Path) -> Any:
    said = exported()
    tables_of = [
        {k: t[k] for k in ("system", "num_nodes", "num_ranks", "entries")} for t in said["tables"]
    ]
    at = scene()
    return {
        **_some(said, "gated", "recipe", "actions", "machines"),
        "tables": tables_of,
        "shown": shape(said),
        "files": _files(at.folder / "artifact"),
    }


def _table(_: Path) -> Any:
    exported()
    at = scene()
    said = at.run("deploy", "table", "artifact", *_SHAPE).json
    bins = {
        name: [[row["bin"], row["size_bytes"], row["first_byte"], row["last_byte"]] for row in rows]
        for name, rows in said["decisions"].items()
    }
    csv = at.run("deploy", "table", "artifact", *_SHAPE, "--format", "nccl-csv")
    return {
        "kinds": shape(said),
        "shape": [said["system"], said["num_nodes"], said["num_ranks"]],
        "bins": bins["AllReduce"],
        "collectives": sorted(bins),
        "csv": sorted({row.split(",")[0] for row in csv.out.splitlines() if row[:1] != "#"}),
    }


def _installed(directory: Path) -> Any:
    """bind, install and doctor of an artifact of its own."""
    if shutil.which("c++") is None or shutil.which("cmake") is None:
        pytest.skip("no compiler to build the plugin with")
    exported()
    shutil.copytree(scene().folder / "artifact", directory / "artifact")
    plugin = built() / TUNER_NAME
    run = partial(dynamiccl, "deploy", directory=directory)
    run("bind", "artifact", "--fingerprint", _MACHINE)
    install = ("install", "artifact", "--to", "there", "--plugin", plugin, "--json")
    first, again = run(*install).json, run(*install).json
    return {
        "install": _some(first, "written", "previous_sha256", "key_kept", "killed"),
        "again": _some(again, "written", "key_kept", "killed"),
        "files": [name for name in _files(directory / "there") if "artifact" not in name],
        "doctor": _checks(run("doctor", "artifact", "--plugin", plugin, "--json")),
    }


def _explain_calls(directory: Path) -> Any:
    """What an artifact would change in a job's calls."""
    exported()
    at = scene()
    sizes = {"AllReduce": (4194304, 100), "AllGather": (1048576, 20)}
    rows = [
        traced(i, collective=name, size_bytes=size)
        for name, (size, count) in sizes.items()
        for i in range(count)
    ]
    store.write_part(directory / "calls", calls_table(*rows), kind="calls", provenance={})
    words = ("artifact", "--calls", directory / "calls", "--json")
    said = at.run("deploy", "explain", *words).json
    outlook = said.pop("outlook")
    return {"kinds": shape(said), "outlook": sorted(outlook), "calls": outlook["calls"]}


_MAKERS: Final[Mapping[str, tuple[Callable[[Path], Any], Comparer]]] = {
    "plan": (_plan, close_values(1e-6)),
    "doctor": (_doctor, equal_frames),
    "describe": (_describe, equal_frames),
    "health": (_health, equal_frames),
    "health_pairs": (_health_pairs, equal_frames),
    "shapes": (_shapes, equal_frames),
    "jobs": (_jobs, equal_frames),
    # Of a fit by least squares the last digits are the machine's.
    "fit_simulator": (_fit_simulator, close_values(1e-3)),
    "compare": (_compare, equal_frames),
    "job": (_job, equal_frames),
    "list": (_list, equal_frames),
    "fit": (_fit, equal_frames),
    "report": (_report, equal_frames),
    "gate": (_gate, equal_frames),
    "explain": (_explain, equal_frames),
    "simulate": (_simulate, equal_frames),
    "export": (_export, equal_frames),
    "table": (_table, equal_frames),
    "install": (_installed, equal_frames),
    "explain_calls": (_explain_calls, equal_frames),
}
GOLDENS: Final = tuple(
    Golden(f"commands-{name}", make, compare) for name, (make, compare) in _MAKERS.items()
)
