"""Import of other people's measurements: nccl-tests output and CSV, with facts of known systems."""
