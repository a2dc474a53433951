r"""plugin.index: the text file of an artifact that the plugin reads.

The plugin has no JSON reader and no torch. This file tells it which tables there are, on which
machines they hold, and their hashes; its own SHA-256 stands for the whole artifact when ranks
compare theirs. It is made last, so the manifest does not list it. Lines of fields between tabs:

    dynamiccl-index   1
    artifact          SHA-256 of manifest.json
    system            NAME   fingerprint               one line a machine (dynamiccl/libraries.py)
    noise             NAME   number of the collective   parts per million by which repeats differ
    table             NAME   num_nodes   num_ranks      SHA-256 of the .dct file

At most 64 KiB; serve/plugin/prepare/prepare.cpp reads it.
"""

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from dynamiccl.datasets.manifest import INDEX_NAME, MANIFEST_NAME, Support
from dynamiccl.datasets.store import file_sha256
from dynamiccl.errors import ArtifactMismatch, CorruptFile, UnknownName, UserError
from dynamiccl.libraries import check_fingerprint
from dynamiccl.nccl import Collective
from dynamiccl.serve.table import relative_path

FORMAT_VERSION: Final = 1
MAX_BYTES: Final = 1 << 16
MAX_NOISE_PPM: Final = 10**9
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PluginIndex:
    """The content of plugin.index."""

    manifest_sha256: str
    #: Fingerprint -> system.
    systems: Mapping[str, str]
    #: (system, collective) -> parts per million.
    noise_ppm: Mapping[tuple[str, Collective], int]
    #: (system, num_nodes, num_ranks) -> SHA-256.
    tables: Mapping[tuple[str, int, int], str]

    @classmethod
    def of_artifact(cls, directory: Path, supports: Sequence[Support]) -> Self:
        """The index of an artifact whose manifest and tables are written."""
        shapes = [(s.system, s.num_nodes, s.num_ranks) for s in supports]
        return cls(
            file_sha256(directory / MANIFEST_NAME),
            known_machines(supports),
            {
                (support.system, Collective.parse(name)): round(band * 1e6)
                for support in supports
                for name, band in support.noise_bands.items()
                if math.isfinite(band) and 0 <= band * 1e6 <= MAX_NOISE_PPM
            },
            {key: file_sha256(directory / relative_path(*key)) for key in shapes},
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Self:
        """Parse a file's bytes; raises CorruptFile, which names `where`."""
        try:
            lines = [line.split("\t") for line in data.decode().removesuffix("\n").split("\n")]
            index = cls(
                next(fields[1] for fields in lines if fields[0] == "artifact"),
                {f[2]: f[1] for f in lines if f[0] == "system"},
                {(f[1], Collective(int(f[2]))): int(f[3]) for f in lines if f[0] == "noise"},
                {(f[1], int(f[2]), int(f[3])): f[4] for f in lines if f[0] == "table"},
            )
            # One artifact, one text: what is not written so was not written by us.
            sound = bool(index.tables) and index.to_bytes() == data
        except (ValueError, IndexError, StopIteration, UserError):
            sound = False
        if not sound:
            raise CorruptFile(f"{where} is not a usable index; export the artifact again")
        return index

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read an artifact's index; raises ArtifactMismatch when it has none, and CorruptFile."""
        path = directory / INDEX_NAME
        if not path.is_file():
            raise ArtifactMismatch(
                f"{directory} has no {INDEX_NAME}, without which the plugin uses nothing of it; "
                "export the artifact again"
            )
        return cls.from_bytes(path.read_bytes(), where=str(path))

    def write(self, directory: Path) -> None:
        """Write it into an artifact, replacing the one there."""
        hidden = directory / f".{INDEX_NAME}"
        hidden.write_bytes(self.to_bytes())
        hidden.replace(directory / INDEX_NAME)

    def to_bytes(self) -> bytes:
        """The file's bytes; raises UserError when the plugin would refuse them."""
        data = "".join("\t".join(fields) + "\n" for fields in self._lines()).encode()
        if len(data) > MAX_BYTES:
            raise UserError(
                f"an index of {len(data)} bytes is more than the plugin reads ({MAX_BYTES} bytes); "
                "train on fewer systems or shapes"
            )
        return data

    def _lines(self) -> Iterator[tuple[str, ...]]:
        yield "dynamiccl-index", str(FORMAT_VERSION)
        yield "artifact", self.manifest_sha256
        for fingerprint, system in sorted(self.systems.items(), key=lambda item: item[::-1]):
            yield "system", system, check_fingerprint(fingerprint)
        for (system, collective), ppm in sorted(self.noise_ppm.items()):
            yield "noise", system, str(int(collective)), str(ppm)
        for (system, num_nodes, num_ranks), digest in sorted(self.tables.items()):
            yield "table", system, str(num_nodes), str(num_ranks), digest

    @property
    def sha256(self) -> str:
        """Hash that identifies the artifact; ranks compare it."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def system_names(self) -> list[str]:
        """The systems that have tables, sorted."""
        return sorted({system for system, _, _ in self.tables})

    def machines_of(self, system: str) -> list[str]:
        """The fingerprints assigned to a system, sorted."""
        return sorted(text for text, name in self.systems.items() if name == system)

    def bound(self, system: str, fingerprint: str) -> Self:
        """With a machine added, or moved to another system; raises UnknownName and UserError."""
        if system not in self.system_names:
            raise UnknownName("system", system, self.system_names)
        return replace(self, systems={**self.systems, check_fingerprint(fingerprint): system})

    def check_against(self, made: "PluginIndex", where: Path) -> None:
        """Compare with `of_artifact` of the files, but for bound machines; ArtifactMismatch."""
        if replace(made, systems=self.systems) != self:
            raise ArtifactMismatch(
                f"{where / INDEX_NAME} is not of the manifest and files beside it; "
                "export the artifact again"
            )
        strangers = sorted(set(self.systems.values()) - set(self.system_names))
        if strangers:
            raise ArtifactMismatch(f"{where / INDEX_NAME} names {strangers[0]}, which has no table")


def known_machines(supports: Sequence[Support]) -> dict[str, str]:
    """The machines on which every table of a system was measured: fingerprint -> system."""
    of_system: dict[str, set[str]] = {}
    for support in supports:
        found = set(support.fingerprints)
        of_system[support.system] = of_system.get(support.system, found) & found
    systems_of: dict[str, list[str]] = {}
    for system, fingerprints in of_system.items():
        for fingerprint in fingerprints:
            systems_of.setdefault(fingerprint, []).append(system)
    for fingerprint, systems in systems_of.items():
        if len(systems) > 1:
            _log.warning(
                "systems %s are the same kind of machine, so jobs there will abstain; choose one "
                "with 'dynamiccl-deploy bind ARTIFACT --system NAME --fingerprint \"%s\"'",
                ", ".join(sorted(systems)),
                fingerprint,
            )
    return {name: systems[0] for name, systems in systems_of.items() if len(systems) == 1}
