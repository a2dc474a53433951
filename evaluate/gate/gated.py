"""The gated policy directory: the same policy, with a manifest that restricts it."""

import json
import shutil
from collections import Counter
from pathlib import Path

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

    One row a system, group shape and collective; the share inferred is that of the bins that may
    act.
    """
    counts: dict[tuple[str, str, str], Counter[Verdict]] = {}
    for cell in gated.cells:
        shape = f"{cell.num_nodes} x {cell.num_ranks // cell.num_nodes}"
        counts.setdefault((cell.system, shape, cell.collective), Counter())[cell.verdict] += 1
    rows = [["system", "nodes x ranks", "collective", *Verdict, "share inferred"]]
    for key, found in counts.items():
        if set(found) == {Verdict.ABSTAINS}:
            continue
        acting = found[Verdict.PASSED] + found[Verdict.INFERRED]
        share = f"{found[Verdict.INFERRED] / acting:.0%}" if acting else "-"
        rows.append([*key, *(str(found[verdict]) for verdict in Verdict), share])
    return rows


def refusals(gated: Gated) -> list[tuple[int, str]]:
    """(number of refused bins, reason), most frequent first."""
    reasons = Counter(c.reason for c in gated.cells if c.verdict is Verdict.REFUSED)
    return [(count, reason) for reason, count in reasons.most_common()]
