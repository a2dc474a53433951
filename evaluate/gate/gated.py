"""The gated policy directory: the same policy, with a manifest that restricts it."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from dynamiccl.datasets.manifest import GATE_NAME, POLICY_NAME, TRIGGER_NAME, Manifest
from dynamiccl.datasets.questions import table_supports
from dynamiccl.errors import CorruptFile
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.gate import Gated, abstaining_cells


def write_gated(gated: Gated, policy_dir: Path, out: Path) -> None:
    """Write policy, manifest and every verdict to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(policy_dir / POLICY_NAME, out)
    if (policy_dir / TRIGGER_NAME).is_file():
        shutil.copy(policy_dir / TRIGGER_NAME, out)
    text = json.dumps(gated.to_json(), indent=1)
    (out / GATE_NAME).write_text(text + "\n", encoding="utf-8")
    gated.manifest.write(out)


def read_gated(policy_dir: Path) -> Gated | None:
    """The gate's verdicts on the policy in a directory; None if it was not gated.

    Raises CorruptFile when its file is damaged, and what `Manifest.read` raises.
    """
    path = policy_dir / GATE_NAME
    if not path.is_file():
        return None
    manifest = Manifest.read(policy_dir)  # which also compares the file's hash
    try:
        raw = json.loads(path.read_bytes())
        found = [Cell(**{**cell, "verdict": Verdict(cell["verdict"])}) for cell in raw["cells"]]
        q = float(raw["q"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFile(f"{path} is not what a gate writes: {error}; gate again") from error
    wanted = {cell.place: cell for cell in found}
    cells = [
        wanted.get(cell.place, cell)
        for support in table_supports(manifest)
        for cell in abstaining_cells(support)
    ]
    return Gated(q, cells, manifest)


def gate_rows(gated: Gated) -> list[list[str]]:
    """A table, header first: number of bins by verdict, for collectives where the policy acts.

    One row a system, group shape and collective; share inferred and channels (medians, where they
    were read back) are those of the bins that may act.
    """
    by_place: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in gated.cells:
        shape = f"{cell.num_nodes} x {cell.num_ranks // cell.num_nodes}"
        by_place.setdefault((cell.system, shape, cell.collective), []).append(cell)
    heads = ["system", "nodes x ranks", "collective", *Verdict, "share inferred"]
    rows = [[*heads, "channels", "NCCL's own"]]
    for key, cells in by_place.items():
        found = Counter(cell.verdict for cell in cells)
        if set(found) == {Verdict.ABSTAINS}:
            continue
        acting = [c for c in cells if c.verdict in {Verdict.PASSED, Verdict.INFERRED}]
        share = f"{found[Verdict.INFERRED] / len(acting):.0%}" if acting else "-"
        used = (_median(c.channels for c in acting), _median(c.own_channels for c in acting))
        rows.append([*key, *(str(found[verdict]) for verdict in Verdict), share, *used])
    return rows


def _median(channels: Iterable[int | None]) -> str:
    known = [each for each in channels if each is not None]
    return f"{median(known):g}" if known else "-"


def refusals(gated: Gated) -> list[tuple[int, str]]:
    """(number of refused bins, reason), most frequent first."""
    reasons = Counter(c.reason for c in gated.cells if c.verdict is Verdict.REFUSED)
    return [(count, reason) for reason, count in reasons.most_common()]
