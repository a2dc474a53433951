"""Health of the GPUs and NICs while trials run, and hardware facts of a node."""
