"""`dynamiccl-deploy install`: all that a job needs, in one directory that all nodes see.

lib/        the libraries that a job may load
bin/        dynamiccl-run; it starts dynamiccl-prepare and dynamiccl-arbiter, which starts
            dynamiccl-brain where that was built
artifacts/  the newest, by digest: a job keeps the tables that it began with
artifact    a link to the one for new jobs, replaced in one step; mode adaptive takes it at once
env.sh      what dynamiccl-run sets
key         the secret of the jobs' messages, for its owner alone; kept when installed again
snippets/   job scripts for Slurm, Slurm with Pyxis, Kubernetes

Only the installing user may write: the plugin uses nothing that others could have changed.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from dynamiccl import cli
from dynamiccl.datasets.manifest import INDEX_NAME, KILL_NAME, MANIFEST_NAME
from dynamiccl.errors import DataError, MissingPath, UserError
from dynamiccl.files import WRITING, clear_leftovers, replacing
from dynamiccl.libraries import JOB_NAMES, TUNER_NAME, built
from dynamiccl.serve.artifact import Artifact, ArtifactDir, PluginIndex, open_artifact, warn
from dynamiccl.serve.build import BRAIN_NAME, PROBE_NAME, build_plugin, find_probe
from dynamiccl.train.options import Json, tell_result

RUN_NAME: Final = "dynamiccl-run"
ARBITER_NAME: Final = "dynamiccl-arbiter"
_TEXTS: Final = {
    "env.sh": "env.sh",
    RUN_NAME: f"bin/{RUN_NAME}",
    **{name: f"snippets/{name}" for name in ("slurm.sh", "slurm-pyxis.sh", "kubernetes.yaml")},
}
_TEMPLATES: Final = Path(__file__).resolve().parent / "launch"
#: What shells, Slurm's mounts and YAML take unquoted.
_PLAIN: Final = re.compile(r"[A-Za-z0-9._/+-]+")
_KEY_BYTES: Final = 32
#: Artifacts kept; a job whose tables are gone makes NCCL's own choice in new communicators.
_KEPT: Final = 3


def install(
    artifact_dir: Path, to: Path, plugin: Path | None = None, *, ungated: bool = True
) -> dict[str, Any]:
    """Install an artifact into `to`, with the built `plugin` or one built now.

    What `--json` tells; `warnings`: why jobs may run as if it were not there. Raises what
    `open_artifact` raises, and UserError for a directory that others may write to, or an artifact
    without a gate unless `ungated`; what is there then stays.
    """
    artifact = open_artifact(artifact_dir)
    if not (ungated or artifact.is_gated):
        raise UserError(
            f"{artifact_dir} passed no gate: nothing but its own margin keeps jobs from being "
            "slower than under NCCL; use 'dynamiccl-evaluate gate' and export what it writes, or "
            "say --ungated"
        )
    directory = _directory(to)
    with TemporaryDirectory(prefix="dynamiccl-build-") as folder:
        sources = _libraries(plugin, Path(folder))
        written = [_put(directory / n, path.read_bytes(), 0o755) for n, path in sources.items()]
    for template, name in _TEXTS.items():
        text = (_TEMPLATES / template).read_text(encoding="utf-8")
        text = text.replace("@DIR@", str(directory))
        mode = 0o644 if name == "env.sh" else 0o755
        written.append(_put(directory / name, text.encode(), mode))
    key, link = directory / "key", directory / "artifact"
    key_kept = not make_key(key)
    if not key_kept:
        written.append(key)
    try:
        previous = PluginIndex.read(link).sha256
    except DataError:
        previous = None  # nothing, or nothing that a job could use
    # Last: all that it may need is there.
    _place(artifact, link)
    return {
        "directory": str(directory),
        "written": [str(path.relative_to(directory)) for path in [*written, link]],
        "sha256": artifact.index.sha256,
        "previous_sha256": previous,
        "key_kept": key_kept,
        "killed": (link / KILL_NAME).exists(),
        "in_short": artifact.in_short,
        "warnings": [f"{what}; {fix}, and install it again" for what, fix in artifact.warnings],
    }


def _directory(to: Path) -> Path:
    directory = to.absolute()
    if not _PLAIN.fullmatch(str(directory)):
        raise UserError(
            f"'{directory}' cannot stand in job scripts as it is; take a directory whose path has "
            "letters, digits and . _ / + - only"
        )
    link = directory / "artifact"
    if link.is_dir() and not link.is_symlink():
        raise UserError(f"{link} is a directory, no link; move it away, or take another --to")
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    if directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{directory} may be written to by others, so the plugin would use nothing of it; run: "
            f"chmod go-w {directory}"
        )
    for name in ("lib", "bin", "snippets", "artifacts"):
        (directory / name).mkdir(exist_ok=True)
        (directory / name).chmod(0o755)
    return directory


def _libraries(plugin: Path | None, build_dir: Path) -> dict[str, Path]:
    ours = plugin or built(TUNER_NAME)
    if plugin is not None and not plugin.is_file():
        raise MissingPath("tuner plugin", plugin, "leave --plugin out to have one built")
    if not ours.is_file():
        ours = build_plugin(build_dir)
    programs = find_probe(ours).parent
    found = {f"bin/{name}": programs / name for name in (PROBE_NAME, ARBITER_NAME)}
    found |= {f"lib/{name}": ours.parent / name for name in JOB_NAMES}
    for path in found.values():
        if not path.is_file():
            raise MissingPath("library", path, "build all with 'make plugin'")
    if (programs / BRAIN_NAME).is_file():  # beside the arbiter, which looks there
        found[f"bin/{BRAIN_NAME}"] = programs / BRAIN_NAME
    return found


def _put(target: Path, content: bytes, mode: int) -> Path:
    """Write a file; running jobs keep the one that they have mapped."""
    with replacing(target) as hidden:
        hidden.touch(mode, exist_ok=False)  # never readable to more, not for a moment
        hidden.write_bytes(content)
        hidden.chmod(mode)
    return target


def make_key(path: Path) -> bool:
    """Make the secret of the jobs' messages; False where it was there, or another made it."""
    hidden = path.with_name(f"{WRITING}{secrets.token_hex(16)}")
    try:
        hidden.touch(0o600, exist_ok=False)
        hidden.write_text(f"{secrets.token_hex(_KEY_BYTES)}\n", encoding="ascii")
        os.link(hidden, path)  # whole, or not at all
    except FileExistsError:
        path.chmod(0o600)
        return False
    finally:
        hidden.unlink(missing_ok=True)
    return True


def _place(artifact: Artifact, link: Path) -> None:
    store = link.with_name("artifacts")
    place = store / artifact.index.sha256[:16]
    names = (*artifact.manifest.files, MANIFEST_NAME, INDEX_NAME)
    clear_leftovers(store)
    # Where nobody reads it first: a full disk changes nothing of what is there.
    with TemporaryDirectory(prefix=WRITING, dir=store) as folder:
        staged = Path(folder, place.name)
        for name in names:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            _put(staged / name, (artifact.directory / name).read_bytes(), 0o644)
        for each in (staged, *(path for path in staged.rglob("*") if path.is_dir())):
            each.chmod(0o755)
        if place.exists() and not (place / INDEX_NAME).exists():
            place.rename(Path(folder, "cut-off"))
        _move(staged, place, names)
        if (link / KILL_NAME).exists():
            (place / KILL_NAME).touch(mode=0o644)  # whoever switched it off has not switched it on
        elif link.resolve() != place.resolve():
            (place / KILL_NAME).unlink(missing_ok=True)
        os.utime(place)
        with replacing(link) as hidden:
            hidden.symlink_to(place.relative_to(link.parent))
        kept = (path for path in store.iterdir() if not path.name.startswith(WRITING))
        by_age = sorted(kept, key=lambda path: path.stat().st_mtime, reverse=True)
        for old in by_age[_KEPT:]:
            old.rename(Path(folder, old.name))  # removed with it


def _move(staged: Path, place: Path, names: Sequence[str]) -> None:
    try:
        staged.rename(place)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        for name in names:  # file by file: jobs may be reading them
            (staged / name).replace(place / name)


def install_command(
    artifact: ArtifactDir,
    to: Annotated[Path, typer.Option(help="Directory that all nodes see at the same path.")],
    plugin: Annotated[
        Path | None, typer.Option(help="The built plugin; default out/plugin, else built now.")
    ] = None,
    ungated: Annotated[
        bool, typer.Option("--ungated", help="Install one that no gate judged all the same.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put plugin, artifact, environment file, key, wrapper and job scripts into one directory.

    Again into the same directory: the artifact is checked first, then takes the old one's place in
    one step, and running jobs take it by agreement. A bad one is refused and the old one stays.

    Example: dynamiccl-deploy install out/artifact --to /shared/dynamiccl
    """
    with cli.working("checking the artifact; building the plugin where none is built"):
        installed = install(artifact, to, plugin, ungated=ungated)
    home, before = installed["directory"], installed["previous_sha256"]
    for warning in () if as_json else installed["warnings"]:
        warn(warning)
    lines = [f"{home}/{name}" for name in installed["written"]]
    replaced = "" if before is None else f", in place of {before[:16]}"
    lines.append(f"artifact {installed['sha256'][:16]}{replaced}: {installed['in_short']}")
    if installed["key_kept"]:
        lines.append("the key that was there stays: jobs that run go on")
    if installed["killed"]:
        lines.append(f"{home}/artifact/kill is there: jobs make NCCL's own choice")
    lines.append(f"look at it here: dynamiccl-deploy doctor {home}/artifact")
    lines.append(f"start a job: {home}/bin/dynamiccl-run COMMAND...")
    tell_result(installed, "\n".join(lines), as_json=as_json)
