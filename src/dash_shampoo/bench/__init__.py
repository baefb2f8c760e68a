"""Measurements, for the command `dash-shampoo bench`."""
