"""What is in it for a job: its own trace against a sweep, a policy or a simulated system."""
