"""The Trigger: a forecast of quiet call times, and a CUSUM test for slower ones."""
