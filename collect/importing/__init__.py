"""Taking in what others measured: nccl-tests output and tidy CSV, with facts of known systems."""
