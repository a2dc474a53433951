"""Which schema versions can be read, and the columns that older ones lack (history in `schema`)."""

from typing import Final

import pyarrow as pa

from dynamiccl.datasets.call_columns import CALLS_ADDED_IN_2
from dynamiccl.datasets.schema import META_SCHEMA, META_VERSION, PARTITION_COLUMNS
from dynamiccl.errors import SchemaMismatch

_ADDED_IN_5: Final = frozenset(
    {"num_comms", "comm_split", "nic_retries", "nic_congestion", "nic_worst"}
)
_ADDED_IN_4: Final = frozenset({"partial_launch", "hosts", "job_id", "process_times_us"})
#: Columns that a file of an older version that is read need not have, by schema and version.
_ADDED_SINCE: Final = {
    (b"measurements", b"3"): _ADDED_IN_4 | _ADDED_IN_5,
    (b"measurements", b"4"): _ADDED_IN_5,
    (b"calls", b"1"): CALLS_ADDED_IN_2,
}


def check_schema(found: pa.Schema, wanted: pa.Schema, *, where: str) -> None:
    """Refuse a file whose schema name, version or columns are not readable by this release.

    Partition columns may be missing, and columns newer than the file's version. Raises
    SchemaMismatch.
    """
    meta = found.metadata or {}
    wanted_meta = wanted.metadata or {}
    name, version = meta.get(META_SCHEMA), meta.get(META_VERSION)
    added = _ADDED_SINCE.get((name or b"", version or b""), frozenset())
    optional = {*PARTITION_COLUMNS, *added}
    if name != wanted_meta[META_SCHEMA] or (version != wanted_meta[META_VERSION] and not added):
        told = [(raw or b"none").decode(errors="replace") for raw in (name, version)]
        got = f"{told[0]} version {told[1]}"
        want = f"{wanted_meta[META_SCHEMA].decode()} version {wanted_meta[META_VERSION].decode()}"
        raise SchemaMismatch(
            f"{where} holds schema {got}, this release reads {want}; "
            "convert it with the release that wrote it, or import the raw output again"
        )
    for field in wanted:
        if field.name in optional:
            continue
        index = found.get_field_index(field.name)
        if index < 0:
            raise SchemaMismatch(f"{where} has no column '{field.name}' ({field.type})")
        if found.field(index).type != field.type:
            raise SchemaMismatch(
                f"{where} has column '{field.name}' as {found.field(index).type}, not {field.type}"
            )
