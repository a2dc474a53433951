"""Whether a path lies on a local file system: another process's writes are then seen at once."""

import re
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
#: Types of local file systems: all processes share one page cache.
_LOCAL: Final = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay"))
_OCTAL: Final = re.compile(r"\\([0-7]{3})")


def is_local(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether a path lies on a local file system; False when that is not known.

    proc(5): field 5 of a line is the mount point, and the type comes after a lone dash.
    """
    place, found = path.resolve(), ("", "")
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields = head.split()
        if len(fields) < 5 or not tail:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        # The later of two mounts on one point is the visible one.
        if place.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, tail.split()[0])
    return found[1] in _LOCAL
