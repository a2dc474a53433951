"""Checks the import of a damaged file: rows, or one line that names the file."""

from pathlib import Path

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.errors import DynamicclError


def survives(data: bytes, name: str, folder: Path) -> None:
    """Import `data` as the file `name`, and check the result."""
    path = folder / name
    path.write_bytes(data)
    refused = None
    try:
        import_files([path], folder / "out", options=ImportOptions(system="s"))
    except DynamicclError as error:
        refused = error
    assert refused is None or (refused.exit_code == 3 and name in str(refused))
    assert refused is None or "\n" not in str(refused)
