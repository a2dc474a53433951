"""docs/start.md, line by line: its four paths, on simulated and on sample data.

What this machine lacks is played: GPUs by the simulator, as in the page's rehearsal, and a job
(`train.py` plays one by the harness that behaves as NCCL does, under whatever plugin NCCL was told
to load).
"""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import polars as pl
import pytest

from dynamiccl.serve.artifact import Artifact
from tests.cli.conftest import MODULES
from tests.cli.in_process import run
from tests.data_sets import with_few_channels
from tests.stores import new_store

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
PATHS = dict(re.findall(r"<!-- path: (\w+) -->\n```console\n(.*?)```", PAGE, re.DOTALL))
#: The machine that play_job's ranks find, with the NCCL that they play.
MACHINE = "gpu=none*0;mig=0;nic=socket*1;nccl=22809"
#: How the job is started: as rank 0 of several hosts, as srun or torchrun would.
RANK = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}
TRAIN = """
import json, os, pathlib, subprocess
plugin = os.environ.get("NCCL_TUNER_PLUGIN") or os.environ.get("NCCL_PROFILER_PLUGIN")
acted = 0
if plugin:
    job = ["--ranks", "16", "--nodes", "2", "--calls", "1500", "--rate", "1500"]
    command = [os.environ["PLAY_JOB"], plugin, *job]
    played = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert not (played["disagreements"] or played["errors"] or played["abnormal_exits"]), played
    acted = played["acted"]
    print(*(line for rank in played["ranks"] for line in rank["log"]), sep="\\n")  # NCCL's log
pathlib.Path("acted").write_text(str(acted))
for step in range(20):
    print(f"step time: {0.01 + 0.0001 * (step % 3)} s")
"""


@dataclass
class User:
    """Somebody at a shell in a directory with the project's files, and what was said there.

    Our own commands run in this process: a start of each takes seconds of imports.
    """

    home: Path
    environment: dict[str, str]
    exports: list[str] = field(default_factory=list)

    def types(self, line: str, *codes: int) -> str:
        """What a line prints; it ends with 0, or one of `codes`."""
        if line.split(maxsplit=1)[0] in MODULES:
            with contextlib.chdir(self.home):
                code, said = run(line)
            assert code in {0, *codes}, f"{line}\n{said}"
            return said
        done = subprocess.run(
            ["bash", "-c", "\n".join([*self.exports, line])],
            cwd=self.home,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=300,
        )
        assert done.returncode in {0, *codes}, f"{line}\n{done.stdout}"
        if re.search(r"(^|; )export ", line):
            self.exports.append(line.replace("mkdir ", "mkdir -p "))
        return done.stdout

    @property
    def acted(self) -> int:
        """In how many calls of the job that ran last the plugin decided."""
        return int((self.home / "acted").read_text())


@pytest.fixture(scope="module")
def user(build_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> User:
    home = tmp_path_factory.mktemp("start")
    for name in ("examples", "datasets", "tests"):
        (home / name).symlink_to(ROOT / name)
    (home / "train.py").write_text(TRAIN)
    (home / "out").mkdir()
    built = build_dir("")
    (home / "out" / "plugin").symlink_to(built)
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {**RANK, "TORCHELASTIC_RUN_ID": secrets.token_hex(8)}
    return User(home, ours | job | {"PATH": path, "PLAY_JOB": str(built / "play_job")})


def lines_of(path: str, user: User) -> list[str]:
    """The commands of a path, as they are typed here: with fewer steps and seeds.

    What the path exports by hand stands in its lines, since some run without a shell.
    """
    text: str = PATHS[path].replace("~/dynamiccl", f"{user.home}/shared")
    for name, value in re.findall(r'^export (\w+)="?([^"#]*?)"? +#', text, re.MULTILINE):
        text = text.replace(f"${name}", value)
    text = re.sub(r"steps=\d+", "steps=100", text)
    # A trial is a process of its own: one tells as much as two.
    text = re.sub(r" --(recipe ddqn-dueling|policy ddqn-dueling-seed0)", "", text)
    return text.replace("--seeds 2", "--seeds 1 --jobs 1").splitlines()


@pytest.fixture(scope="module")
def tonight(user: User) -> dict[str, str]:
    """Each line of the first path, and what it said; what it installed stays."""
    said = {}
    for line in lines_of("cluster", user):
        if line.startswith("dynamiccl-collect doctor"):
            with_few_channels(user.home / "sweep.toml")  # "make it yours"
        typed = line.split("  #")[0].strip()
        if typed.startswith("dynamiccl-deploy install"):
            # Simulated data name no machine: they are told to be of this one.
            user.types(f"dynamiccl-deploy bind artifact --fingerprint '{MACHINE}'")
        # No Slurm, no GPU, no NCCL here: the two doctors say so.
        said[typed] = user.types(typed, *((4,) if "doctor" in typed else ()))
    said["calls decided"] = str(user.acted)
    return said


def test_i_have_a_trace_or_a_log(user: User) -> None:
    _, described, told = [user.types(line) for line in lines_of("files", user)]
    assert re.search(r"to gain .* a config is faster than NCCL's own choice", described)
    # On a busy machine a line before it says how long the trace has been read.
    assert re.search(r"^Cannot tell: .* % of the step is exposed communication", told, re.M)
    assert (user.home / "job" / "cover.toml").is_file()


def test_tonight_on_my_cluster(tonight: dict[str, str]) -> None:
    said = tonight
    doctors = [text for line, text in said.items() if "doctor" in line]
    assert "nccl-tests" in doctors[0]
    assert "gated; acts in" in doctors[1]
    gates = [text for line, text in said.items() if "gate --policy" in line]
    assert "would pass" in gates[0]
    (exported,) = [text for line, text in said.items() if "deploy export" in line]
    (why,) = [text for line, text in said.items() if "evaluate explain" in line]
    assert "acts: predicted" in why
    acting = re.search(r"gated; acts on no machine yet .*, in (\d+) of", exported)
    assert acting
    # Sizes that were measured: between two of them a gain must be larger to be sure.
    assert int(acting[1]) > 10
    assert int(said["calls decided"]) > 40


@pytest.mark.usefixtures("tonight")
def test_i_do_not_trust_you(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact is that of the first path."""
    said = {}
    acted = {}
    for line in lines_of("distrust", user):
        with monkeypatch.context() as here:
            if "deploy ab" in line:  # what its launches find
                for name, value in user.environment.items():
                    here.setenv(name, value)
            said[line.split("  #")[0].strip()] = user.types(line)
        if "--mode" in line:
            acted["observe" if "observe" in line else "adaptive"] = user.acted
    assert acted["observe"] == 0
    assert acted["adaptive"] > 40
    (explained,) = [text for line, text in said.items() if "explain" in line]
    for told in ("evidence: gate.json", "it would decide", "worst case", "in your process", "off:"):
        assert told in explained
    (compared,) = user.home.glob("ab-*/ab.json")
    assert len(json.loads(compared.read_text())["launches"]) == 6
    user.types(f"{user.home}/shared/bin/dynamiccl-run python train.py")
    assert user.acted == 0  # the kill file


def test_my_own_idea(user: User, tmp_path: Path) -> None:
    new_store(tmp_path)
    home = User(tmp_path, user.environment)
    for name in ("examples", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    *lines, last = lines_of("idea", user)
    assert last.startswith("mlflow ui")  # which MLflow tests
    said = {line.split("  #")[0].strip(): home.types(line) for line in lines}
    (studied,) = [text for line, text in said.items() if "study" in line]
    assert "attention" in studied
    assert "1 of 1 trials" in studied
    assert re.search(r"dynamiccl-evaluate report --data \S+ --policy \w{32}", studied)
    (reported,) = [text for line, text in said.items() if "report" in line]
    assert "  attention-seed0: " in reported
    assert "nccl-default" in (tmp_path / "report" / "report.html").read_text()


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells, one after the other, as a kernel runs them."""
    for name in ("examples", "datasets"):
        (tmp_path / name).symlink_to(ROOT / name)
    book = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    cells = [cell.replace("steps=600", "steps=100") for cell in cells]
    names: dict[str, object] = {}
    with contextlib.chdir(tmp_path):
        exec(compile("\n".join(cells), "notebook", "exec"), names)
    scores, artifact = cast(pl.DataFrame, names["scores"]), cast(Artifact, names["artifact"])
    assert {"saved", "slower"} <= set(scores.columns)
    assert "size bins" in artifact.in_short
    assert (tmp_path / "report" / "report.html").is_file()
