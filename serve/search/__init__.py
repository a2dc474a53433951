"""Online search: tuners that try configs on a running job, AutoCCL's and ours."""
