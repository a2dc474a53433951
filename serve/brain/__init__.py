"""The brain as a separate process: policies and searches in Python that decide for running jobs."""
