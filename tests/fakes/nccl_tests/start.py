"""Entry point of the executables of install.py."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.fakes.nccl_tests.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
