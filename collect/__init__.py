"""Getting measurements: sweeps of nccl-tests on a cluster, and import of what others measured."""
