"""Containers: the wrapper of a rank's command for each runtime, and paths inside.

pyxis      a plugin of srun; its options are srun's (github.com/NVIDIA/pyxis, wiki "Usage")
enroot     a program before every rank (github.com/NVIDIA/enroot, doc/cmd/start.md); ranks of
           several processes find each other through its hook 50-slurm-pmi.sh
apptainer  a program before every rank (apptainer.org, user guide: "Bind Paths and Mounts",
           "Environment and Metadata")
"""

import hashlib
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from dynamiccl.collect.launchers.settings import ContainerSettings
from dynamiccl.errors import InvalidSweep


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A rank's command and environment inside a container."""

    #: Options for srun itself.
    srun_options: tuple[str, ...]
    #: What every rank runs.
    argv: tuple[str, ...]
    #: What must be set where every rank starts, outside the container.
    env: Mapping[str, str]


def wrap(
    argv: tuple[str, ...],
    env: Mapping[str, str],
    container: ContainerSettings | None,
) -> Wrapped:
    """Wrap a rank's command, with its environment, to run in the container (pure)."""
    if container is None:
        return Wrapped((), argv, env)
    if container.runtime == "pyxis":
        return _pyxis(argv, env, container)
    if container.runtime == "enroot":
        return Wrapped((), (*_enroot(env, container), *argv), env)
    # Set under this prefix a variable wins over what the image sets, and PATH and LD_LIBRARY_PATH
    # arrive too. The option --env would cut values at commas.
    inside = {f"APPTAINERENV_{name}": value for name, value in env.items()}
    binds = [word for mount in container.mounts for word in ("--bind", mount)]
    head = ("apptainer", "exec", "--nv", *binds, container.image)
    return Wrapped((), (*head, *argv), {**env, **inside})


def map_into_container(path: str, container: ContainerSettings | None) -> str:
    """Where an absolute path of the host lies inside the container; the innermost mount counts.

    Raises:
        InvalidSweep: the path is not absolute, or lies under no mount.
    """
    if container is None:
        return path
    if not path.startswith("/"):
        raise InvalidSweep(f"'{path}' must be absolute to be mapped into a container")
    host = posixpath.normpath(path)
    places = (_ends(mount) for mount in container.mounts)
    fitting = [(source, target) for source, target in places if _lies_under(host, source)]
    if not fitting:
        mounts = ", ".join(container.mounts) or "none"
        folder = posixpath.dirname(host)
        raise InvalidSweep(
            f"{path} cannot be seen inside the container '{container.image}' (mounts: {mounts}); "
            f'add "{folder}:{folder}" to launcher.container.mounts'
        )
    source, target = max(fitting, key=lambda ends: len(ends[0]))
    return posixpath.normpath(posixpath.join(target, posixpath.relpath(host, source)))


def _pyxis(argv: tuple[str, ...], env: Mapping[str, str], container: ContainerSettings) -> Wrapped:
    # By name the image is imported once on a node and not for each launch; the first one makes it.
    digest = hashlib.sha256(container.image.encode()).hexdigest()[:8]
    options = [f"--container-image={container.image}", f"--container-name=dynamiccl-{digest}"]
    if container.mounts:
        options.append(f"--container-mounts={','.join(container.mounts)}")
    if env:
        # Without it a variable that the image sets too keeps the image's value.
        options.append(f"--container-env={','.join(sorted(env))}")
    return Wrapped(tuple(options), argv, env)


def _enroot(env: Mapping[str, str], container: ContainerSettings) -> tuple[str, ...]:
    mounts = [word for mount in container.mounts for word in ("-m", mount)]
    settings = [word for name in sorted(env) for word in ("-e", f"{name}={env[name]}")]
    return ("enroot", "start", "--rw", *mounts, *settings, container.image)


def _ends(mount: str) -> tuple[str, str]:
    source, _, rest = mount.partition(":")
    target = rest.partition(":")[0] or source
    return posixpath.normpath(source), posixpath.normpath(target)


def _lies_under(path: str, folder: str) -> bool:
    return posixpath.commonpath([path, folder]) == folder if folder.startswith("/") else False
