"""Dash: Shampoo with stacked blocks and inverse roots by matrix products."""

from dash_shampoo.groups import param_groups
from dash_shampoo.optimizer import Dash
from dash_shampoo.overview import describe
from dash_shampoo.roots import Root, inverse_root

__version__ = "0.1.0"

__all__ = ["Dash", "Root", "describe", "inverse_root", "param_groups"]
