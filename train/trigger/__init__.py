"""The Trigger agent: a forecast of quiet times, and a CUSUM over what is above it."""
