"""What the plugin's benchmark counts."""

import re

from bench_plugin import TUNER_PARTS

from dynamiccl.libraries import TUNER_NAME
from dynamiccl.serve.build import SOURCE_DIR


def test_lines_of_the_tuner_are_those_of_all_that_it_is_linked_of() -> None:
    text = (SOURCE_DIR / "CMakeLists.txt").read_text(encoding="utf-8")
    [parts] = re.findall(r"^add_parts\(thin (.+)\)$", text, re.MULTILINE)
    assert {*parts.split(), TUNER_NAME.removeprefix("lib").removesuffix(".so")} == {*TUNER_PARTS}
