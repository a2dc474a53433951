"""The fingerprint of a machine, by which an artifact recognises it.

    gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809

The plugin takes it inside a job (`serve/plugin/prepare/prepare.cpp`), a sweep keeps all but
the NCCL version beside what it measured (`collect/nodes.py`), and an artifact lists those
that its tables were measured on. Equal texts are the same kind of machine.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from dynamiccl.errors import UserError
from dynamiccl.nccl import NcclVersion

#: What the plugin has room for.
MAX_FINGERPRINT: Final = 200
#: What a model's name may not hold, as it would be read as punctuation.
_ODD: Final = re.compile(r"[^ -~]|[;*+=\"\\]")
_MODEL: Final = r"[^;*+=]+\*\d+"
_SHAPE: Final = re.compile(rf"gpu={_MODEL}(\+{_MODEL})*;mig=[01];nic=[a-z]+\*\d+;nccl=\d+")


def node_part(gpu_models: Iterable[str], *, mig: bool, nic_kind: str | None, num_nics: int) -> str:
    """The fingerprint without the NCCL version.

    >>> node_part(["H100", "H100"], mig=False, nic_kind="roce", num_nics=8)
    'gpu=H100*2;mig=0;nic=roce*8'
    >>> node_part([], mig=False, nic_kind=None, num_nics=0)
    'gpu=none*0;mig=0;nic=none*0'
    """
    counts = Counter(_ODD.sub("_", model) for model in gpu_models)
    gpus = "+".join(f"{model}*{counts[model]}" for model in sorted(counts)) or "none*0"
    return f"gpu={gpus};mig={int(mig)};nic={nic_kind or 'none'}*{num_nics}"


def with_nccl(node: str, version: NcclVersion) -> str:
    """The fingerprint with the NCCL version.

    >>> with_nccl("gpu=H100*2;mig=0;nic=roce*8", NcclVersion(2, 28, 9))
    'gpu=H100*2;mig=0;nic=roce*8;nccl=22809'
    """
    return f"{node};nccl={version.code}"


def check_fingerprint(text: str) -> str:
    """Return `text`; raises UserError when it is no fingerprint."""
    if not _SHAPE.fullmatch(text) or not text.isprintable() or len(text) > MAX_FINGERPRINT:
        raise UserError(
            f"'{text}' is no fingerprint; one looks like 'gpu=NVIDIA H100 80GB HBM3*8;mig=0;"
            "nic=infiniband*8;nccl=22809', and 'dynamiccl-deploy doctor' shows a machine's own"
        )
    return text
