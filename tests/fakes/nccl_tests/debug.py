"""NCCL's log: levels, subsystems, files and prefixes (2.29.7, `src/debug.cc`)."""

import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Final, TextIO

_LEVELS: Final = {"NONE": 0, "VERSION": 1, "WARN": 2, "INFO": 3, "ABORT": 4, "TRACE": 5}
_SUBSYSTEMS: Final = frozenset(
    {"INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY"}
    | {"NVLS", "BOOTSTRAP", "REG", "PROFILE", "RAS"}
)
_DEFAULT: Final = frozenset({"INIT", "BOOTSTRAP", "ENV"})
ALL: Final = _SUBSYSTEMS


class DebugLog:
    """Where one process logs; `host` is the node's name."""

    def __init__(self, environment: Mapping[str, str], host: str) -> None:
        """Open the file that the environment asks for, else log to stdout."""
        self._level = _LEVELS.get(environment.get("NCCL_DEBUG", "NONE").upper(), 0)
        self._subsystems = _subsystems(environment.get("NCCL_DEBUG_SUBSYS"))
        self._host = host
        self._file: TextIO = sys.stdout
        #: What `ncclGetLastError` returns.
        self.last_error = ""
        name = environment.get("NCCL_DEBUG_FILE", "")
        if self._level > _LEVELS["VERSION"] and name:
            expanded = _expand(name, host)
            # NCCL keeps the file open, and logs to stdout when it cannot be opened.
            try:
                self._file = open(expanded, "w", buffering=1, encoding="utf-8")  # noqa: SIM115, PTH123
            except OSError:
                self._file = sys.stdout

    def wants(self, *subsystems: str) -> bool:
        """Whether an INFO line of any of these is logged."""
        return self._level >= _LEVELS["INFO"] and not self._subsystems.isdisjoint(subsystems)

    def say(self, text: str, *subsystems: str, device: int = 0) -> None:
        """Log one line, when the level and one of the subsystems are on."""
        if self.wants(*subsystems):
            self._file.write(f"{self._prefix()}[{device}] NCCL INFO {text}\n")

    def fail(self, text: str, where: str, *, device: int = 0) -> None:
        """Keep a warning as the last error, and log it."""
        self.last_error = text
        if self._level >= _LEVELS["WARN"]:
            now = datetime.now().astimezone().strftime("[%Y-%m-%d %H:%M:%S] ")
            self._file.write(f"\n{now}{self._prefix()}[{device}] {where} NCCL WARN {text}\n")

    def version(self, text: str) -> None:
        """The line with NCCL's version: without a prefix below INFO."""
        if self._level in {_LEVELS["VERSION"], _LEVELS["WARN"]}:
            self._file.write(f"{text}\n")
        else:
            self.say(text, *ALL)

    def _prefix(self) -> str:
        return f"{self._host}:{os.getpid()}:{threading.get_native_id()} "


def _subsystems(text: str | None) -> frozenset[str]:
    if text is None:
        return _DEFAULT
    named = {word.upper() for word in text.lstrip("^").split(",")}
    chosen = _SUBSYSTEMS if "ALL" in named else named & _SUBSYSTEMS
    return _SUBSYSTEMS - chosen if text.startswith("^") else frozenset(chosen)


def _expand(name: str, host: str) -> str:
    values = {"%%": "%", "%h": host, "%p": str(os.getpid())}
    return re.sub(r"%[%hp]", lambda match: values[match[0]], name)
