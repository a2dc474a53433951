"""The figures of a report, as SVG text: every line and cell has a mark besides its colour."""
