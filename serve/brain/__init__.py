"""The leader's brain as a process of its own: searches written in Python that drive a real job."""
