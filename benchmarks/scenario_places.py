"""Places of the scenario benchmarks: a simulated system, its calls, and what happens around them.

Each is prepared as a user would: a sweep in quiet, recorded jobs, and a Trigger trained on them.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.manifest import TRIGGER_FOLDER
from dynamiccl.evaluate.simulate import Setting
from dynamiccl.simulator.record_jobs import record_jobs
from dynamiccl.simulator.scenario import MarkovLink, Scenario, find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall, Workload, make_workload
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from dynamiccl.train.trigger_fit import fit_trigger


@dataclass(frozen=True, slots=True)
class Place:
    """A simulated system, its workload and its scenario."""

    system: str
    shape: Group
    #: A smaller group that is swept, too: tasks to calibrate on.
    beside: Group
    workloads: tuple[str, ...]
    scenario: str
    #: The link that the scenario's Markov process is on.
    on: str

    @property
    def text(self) -> str:
        """As a recipe's `places` has it (train/online/)."""
        shape = f"{self.shape.num_nodes}x{self.shape.ranks_per_node}"
        return ":".join([self.system, "+".join(self.workloads), self.scenario, shape])


PLACES: Final = {
    "b300, decode and lora, busy-host": Place(
        "b300-nvlink", Group(1, 8), Group(1, 4), ("decode", "lora"), "busy-host", "host"
    ),
    "b300, moe, busy-host": Place(
        "b300-nvlink", Group(1, 8), Group(1, 4), ("moe",), "busy-host", "host"
    ),
    "a100, decode and lora, shared-node": Place(
        "a100-nvswitch", Group(1, 8), Group(1, 4), ("decode", "lora"), "shared-node", "intra"
    ),
    "h100 4x8, decode, congested": Place(
        "h100-ib", Group(4, 8), Group(2, 8), ("decode",), "congested", "inter"
    ),
    "h100 2x8, decode, congested": Place(
        "h100-ib", Group(2, 8), Group(4, 8), ("decode",), "congested", "inter"
    ),
}
CALLS: Final = 30_000
JOBS: Final = 8
#: Octaves of the recorded sizes; workloads have others, too.
OCTAVES: Final = (18, 20, 22, 24)
SWEEP: Final = """
name = "quiet"
system = "{system}"
collectives = {collectives}
groups = [{groups}]
sizes = {{ min = "64K", max = "64M", steps_per_octave = 4 }}
cycles = 3
[simulator]
system = "{system}"
seed = {seed}
"""


def shifted(scenario: Scenario) -> Scenario:
    """The scenario half as strong again, and twice as fast."""
    links = tuple(
        link.model_copy(
            update={
                "slowdowns": tuple(1.0 + 1.5 * (each - 1.0) for each in link.slowdowns),
                "dwell_us": tuple(0.5 * each for each in link.dwell_us),
            }
        )
        if isinstance(link, MarkovLink)
        else link
        for link in scenario.link
    )
    return scenario.model_copy(update={"link": links})


def setting_of(name: str) -> Setting:
    """The setting of a place."""
    place = PLACES[name]
    return Setting(
        system=find_system(place.system),
        workload=make_workload(place.workloads, place.shape),
        scenario=find_scenario(place.scenario),
        calls=CALLS,
        jobs=JOBS,
    )


def prepare_place(folder: Path, name: str, seed: int) -> Setting:
    """Sweep in quiet, record jobs, and train a Trigger; the setting."""
    setting = setting_of(name)
    sweep_place(folder / "data", name, seed)
    record_exploring(setting, folder / "data", jobs=32, calls=20_000, seed=10_000 + seed)
    train_trigger(setting, folder, seed)
    return setting


def sweep_place(data: Path, name: str, seed: int) -> None:
    """Sweep a place in quiet, for its calls, into a data directory."""
    place, setting = PLACES[name], setting_of(name)
    collectives = list(dict.fromkeys(call.collective.wire for call in setting.workload.calls))
    groups = dict.fromkeys([*(call.group for call in setting.workload.calls), place.beside])
    listed = ", ".join(
        f"{{ num_nodes = {g.num_nodes}, ranks_per_node = {g.ranks_per_node} }}" for g in groups
    )
    text = SWEEP.format(system=place.system, collectives=collectives, groups=listed, seed=seed)
    simulate(text, data)


def record_exploring(setting: Setting, out: Path, *, jobs: int, calls: int, seed: int) -> None:
    """Record jobs that stray from NCCL's choice in half of their calls, at sizes for training."""
    places = dict.fromkeys((c.group, c.collective) for c in setting.workload.calls)
    sizes = [int(2.0 ** (octave + half / 2)) for octave in OCTAVES for half in (0, 1)]
    work = [WorkCall(*where, size, 200.0) for where in places for size in sizes]
    workload = Workload("training sizes", tuple(work))
    record_jobs(
        *(out, setting.system, workload, setting.scenario),
        share=0.5,
        hold_calls=8.0,
        jobs=jobs,
        calls=calls,
        seed=seed,
        name="jobs",
    )


def train_trigger(setting: Setting, folder: Path, seed: int) -> None:
    """Record quiet jobs in `folder`/aa, and train a Trigger on them; it lies in `folder`."""
    quiet = replace(setting, scenario=find_scenario("quiet"))
    record_exploring(quiet, folder / "aa", jobs=4, calls=6_000, seed=20_000 + seed)
    uri = f"sqlite:///{folder / 'trigger.db'}"
    told = fit_trigger(folder / "aa", experiment="trigger", tracking_uri=uri, seed=seed)
    shutil.copytree(Path(told["run_directory"]) / TRIGGER_FOLDER, folder, dirs_exist_ok=True)


def trained(data: Path, name: str, settings: Sequence[str], seed: int) -> TorchPolicy:
    """A recipe's policy on a data set; its MLflow store is a new one beside the data."""
    with tempfile.NamedTemporaryFile(dir=data.parent, suffix=".db", delete=False) as store:
        uri = f"sqlite:///{store.name}"
    recipe = make_recipe(name, settings)
    done = fit(data, recipe, experiment="scenarios", tracking_uri=uri, seed=seed)
    return TorchPolicy.load(Path(done.run_directory) / "policy")
