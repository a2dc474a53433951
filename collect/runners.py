"""The runners by name (`nccl-tests`, `simulator`), and how each one is constructed."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.benchmark.launching import Site
from dynamiccl.collect.benchmark.runner import NcclTestsRunner
from dynamiccl.collect.nodes import Nodes, NodeWatch, NoWatch, Watch, ask_nodes, environment
from dynamiccl.collect.processes.interrupt import Interrupt
from dynamiccl.collect.runner import Runner
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.errors import MissingPath, UnknownName, UserError
from dynamiccl.libraries import JOB_NAMES, SWEEP_NAME, built


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What the constructor of a runner needs."""

    file: SweepFile
    site: Site
    interrupt: Interrupt
    #: Stops background processes when the sweep ends.
    stack: ExitStack


Maker = Callable[[RunnerContext], Runner]


def _nccl_tests(context: RunnerContext) -> Runner:
    file, site = context.file, context.site
    nodes = Nodes(site.launcher)
    num_nodes = max(group.hosts for group in file.groups)
    facts = ask_nodes(nodes, num_nodes, environment())
    watch: Watch = NoWatch()
    if file.telemetry.enabled:
        watch = context.stack.enter_context(NodeWatch(nodes, num_nodes))
    runner = NcclTestsRunner(file, site, context.interrupt, watch=watch, facts=facts)
    # After an error the last launch may not be in the journal yet.
    context.stack.push(lambda error, *_: runner.close() if error is None else None)
    return runner


def _simulator(context: RunnerContext) -> Runner:
    return SimulatorRunner(context.file, context.site.out)


#: Name -> constructor of the runner.
RUNNERS: Final[Mapping[str, Maker]] = {"nccl-tests": _nccl_tests, "simulator": _simulator}


def find_runner(name: str) -> Maker:
    """The constructor of the runner called `name`. Raises UnknownName with the choices."""
    if name not in RUNNERS:
        raise UnknownName("runner", name, RUNNERS)
    return RUNNERS[name]


def find_plugin(file: SweepFile) -> Path | None:
    """Path of the sweep plugin: `runner.plugin` of the sweep file, else our build, else None.

    Raises MissingPath when the named file does not exist, and UserError when it is the plugin for
    jobs.
    """
    if file.runner.plugin is None:
        ours = built(SWEEP_NAME)
        return ours.resolve() if ours.is_file() else None
    named = Path(file.runner.plugin).expanduser()
    if not named.is_file():
        raise MissingPath(
            "tuner plugin", named, "build it with 'make plugin', or correct runner.plugin"
        )
    if named.name in JOB_NAMES:
        raise UserError(
            f"runner.plugin is {named}, which is for jobs and plays no schedule; name "
            f"{SWEEP_NAME} beside it"
        )
    return named.resolve()
