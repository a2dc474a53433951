"""What an import may make of a damaged file: rows, or one line that names it."""

from pathlib import Path

from dynamiccl.collect.importing.importer import ImportOptions, import_files
from dynamiccl.errors import DynamicclError


def survives(data: bytes, name: str, folder: Path) -> None:
    """Import `data` as the file `name`, and check how that ends."""
    path = folder / name
    path.write_bytes(data)
    refused = None
    try:
        import_files([path], folder / "out", options=ImportOptions(system="s"))
    except DynamicclError as error:
        refused = error
    assert refused is None or (refused.exit_code == 3 and name in str(refused))
    assert refused is None or "\n" not in str(refused)
