"""Commands of `dynamiccl-evaluate` that take more than a screen."""
