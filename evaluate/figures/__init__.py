"""Figures of a report as SVG; lines and cells differ in more than colour."""
