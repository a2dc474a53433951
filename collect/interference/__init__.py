"""What disturbs a collective on purpose, since tuning in isolation misleads."""
