"""Writes settings as the text of a sweep file (`gate --plan`); loading it gives the same ones."""

from typing import Any, Final

from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.simulator.toml_table import toml_key, toml_value

#: Keys that hold byte counts.
_BYTE_KEYS: Final = frozenset(
    {
        *("min", "max", "list", "sizes", "small_max", "slow_max"),
        *("buffer_bytes", "chunk_size", "chunk_sizes"),
    }
)
#: A table that stands on a line of its own among the keys.
_INLINE: Final = "sizes"


def sweep_text(file: SweepFile, *, head: str = "") -> str:
    """The settings as TOML, those at their default left out; `head` stands above as a comment."""
    entries = {
        key: _readable(key, value)
        for key, value in file.model_dump(mode="json", exclude_defaults=True).items()
    }
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    for key, value in entries.items():
        if not _is_table(key, value):
            lines.append(f"{toml_key(key)} = {toml_value(value)}")
    for key, value in entries.items():
        if _is_table(key, value):
            lines += ["", f"[{toml_key(key)}]"]
            lines += [f"{toml_key(name)} = {toml_value(one)}" for name, one in value.items()]
    return "\n".join(lines) + "\n"


def size_text(size_bytes: int) -> str:
    """A byte count as a sweep file writes it.

    >>> size_text(4096), size_text(1000)
    ('4K', '1000')
    """
    for bits, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size_bytes and size_bytes % (1 << bits) == 0:
            return f"{size_bytes >> bits}{unit}"
    return str(size_bytes)


def _is_table(key: str, value: Any) -> bool:
    return isinstance(value, dict) and key != _INLINE


def _readable(key: str, value: Any) -> Any:
    """Byte counts with units, however deep; zeros and plain numbers stay numbers."""
    if isinstance(value, dict):
        return {name: _readable(name, one) for name, one in value.items()}
    if isinstance(value, list):
        return [_readable(key, one) for one in value]
    if key in _BYTE_KEYS and isinstance(value, int) and value % 1024 == 0 and value:
        return size_text(value)
    return value
