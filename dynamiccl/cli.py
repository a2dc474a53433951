"""The shell around each command: logging, one-line errors, exit codes.

Exit codes: 0 done, 2 wrong usage or input file, 3 bad data, 4 the machine failed us. Results go to
stdout; progress, logs and errors go to stderr.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dynamiccl import __version__
from dynamiccl.errors import DynamicclError, Interrupted, MachineError, UserError

#: Packages that only some commands need -> the extra that brings them.
_EXTRAS: Final = {
    "d3rlpy": "train",
    "gym_notices": "train",
    "jinja2": "evaluate",
    "matplotlib": "train",
    "mlflow": "train",
    "optuna": "optuna",
    "ray": "ray",
    "torch": "train",
}
INTERRUPTED: Final = Interrupted.exit_code
#: What every application (`typer.Typer`) is made with.
APPLICATION: Final[dict[str, Any]] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "epilog": "--version prints the release.",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_log = logging.getLogger(__name__)


def run(app: Callable[[], Any]) -> None:
    """Run a command-line application; end the process with our exit code on our own errors."""
    if sys.argv[1:] == ["--version"]:
        print(__version__)
        sys.exit(0)
    try:
        app()
    except DynamicclError as error:
        print(
            f"{'interrupted' if isinstance(error, Interrupted) else 'error'}: {error}",
            file=sys.stderr,
        )
        _log.debug("raised here", exc_info=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        extra = _EXTRAS.get(package)
        if extra is None:
            raise
        print(
            f"error: this command needs the package '{package}', which is not installed; "
            f"install it with: pip install 'dynamiccl[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(MachineError.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) went away: not a failure of ours.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # A full disk, a file where a directory should be, a missing permission.
        print(f"error: {error}", file=sys.stderr)
        _log.debug("raised here", exc_info=True)
        sys.exit(MachineError.exit_code)


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C inside end the command with what `advice` says: what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(advice()) from None


def configure_logging(*, verbose: bool) -> None:
    """Send our log lines to stderr; `verbose` adds debug lines and tracebacks."""
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("dynamiccl").setLevel(logging.DEBUG if verbose else logging.INFO)


def print_json(document: object) -> None:
    """Write one JSON document to stdout, for machines."""
    print(json.dumps(document, indent=2, sort_keys=False, allow_nan=False))


def parse_group(text: str) -> tuple[int, int]:
    """Nodes and ranks a node of `16x8`; raises UserError."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3})", text)
    if found is None:
        raise UserError(f"--group {text} is no NODESxRANKS; write 16x8 for 16 nodes of 8 ranks")
    return int(found[1]), int(found[2])
