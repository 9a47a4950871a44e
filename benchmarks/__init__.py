"""Measurements of the package, against stock `dcp.load` and at scale."""
