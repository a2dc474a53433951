"""Commands of `dynamiccl-evaluate` with a file of their own."""
