"""Writes the hashes of all draws of a frozen version (evaluate/worlds/frozen.py).

python benchmarks/freeze_worlds.py    # a quarter of an hour; only for a version that is new
"""

import json
import tempfile
from pathlib import Path
from typing import Final

from learning_figures import parallel

from dynamiccl.evaluate.worlds.draws import Draw
from dynamiccl.evaluate.worlds.frozen import DRAWS, VERSION, digests
from dynamiccl.evaluate.worlds.kinds import WORLDS

PATH: Final = Path(__file__).parents[1] / "evaluate" / "worlds" / f"{VERSION}.json"


def main() -> None:
    """Make all draws, and write their hashes."""
    jobs = [(world, number) for world in WORLDS for number in range(DRAWS)]
    found = dict(parallel(frozen, jobs))
    told = {world: [found[world, number] for number in range(DRAWS)] for world in WORLDS}
    PATH.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(PATH)


def frozen(world: str, number: int) -> dict[str, str]:
    """The hashes of one draw."""
    with tempfile.TemporaryDirectory() as folder:
        return digests(Draw.open(world, number, Path(folder)))


if __name__ == "__main__":
    main()
