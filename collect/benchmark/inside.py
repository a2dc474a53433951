"""Finds the benchmark where the ranks run, in the container if there is one, with its options."""

from pathlib import Path
from typing import Final

from dynamiccl.collect.benchmark.launching import Site
from dynamiccl.collect.benchmark.programs import Program, binary_names, find_program, options_in
from dynamiccl.collect.launchers import ContainerSettings, Ranks, command, map_into_container
from dynamiccl.collect.process import Limits, run_process
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective

#: Long, since the first start pulls the image.
_START_S: Final = 900.0
_FOUND: Final = "dynamiccl-found "
#: Prints the first name that exists, then its help text. `command -v` accepts paths, too.
_ASK: Final = (
    f'for name; do path=$(command -v "$name") || continue; echo "{_FOUND}$path"; '
    'exec "$path" -h; done; exit 127'
)


def find_benchmark(collective: Collective, site: Site, *, mpi: bool) -> Program:
    """The binary of a collective as the site's ranks see it, inside a container if there is one.

    Raises what `find_program` raises.
    """
    container = site.launcher.container
    if container is None:
        return find_program(collective, site.nccl_tests_dir, mpi=mpi)
    place = (
        None if site.nccl_tests_dir is None else directory_inside(site.nccl_tests_dir, container)
    )
    names = binary_names(collective, mpi=mpi)
    candidates = names if place is None else tuple(f"{place}/{name}" for name in names)
    ranks = Ranks(("sh", "-c", _ASK, "sh", *candidates))
    started = command(ranks, site.launcher)
    done = run_process(started, Limits(_START_S, _START_S))
    paths = [line.text for line in done.lines if line.text.startswith(_FOUND)]
    if not paths:
        said = " | ".join(line.text for line in done.lines[-3:]) or "nothing"
        raise MachineError(
            f"no executable {names[0]} in {place or 'PATH'} of the container '{container.image}' "
            f"(exit code {done.returncode}, output: {said}); give its directory inside the image, "
            "or one under launcher.container.mounts, with --nccl-tests-dir"
        )
    path = paths[0].removeprefix(_FOUND)
    output = "\n".join(line.text for line in done.lines if line.text != paths[0])
    return Program(path, options_in(output, path, done.returncode))


def directory_inside(directory: Path, container: ContainerSettings) -> str:
    """Path of a directory inside the container: mapped if mounted, else the image's own."""
    try:
        return map_into_container(str(directory.resolve()), container)
    except InvalidSweep:
        return str(directory)
