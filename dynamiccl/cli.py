"""Shared by all commands: logging, one-line errors, exit codes.

0 done, 2 wrong usage or input file, 3 bad data, 4 the machine failed us. Stdout is for results.
"""

import errno
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dynamiccl import __version__
from dynamiccl.errors import DynamicclError, Interrupted, MachineError, UserError

#: Package of some commands -> its extra.
_EXTRAS: Final = {
    **dict.fromkeys(("d3rlpy", "gym_notices", "mlflow", "optuna", "scipy", "torch"), "train"),
    "jinja2": "evaluate",
    "matplotlib": "plot",
    "ray": "ray",
}
INTERRUPTED: Final = Interrupted.exit_code
#: Seconds until what takes long says so, without a terminal.
FIRST_LINE_S: Final = 5.0
_ADVICE: Final = {
    errno.EACCES: "correct its permissions, or name another place",
    errno.EEXIST: "it is in the way: name another, or remove it",
    errno.ENOSPC: "free some space and give the same command again",
    errno.ENOTDIR: "a file is where a directory should be: name another",
    errno.EROFS: "name a place that can be written",
}
APPLICATION: Final[dict[str, Any]] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "epilog": "--version prints the release.",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def run(app: Callable[[], Any]) -> None:
    """Call Typer with `standalone_mode=False`: its own errors are long and omit the value."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        sys.exit(0)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        code = app() or 0
        text = "interrupted" if code == INTERRUPTED else ""  # as Typer tells Ctrl-C
    except BrokenPipeError:
        # The reader (head, less) went away.
        sys.stderr.close()
        sys.exit(0)
    except (Exception, KeyboardInterrupt) as error:
        text, code = _ending(error)
    if text:
        print(text, file=sys.stderr)
    if code:
        sys.exit(code)


def _ending(error: BaseException) -> tuple[str, int]:
    """What to say, and the exit code; raises an error that is a bug of ours."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, DynamicclError):
        label = "interrupted" if isinstance(error, Interrupted) else "error"
        return f"{label}: {error}", error.exit_code
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").split(".")[0]
        if extra := _EXTRAS.get(package):
            text = (
                f"error: this command needs the package '{package}', which is not installed; "
                f"in the project's folder: pip install '.[{extra}]'"
            )
            return text, MachineError.exit_code
    if isinstance(error, OSError):
        advice = _ADVICE.get(error.errno or 0)
        return f"error: {error}{f'; {advice}' if advice else ''}", MachineError.exit_code
    if hasattr(error, "format_message"):  # Typer's base class of usage errors is not public
        return _wrong_usage(error), UserError.exit_code
    raise error


def _wrong_usage(error: Any) -> str:
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())  # empty where Rich has printed the help
    said = error.format_message().rstrip(".").replace("Value error, ", "")
    for name in getattr(getattr(error, "param", None), "opts", ()):
        if name in sys.argv[1:-1]:
            given = f"'{sys.argv[sys.argv.index(name) + 1]}'"
            said += f", not {given}" if given not in said else ""
    program, asked = Path(sys.argv[0]).name, error.ctx
    # Where the last option lacks its value, it is not told of which command.
    below = asked.command_path.removeprefix(asked.find_root().info_name) if asked else ""
    return f"error: {said}; see '{program}{below} --help'"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Tell on stderr how long the block has taken: in place on a terminal, else in lines."""
    ended, stream, began = threading.Event(), sys.stderr, time.monotonic()
    in_place = stream.isatty()
    end = "" if in_place else "\n"

    def tell() -> None:
        wait_s = 1.0 if in_place else FIRST_LINE_S
        while not ended.wait(wait_s):
            told = f"{what}: {time.monotonic() - began:.0f} s"
            print(f"\r{told}" if in_place else told, end=end, file=stream, flush=True)
            wait_s = 1.0 if in_place else 30.0

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        if in_place:
            print("\r\x1b[K", end="", file=stream, flush=True)


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C in the block end the command with the message `advice`."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(advice()) from None


def print_json(document: object) -> None:
    """Write one JSON document to stdout."""
    print(json.dumps(document, indent=2, sort_keys=False, allow_nan=False))


def parse_group(text: str) -> tuple[int, int]:
    """(nodes, ranks per node) of `16x8`; raises UserError."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3})", text)
    if found is None:
        raise UserError(f"--group {text} is no NODESxRANKS; write 16x8 for 16 nodes of 8 ranks")
    return int(found[1]), int(found[2])
