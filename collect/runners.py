"""The two runners, by name, and where the real one finds what it needs."""

from pathlib import Path
from typing import Final

from dynamiccl.collect.benchmark.launching import Site
from dynamiccl.collect.benchmark.runner import NcclTestsRunner
from dynamiccl.collect.companions.facts import SiteFacts
from dynamiccl.collect.companions.watch import Watch
from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.runner import Runner
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.errors import MissingPath, UnknownName

RUNNERS: Final = ("nccl-tests", "simulator")
LAUNCHERS: Final = ("local", "mpirun", "srun", "sbatch")
#: Where `make plugin` puts the tuner plugin, from the directory that it is run in.
_BUILT_PLUGIN: Final = Path("out/plugin/libnccl-tuner-dynamiccl.so")


def make_runner(
    name: str, file: SweepFile, site: Site, interrupt: Interrupt, *, watch: Watch, facts: SiteFacts
) -> Runner:
    """The runner called `name`. Raises UnknownName with the choices."""
    if name == "simulator":
        return SimulatorRunner(file)
    if name == "nccl-tests":
        return NcclTestsRunner(file, site, interrupt, watch=watch, facts=facts)
    raise UnknownName("runner", name, RUNNERS)


def find_plugin(file: SweepFile) -> Path | None:
    """The tuner plugin that the sweep names, or the one that was built here; None without one.

    Raises MissingPath when the one that is named is not there.
    """
    if file.runner.plugin is None:
        return _BUILT_PLUGIN.resolve() if _BUILT_PLUGIN.is_file() else None
    named = Path(file.runner.plugin).expanduser()
    if not named.is_file():
        raise MissingPath(
            "tuner plugin", named, "build it with 'make plugin', or mend runner.plugin"
        )
    return named.resolve()
