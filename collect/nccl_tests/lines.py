"""Removes the prefixes that launchers put before lines of output.

The prefix also names the stream, so that headers and rows of several processes in one file are
kept apart where the launcher told them apart.
"""

import re
from typing import Final

#: srun -l, mpirun --tag-output (with and without a date, with and without a rank), MPICH
#: -prepend-rank, `kubectl logs --timestamps` and `--prefix`, container runtimes' own log files.
_PREFIX: Final = re.compile(
    r"(?:\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?)?"
    r"(?: {1,80}(?=\[\d{1,6},\d{1,6}\]<std))?"  # cut from a page
    r"(?:(?P<pod>\[pod/[^\]]{1,200}\]) )?"
    r"(?:(?:[^<>\[\]]{0,40}\b(?:19|20)\d\d)?(?P<mpi>\[\d{1,6},\d{1,6}\])?<std(?:out|err)>: ?"
    r"|(?P<srun> {0,6}\d{1,6}): |(?P<rank>\[\d{1,6}\]) )?"
)


def strip_prefix(line: str) -> tuple[str, str]:
    """The stream that a line belongs to ('' when it does not say) and the line without prefix.

    >>> strip_prefix("[1,0]<stdout>:#  Rank  0")
    ('[1,0]', '#  Rank  0')
    >>> strip_prefix("Fri Sep 20 10:00:00 2024<stdout>: #")
    ('', '#')
    >>> strip_prefix(" 3: # nThread 1")
    ('3', '# nThread 1')
    """
    match = _PREFIX.match(line)
    if match is None or match.end() == 0:
        return "", line
    stream = match["mpi"] or match["rank"] or (match["srun"] or "").strip() or match["pod"] or ""
    return stream, line[match.end() :]


def may_have_prefix(line: str) -> bool:
    """Fast test; False for nearly every line without a prefix."""
    head = line[:64].lstrip()[:40]
    return head[:1] in {"[", "<"} or "<std" in line[:64] or ": " in head[:8] or "T" in head[:11]
