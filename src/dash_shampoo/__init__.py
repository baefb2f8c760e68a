"""Dash: Shampoo with stacked blocks and inverse roots by matrix products."""

__version__ = "0.1.0"
