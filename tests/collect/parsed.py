"""What the import makes of a file or a text: rows, remarks and refused lines."""

import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from dynamiccl.collect.imports import ImportSummary, import_files
from dynamiccl.collect.nccl_tests import ImportOptions, read_file
from dynamiccl.collect.output import FileReport, Rejected
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import Source
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective

#: Inputs as people have them, and what each gives, table by table.
INPUTS: Final[dict[str, list[Any]]] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "inputs.toml").read_text(encoding="utf-8")
)


def imported(
    path: Path, content: str | None = None, **told: Any
) -> tuple[ImportSummary, list[dict[str, Any]]]:
    """The summary of one file's import, written first where it has content, and rows in order."""
    if content is not None:
        path.write_text(content)
    out = path.parent / "out"
    summary = import_files([path], out, options=ImportOptions(**{"system": "s", **told}))
    return summary, store.read(out).sort("source_line", "in_place").to_dicts()


class Parsed(NamedTuple):
    """Rows with the columns that are known of them."""

    rows: list[dict[str, Any]]
    rejected: Sequence[Rejected]
    remarks: Sequence[str]


def parse(text: str, collective: Collective | None = None) -> Parsed:
    """Rows of a text; `collective` is the option for one that does not name its own."""
    options = ImportOptions(system="s", collective=None if collective is None else collective.wire)
    report = FileReport("doc.txt", Source.NCCL_TESTS_TEXT.value)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "doc.txt"
        path.write_text(text)
        with suppress(OutputError):
            for _, table in read_file(path, "doc", options, report):
                rows += table.to_pylist()
    known = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return Parsed(known, report.rejected, report.remarks)
