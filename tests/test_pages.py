"""Every command of the README and of docs/, run where there is what it names.

What makes a command long is made short, by options that are added; what needs Slurm, Ray, a server
or GPUs is run by the test that is named here. docs/start.md has a test of its own.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.datasets import store
from dynamiccl.train.policy import save_script
from dynamiccl.train.trigger import TriggerModule
from tests.calls import call, calls_table
from tests.cli.in_process import run
from tests.data_sets import with_few_channels
from tests.stores import new_store

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SWEEP: Final = """
name = "small"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "64K", max = "64M", steps_per_octave = 1 }
nccl_version = "2.27.5"
cycles = CYCLES

[simulator]
seed = SEED
"""
LOG: Final = "1048576 262144 float sum -1 100.0 10.49 18.35 0 102.0 10.28 17.99 0\n"
SHORT: Final = "--set steps=60 --set steps_per_epoch=30 --set hidden_sizes=16 --set num_members=2"
PLAYED: Final = (
    "--set actors=1 --set steps=4 --set steps_per_epoch=2 --set jobs=1 --set num_steps=2 "
    "--set episode_rounds=4"
)
#: A command by how it begins -> what is added to it here; the first that fits counts.
ADDED: Final = {
    r"dynamiccl-collect run .*(slurm|health|fresh|sweep).*": "--runner simulator",
    r"dynamiccl-collect jobs --hold": "--out held --calls 300 --jobs 1",
    r"dynamiccl-collect jobs": "--calls 300 --jobs 1",
    r"dynamiccl-train fit --recipe gaussian-process": "--data data",
    r"dynamiccl-train fit .*gaussian-process": "",
    r"dynamiccl-train fit .*a3c": PLAYED,
    r"dynamiccl-train fit": SHORT,
    r"dynamiccl-train study": f"{SHORT} --seeds 1 --jobs 1",
    r"dynamiccl-evaluate simulate": "--calls 300 --seeds 1",
    r"dynamiccl-deploy install": "--ungated",
    r"dynamiccl-deploy bind": "--fingerprint gpu=none*0;mig=0;nic=socket*1;nccl=22907",
    r"dynamiccl-deploy table": "artifact --group 4x8",
}
#: What is run elsewhere -> by which test, and the word that shows it there.
ELSEWHERE: Final = {
    r"study .*--join|--jobs 0": ("tests/cluster/test_study_array.py", "join"),
    r"--ray": ("tests/cluster/test_impala_ray.py", "--ray"),
    r"--optuna": ("tests/train/test_study.py", "optuna"),
    r"--resume": ("tests/train/test_study.py", "--resume"),
    r"--objective job": ("tests/cli/test_slack.py", '"--objective", "job"'),
    r"export RUN --group": ("tests/train/test_gaussian.py", "groups=[(16, 8)]"),
    r"dynamiccl-train study": ("tests/train/test_study.py", "study"),
    r"dynamiccl-deploy ab": ("tests/serve/test_ab.py", '"dynamiccl-deploy", "ab"'),
    r"dynamiccl-deploy brain": ("tests/serve/test_brain.py", '"brain"'),
    r"dynamiccl-collect fit-simulator": ("tests/golden/commands.py", "fit-simulator"),
    r"dynamiccl-train trigger": ("tests/train/test_trigger.py", "trigger"),
}
#: Of what the machine here lacks, a doctor speaks with exit code 4.
MAY_FAIL: Final = {r"dynamiccl-\w+ doctor": 4}


def written() -> Iterator[tuple[str, str]]:
    """(page, command) of all consoles, and of all inline commands with an operand."""
    for page in PAGES:
        if page.name == "start.md":
            continue
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"dynamiccl-(?:collect|train|evaluate|deploy) .*", line)
                if found:
                    yield page.name, " ".join(re.sub(r"\s+#.*", "", found[0]).split())
        plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for inline in re.findall(r"`(dynamiccl-(?:collect|train|evaluate|deploy)\s[^`]*)`", plain):
            if len(inline.split()) > 2 and "OPTIONS" not in inline:
                yield page.name, " ".join(inline.split())


LINES: Final = list(dict.fromkeys(command for _, command in written()))


def write_trigger(folder: Path) -> None:
    """One that finds nothing sensible, where a run of `dynamiccl-train trigger` leaves its own."""
    folder.mkdir()
    save_script(TriggerModule(0.05).eval(), folder / "trigger.pt")
    (folder / "trigger.json").write_text(json.dumps({"false_alarms_per_1e5": 0.5}))


def query(database: Path, text: str) -> list[tuple[str, ...]]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(text).fetchall()


@pytest.fixture(scope="module")
def world(
    build_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A directory in which everything is that the pages name."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "out").mkdir()
    (folder / "out" / "plugin").symlink_to(build_dir(""))
    before = Path.cwd()
    os.chdir(folder)
    try:
        (folder / "datasets").symlink_to(ROOT / "datasets")
        shutil.copytree(ROOT / "examples", folder / "examples")
        slurm = folder / "examples" / "slurm_h100.toml"
        with_few_channels(slurm)
        small = slurm.read_text().replace("steps_per_octave = 2", "steps_per_octave = 1")
        slurm.write_text(small.replace("cycles = 5", "cycles = 2"))
        (folder / "sweep.toml").write_text(SWEEP.replace("SEED", "1").replace("CYCLES", "3"))
        again = SWEEP.replace('"small"', '"fresh"').replace("SEED", "2").replace("CYCLES", "8")
        (folder / "fresh.toml").write_text(again)
        (folder / "all_reduce.log").write_text(LOG)
        shutil.copytree(ROOT / "tests" / "data" / "traces", folder / "traces")
        sample = (ROOT / "datasets" / "sample" / "b300_nvlink_allreduce.csv").read_text()
        (folder / "sweeps.csv").write_text("".join(sample.splitlines(keepends=True)[:61]))
        (folder / "logs").mkdir()
        (folder / "logs" / "all_reduce.log").write_text(LOG)
        shutil.copyfile(ROOT / "examples" / "attention.py", folder / "attention.py")
        write_trigger(folder / "trigger")
        new_store(folder)
        rows = [call(i, 100.0, num_ranks=32, num_nodes=4) for i in range(20)]
        store.write_part(folder / "calls", calls_table(*rows), kind="calls", provenance={})
        for line in (
            "dynamiccl-collect run sweep.toml --runner simulator --out data",
            "dynamiccl-collect run fresh.toml --runner simulator --out fresh",
            "dynamiccl-collect run examples/health.toml --runner simulator --out well",
            "dynamiccl-train fit --data data --recipe gaussian-process --set alpha=0.2",
            "dynamiccl-evaluate gate --policy models:/dynamiccl@candidate --data fresh --out gated",
            "dynamiccl-deploy export gated --out artifact",
            "dynamiccl-collect import traces --out job --system mycluster",
            "dynamiccl-collect import sweeps.csv --out b300 --system b300-nvlink-8x",
        ):
            code, said = run(line)
            assert code == 0, f"{line}\n{said}"
        for name, alike in (("before", "fresh"), ("after", "data")):
            shutil.copytree(folder / alike, folder / name)
        [(run_id,)] = query(folder / "mlflow.db", "select run_uuid from runs")
        (folder / "run_id").write_text(run_id)
        yield folder
    finally:
        os.chdir(before)


def in_world(line: str, world: Path, home: Path) -> str:
    """The line with what is there in place of what stands for it."""
    run_id = (world / "run_id").read_text()
    if " gate " in line:  # the policy of this world is of the simulated sweep
        line = line.replace("examples/slurm_h100.toml", "examples/h100_4x8.toml")
    for word, there in (
        ("TRIGGER_RUN_ID", "trigger"),
        ("TRIGGER_RUN", "trigger"),
        ("mlruns/.../artifacts", "trigger"),
        ("RUN_ID", run_id),
        ("RUN", run_id),
        ("ARTIFACT", "artifact"),
        ("DATA", "calls"),
        ("DIR", "logs"),
        ("NAME", "mycluster"),
        ("/shared/dynamiccl/artifact", "artifact"),
        ("/shared/dynamiccl", str(home / "shared")),
        ("../nccl-tests/build", "logs"),
    ):
        line = re.sub(rf"(?<![\w-]){re.escape(word)}\b", there, line)
    return line


def test_there_are_many() -> None:
    assert len(LINES) > 60


@pytest.mark.parametrize("line", LINES)
def test_it_runs(line: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for begin, (path, word) in ELSEWHERE.items():
        if re.search(begin, line):
            assert word in (ROOT / path).read_text(encoding="utf-8")
            command, subcommand = line.split()[:2]
            _, shown = run(f"{command} {subcommand} --help")
            assert set(re.findall(r"(?<=\s)--[\w-]+", line)) <= set(re.findall(r"--[\w-]+", shown))
            return
    home = tmp_path / "home"
    shutil.copytree(world, home, symlinks=True)
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "200")
    added = next((text for begin, text in ADDED.items() if re.match(begin, line)), "")
    asked = in_world(line, world, home)
    for out in re.findall(r"--(?:out|plan) ([\w./]+)", asked):
        if out not in {"data", "fresh"} or "run" in line.split()[:2]:
            target = home / out
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    code, said = run(f"{asked} {shlex.join(added.split())}")
    allowed = {0} | {code for begin, code in MAY_FAIL.items() if re.match(begin, line)}
    assert code in allowed, f"{asked} {added}\n{said}"
