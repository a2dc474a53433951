"""The `[launcher]` table of a sweep file."""

from typing import Literal

from pydantic import Field

from dynamiccl.simulator.toml_table import Table


class ContainerSettings(Table):
    """The container that every rank runs in."""

    runtime: Literal["pyxis", "enroot", "apptainer"]
    image: str
    #: `host:container[:options]`, as the runtime writes it.
    mounts: tuple[str, ...] = ()


class LauncherSettings(Table):
    """How ranks are started; all options are passed through as written."""

    #: One of `LAUNCHERS`, which a sweep file is checked against.
    kind: str = "local"
    extra_args: tuple[str, ...] = ()
    #: Words before the benchmark on every rank, e.g. numactl.
    prefix: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    #: Lines for the head of the batch script, e.g. "--time=02:00:00".
    sbatch_header: tuple[str, ...] = ()
    #: Elements of the job array that share the sweep.
    array: int = Field(default=1, ge=1)
    container: ContainerSettings | None = None
