"""Getting measurements: import of nccl-tests output, sweeps, runners, telemetry."""
