"""Online search: tuners that try configs on a running job."""
