"""Host lists in Slurm's notation, such as n[01-03]."""

import re
from collections.abc import Iterable
from typing import Final

#: A name whose digits may count: `nid007106`, `gpu-3`, `n12.cluster`.
_COUNTED: Final = re.compile(r"(.*?)(\d{1,9})(\D*)")
#: One host, or a range of them: `n[01-04,7].cluster`.
_LISTED: Final = re.compile(r"([^,\[\]]+)(?:\[([\d,-]*)\])?([^,\[\]]*)(?:,|$)")


def host_list(hosts: Iterable[str]) -> str:
    """The hosts, each once and in the order given; runs of consecutive numbers become a range.

    >>> host_list(["n01", "n02", "n03", "n07", "login", "n7"])
    'n[01-03],n07,login,n7'
    """
    runs: list[tuple[str, str, str, int]] = []
    for host in dict.fromkeys(hosts):
        match = _COUNTED.fullmatch(host)
        if match is None:
            runs.append((host, "", "", 0))
            continue
        head, digits, tail = match.groups()
        if runs and _continues(runs[-1], head, digits, tail):
            runs[-1] = (*runs[-1][:3], runs[-1][3] + 1)
        else:
            runs.append((head, digits, tail, 1))
    return ",".join(_text(*run) for run in runs)


def expand_hosts(text: str) -> list[str]:
    """The hosts of such a list, in order.

    >>> expand_hosts('n[01-03,7],login')
    ['n01', 'n02', 'n03', 'n7', 'login']
    """
    names: list[str] = []
    for head, inside, tail in _LISTED.findall(text):
        if not inside:
            names.append(head + tail)
        for part in filter(None, inside.split(",")):
            low, _, high = part.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            names += [f"{head}{number:0{len(low)}d}{tail}" for number in numbers]
    return names


def _continues(run: tuple[str, str, str, int], head: str, digits: str, tail: str) -> bool:
    first = run[1]
    return (
        (run[0], run[2]) == (head, tail)
        and first != ""
        and len(first) == len(digits)
        and int(digits) == int(first) + run[3]
    )


def _text(head: str, first: str, tail: str, count: int) -> str:
    if count < 2:
        return f"{head}{first}{tail}"
    last = f"{int(first) + count - 1:0{len(first)}d}"
    return f"{head}[{first}-{last}]{tail}"
