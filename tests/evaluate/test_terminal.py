"""Tables in a terminal of 100 columns: nothing is wider, and no name is cut."""

import pytest
from rich.console import Console

from dynamiccl.train.cli import _study_table
from dynamiccl.train.options import WIDTH, folding_table
from dynamiccl.train.study import SettingSummary, StudySummary


def test_a_studys_table_cuts_no_run_id(capsys: pytest.CaptureFixture[str]) -> None:
    run_id = "0123456789abcdef" * 2
    setting = "ddqn-dueling learning_rate=0.0003 hidden_sizes=64+64 batch_size=256"
    each = SettingSummary(setting, 2, 0.0957, -0.3572, 0.5485, run_id, 12345.0)
    summary = StudySummary(run_id, "data", 2, 2, 0.1, [each])
    Console(width=WIDTH).print(_study_table(summary))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any(run_id in line for line in lines)
    assert "0.00% .. 54.85%" in "\n".join(lines)


@pytest.mark.parametrize("width", [80, 100])
def test_no_word_is_broken_that_fits(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    heads = ("collective", "group", "nodes x ranks", "calls", "of step", "NCCL ran", "better")
    row = ("AllReduce", "0:default_pg", "1 x 2", "6", "2.7%", "NVLSTree/Simple/12ch", "NCCL's own")
    table = folding_table(*heads)
    table.add_row(*row)
    Console(width=width).print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert words >= {word for cell in (*heads, *row) for word in cell.split()}
