"""Interference that is started on purpose beside a collective."""
