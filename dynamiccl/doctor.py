"""Checks of a machine before a sweep or a job; none loads a library into this process."""

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from dynamiccl import cli
from dynamiccl.errors import MachineError, UnknownName
from dynamiccl.libraries import is_ours
from dynamiccl.nccl import NcclVersion


class CheckStatus(StrEnum):
    """The result of a check."""

    OK = "ok"
    #: It works, and something may mislead or is lacking.
    WARN = "warn"
    #: It cannot work, or would do something else.
    FAIL = "fail"
    UNKNOWN = "unknown"


OK, WARN, FAIL, UNKNOWN = CheckStatus


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, what was found, and advice."""

    name: str
    status: CheckStatus
    found: str
    advice: str = ""


def judge(name: str, found: str, *rules: tuple[bool, CheckStatus, str]) -> Check:
    """A check by the first rule (whether it holds, status, advice) that holds; else OK."""
    for holds, status, advice in rules:
        if holds:
            return Check(name, status, found, advice)
    return Check(name, OK, found)


_MARKS: Final = dict(zip(CheckStatus, ("ok", "WARN", "FAIL", "?"), strict=True))


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print checks and advice; returns 0, or MachineError's code where one failed."""
    ok, warned, failed, unknown = (sum(c.status is v for c in checks) for v in CheckStatus)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]:<4}  {check.name}: {check.found}")
        lines += [f"      -> {check.advice}"] if check.advice else []
    lines.append(f"{ok} ok, {warned} warnings, {failed} failed, {unknown} unknown")
    if as_json:
        cli.print_json([asdict(check) for check in checks])
    else:
        sys.stdout.write("\n".join([*lines, ""]))
    return MachineError.exit_code if failed else 0


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Exit status and output of a program."""

    #: None when the program is missing or did not end in time.
    returncode: int | None
    output: str

    @property
    def worked(self) -> bool:
        """Whether the exit status is 0."""
        return self.returncode == 0

    @property
    def first_line(self) -> str:
        """The first line that is not empty, or "no output"."""
        return next(filter(str.strip, self.output.splitlines()), "no output").strip()

    @property
    def last_line(self) -> str:
        """The last line, or "no output"; where Python fails it says why."""
        return self.output.strip().rpartition("\n")[2] or "no output"


@dataclass(frozen=True)
class Machine:
    """All that a check may ask. Tests answer from recorded facts."""

    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def run(self, *argv: str, limit_s: float = 30.0) -> ProgramResult:
        """Stops at `limit_s`: nvidia-smi on a lost GPU and sinfo without a controller hang."""
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ProgramResult(None, f"no end after {limit_s:g} s")
        except OSError as error:
            return ProgramResult(None, f"{argv[0]}: {error.strerror}")
        return ProgramResult(done.returncode, done.stdout.decode(errors="replace"))

    def read(self, path: str) -> str | None:
        """The text of a small file; None when it cannot be read."""
        try:
            return Path(path).expanduser().read_bytes().decode(errors="replace")
        except OSError:
            return None

    def paths(self, pattern: str) -> list[str]:
        """Files that match a shell pattern, sorted."""
        return sorted(glob.glob(str(Path(pattern).expanduser())))  # noqa: PTH207 - absolute patterns

    def which(self, name: str, folder: str | None = None) -> str | None:
        """An executable in `folder`, or on PATH; None without one."""
        return shutil.which(name, path=folder)

    def free_bytes(self, path: str) -> int | None:
        """On the file system of `path`, or of its nearest existing parent."""
        place = Path(path).absolute()
        try:
            return shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
        except OSError:
            return None


#: Loading NCCL loads CUDA with it.
ASK_VERSION: Final = (
    "import ctypes, sys; number = ctypes.c_int(); "
    "ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)); print(number.value)"
)
#: As NCCL loads a plugin (RTLD_NOW | RTLD_LOCAL, src/os/linux.cc), with nothing else loaded.
ASK_PLUGIN: Final = (
    "import ctypes, os, sys; so = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL); "
    "print(*[n for n in sys.argv[2:] if hasattr(so, n)])"
)


def nccl_version(machine: Machine, path: str) -> NcclVersion | str:
    """The version, or why it is not known."""
    ran = machine.run(sys.executable, "-c", ASK_VERSION, path)
    if not ran.worked:
        return f"{path} does not load: {ran.last_line}"
    try:
        return NcclVersion.parse(ran.last_line)
    except UnknownName:
        return f"{path} says its version is '{ran.last_line}'"


def check_plugin(machine: Machine, plugin: str, symbols: Sequence[str]) -> Check:
    """Whether our library loads by itself and exports these interfaces."""
    ran = machine.run(sys.executable, "-c", ASK_PLUGIN, plugin, *symbols)
    lacks = ", ".join(symbol for symbol in symbols if symbol not in ran.output.split())
    fix = "build it on a machine like the compute nodes ('make plugin'), or name another"
    return judge(
        "our plugin",
        f"{plugin} loads by itself" if ran.worked else f"{plugin} does not load: {ran.last_line}",
        (not ran.worked, FAIL, fix),
        (bool(lacks), FAIL, f"it lacks {lacks}: {fix}"),
    )


def nccl_settings(machine: Machine) -> dict[str, tuple[str, str]]:
    """NCCL_* setting -> (value, source), by NCCL's own precedence (env.rst, v2.30.7)."""
    found = {
        name: (value, "environment")
        for name, value in sorted(machine.env.items())
        if name.startswith("NCCL_")
    }
    for path in (machine.env.get("NCCL_CONF_FILE") or "~/.nccl.conf", "/etc/nccl.conf"):
        text = machine.read(path) or ""
        for name, value in re.findall(r"^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE):
            found.setdefault(name, (value, path))
    return found


#: NAME=VALUE that overrules a tuner, or that one switches off -> what to do.
_OVERRULING: Final = (
    (
        "NCCL_(ALGO|PROTO)=",  # src/graph/tuning.cc
        "beats any tuner, and NCCL's own choice: take it out of the environment and the files",
    ),
    (
        "NCCL_(MIN|MAX)_(CTAS|NCHANNELS)=",  # src/graph/connect.cc
        "limits the channels of NCCL's own choice and of ours: keep it only where all jobs have it",
    ),
    (
        "NCCL_CTA_POLICY=([0-9]*[13579]$|.*EFFICIENCY)",  # bit 0 is EFFICIENCY (nccl.h.in, v2.30.7)
        "with any tuner loaded, also one that abstains, NCCL skips this policy's choice of NVLS "
        "(2.30.7 src/enqueue.cc:2152; from 2.31 on src/tuning/tuning.cc): such a job runs without "
        "a tuner, and compares with the untouched default alone",
    ),
    (
        "NCCL_ENQUEUE_REARCH_ENABLE=(?!0?$)",  # an NCCL_PARAM: on by any number but 0
        "from NCCL 2.31 on a tuner's cell then beats symmetric kernels that it is not shown "
        "(src/tuning/tuning.cc): our plugin abstains there",
    ),
)


def check_settings(machine: Machine) -> Iterator[Check]:
    """List NCCL_* settings; warn of those that overrule a tuner, or that one switches off."""
    found = nccl_settings(machine).items()
    shown = "; ".join(f"{name}={value} ({place})" for name, (value, place) in found)
    yield Check("NCCL settings", OK, shown or "none")
    for name, (value, place) in found:
        for pattern, advice in _OVERRULING:
            if re.match(pattern, f"{name}={value}", re.IGNORECASE):
                yield Check(name, WARN, f"{value} ({place})", advice)


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of plugin: NCCL loads one of each."""

    name: str
    variable: str
    library: str
    symbol: str


ROLES: Final = (
    Role("tuner", "NCCL_TUNER_PLUGIN", "libnccl-tuner.so", "ncclTunerPlugin_v"),
    Role("profiler", "NCCL_PROFILER_PLUGIN", "libnccl-profiler.so", "ncclProfiler_v"),
)


class OtherPlugin(NamedTuple):
    """A tuner or profiler that NCCL would load, or that is switched off."""

    #: The name that NCCL would open, so that each node looks for its own; empty = switched off.
    library: str
    place: str


def find_other_plugin(
    machine: Machine, role: Role, *, behind_ours: bool = False
) -> OtherPlugin | None:
    """The plugin that NCCL would load in `role`; `behind_ours`: if none of ours were named.

    What the variable names, else on the loader's path, else inside the network plugin
    (`src/plugin/tuner.cc`, v2.30.7), as in AWS's aws-ofi-nccl.
    """
    settings = nccl_settings(machine)
    value, place = settings.get(role.variable, ("", ""))
    if value.lower() == "none":
        return OtherPlugin("", f"{role.variable}={value}")
    if value and not (behind_ours and is_ours(value)):
        return OtherPlugin(value, f"{role.variable}={value} ({place})")
    stray = on_the_loaders_path(machine, role.library)
    if stray is not None:
        return OtherPlugin(role.library, f"{stray}, which NCCL loads unasked")
    net = settings.get("NCCL_NET_PLUGIN", ("", ""))[0] or "libnccl-net.so"
    for one in [] if net.lower() == "none" else net.split(","):
        for name in [n for n in (one, f"libnccl-net-{one}.so") if n.endswith(".so")]:
            path = name if "/" in name else on_the_loaders_path(machine, name)
            if path and machine.run("grep", "-aqE", f"{role.symbol}[0-9]", path).worked:
                return OtherPlugin(name, f"inside the network plugin {path}")
    return None


def on_the_loaders_path(machine: Machine, library: str) -> str | None:
    """What dlopen(library) would open, ignoring the program's run paths; or None."""
    for folder in machine.env.get("LD_LIBRARY_PATH", "").split(":"):
        found = machine.paths(f"{folder}/{library}") if folder else []
        if found:
            return found[0]
    ldconfig = machine.which("ldconfig") or "/sbin/ldconfig"
    listed = machine.run(ldconfig, "-p").output
    cached = re.search(rf"^\s*{re.escape(library)} \(.*\) => (\S+)", listed, re.MULTILINE)
    return cached.group(1) if cached else None
