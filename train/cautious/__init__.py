"""What models of times share that act only where they are sure: tasks, calibration, policy, run."""
