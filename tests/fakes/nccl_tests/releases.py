"""Supported releases of the stand-in, and facts of NCCL releases."""

from collections.abc import Mapping
from typing import Final

from dynamiccl.nccl import TUNER_ABI_SINCE, NcclVersion

#: nccl-tests releases whose output is known from their sources.
TESTS_RELEASES: Final = tuple(
    NcclVersion.parse(text)
    for text in ("2.13.12", "2.16.9", "2.17.3", "2.17.8", "2.18.2", "2.19.2", "2.19.6")
)
NCCL_RELEASES: Final = tuple(
    NcclVersion.parse(text)
    for text in (
        "2.21.5",
        "2.22.3",
        "2.23.4",
        "2.24.3",
        "2.27.7",
        "2.28.9",
        "2.29.7",
        "2.30.7",
    )
)
CUDA: Final = "cuda12.9"
#: From here on an impossible NCCL_ALGO fails, and names and channels are logged.
NAMED_CHOICES: Final = NcclVersion(2, 24)
PAT_SINCE: Final = NcclVersion(2, 23)


class UnknownRelease(ValueError):
    """Raised for a release that the stand-in does not support."""


def release(environment: Mapping[str, str], name: str, default: str) -> NcclVersion:
    """The release that a FAKE_ variable asks for. Raises UnknownRelease with the choices."""
    known = TESTS_RELEASES if name == "FAKE_NCCL_TESTS_VERSION" else NCCL_RELEASES
    found = NcclVersion.parse(environment.get(name, default))
    if found not in known:
        raise UnknownRelease(f"{name}={found}: choose from {', '.join(map(str, known))}")
    return found


def tuner_versions(nccl: NcclVersion) -> list[int]:
    """Tuner ABIs that an NCCL release accepts, in the order in which it tries them."""
    newest_first = sorted(TUNER_ABI_SINCE, reverse=True)
    return [version for version in newest_first if TUNER_ABI_SINCE[version] <= nccl]


def num_algorithms(nccl: NcclVersion) -> int:
    """Rows of the cost table."""
    return 7 if nccl >= PAT_SINCE else 6
