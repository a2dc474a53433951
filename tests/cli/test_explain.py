"""`dynamiccl-evaluate explain`: what is printed is what the tables hold, with the reason."""

import re
from pathlib import Path

from tests.cli.conftest import Shell
from tests.conftest import Trained

ASK = ("--collective", "AllReduce", "--group", "4x8")


def test_it_says_what_the_table_says(gated_dir: Path, shell: Shell, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    assert shell("dynamiccl-deploy", "export", gated_dir, "--out", artifact).code == 0
    told = shell("dynamiccl-evaluate", "explain", artifact, *ASK, "--size", "4M").out
    nowhere = re.search(r"no machine is bound to (\S+): its tables act nowhere; on a node", told)
    assert nowhere
    bind = ("dynamiccl-deploy", "bind", artifact, "--system", nowhere[1])
    assert " ".join(map(str, bind)) in told
    assert shell(*bind, "--fingerprint", "gpu=none*0;mig=0;nic=socket*1;nccl=22809").code == 0
    assert (
        "no machine"
        not in shell("dynamiccl-evaluate", "explain", artifact, *ASK, "--size", "4M").out
    )
    table = ("dynamiccl-deploy", "table", tmp_path / "artifact", "--group", "4x8")
    rows = shell(*table).json["decisions"]["AllReduce"]
    said = set()
    for row in rows[::5]:
        ask = (
            "dynamiccl-evaluate",
            "explain",
            gated_dir,
            *ASK,
            "--size",
            row["size_bytes"],
            "--json",
        )
        found = shell(*ask).json
        assert found["chosen"] == (row["config"] or "ABSTAIN")
        assert (found["first_byte"], found["last_byte"]) == (row["first_byte"], row["last_byte"])
        assert found["reason"].startswith("acts" if row["config"] else "abstains")
        ratios = [each["time_over_default"] for each in found["predictions"]]
        assert ratios == sorted(ratios)
        said.add(found["reason"].partition(":")[0])
        gate = found["gate"]
        assert row["config"] is None or gate["verdict"] in {"passed", "inferred"}
    assert said == {"acts", "abstains"}


def test_people_read_margin_noise_gate_and_reason(
    gated_dir: Path, trained: Trained, shell: Shell
) -> None:
    ask = ("dynamiccl-evaluate", "explain", gated_dir, *ASK, "--size", "4M")
    told = shell(*ask).out
    assert "predicted time saved, %" in told
    assert "margin " in told
    assert "noise band " in told
    assert "gate: " in told
    bare = shell("dynamiccl-evaluate", "explain", trained.policy, *ASK, "--size", "4M").out
    assert "no gate judged this policy" in bare
