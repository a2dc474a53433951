"""`dynamiccl-train constants`, as it is called."""

from pathlib import Path

from dynamiccl.serve.constants import read_json
from tests.cli.conftest import Shell, refused
from tests.data_sets import SWEEP, make_data


def test_the_command_writes_what_deploy_takes(shell: Shell, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", SWEEP)
    out = tmp_path / "constants.json"
    command = ("dynamiccl-train", "constants", "--data", data, "--machine", "h100-ib")
    asked = ("--nccl", "2.27.5", "--out", out)
    done = shell(*command, "--group", "4x8", *asked, "--json").json
    assert done["helps"] == out.exists()
    assert done["constants"] <= done["own"] or done["helps"]
    if done["helps"]:
        assert (read_json(out, num_nodes=4, num_ranks=32).values > 0).sum() > 10
    assert "16x8" in refused(shell(*command, "--group", "4", *asked), 2)
