"""Tables in a terminal of 100 columns: nothing is wider, and no name is cut."""

import pytest
from rich.console import Console

from dynamiccl.train.options import folding_table


@pytest.mark.parametrize("width", [80, 100])
def test_no_word_is_broken_where_all_words_fit(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = ("collective", "group", "nodes x ranks", "calls", "of step", "NCCL ran", "better")
    row = ("AllReduce", "0:default_pg", "1 x 2", "6", "2.7%", "NVLSTree/Simple/12ch", "NCCL's own")
    table = folding_table(*heads)
    table.add_row(*row)
    Console(width=width).print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    assert words >= {word for cell in (*heads, *row) for word in cell.split()}
