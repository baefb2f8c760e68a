"""Inverse p-th roots of stacks of symmetric positive semidefinite matrices."""

from dash_shampoo.roots.chebyshev import Chebyshev
from dash_shampoo.roots.coupled_newton import CoupledNewton, CoupledNewtonPaper
from dash_shampoo.roots.eigh import Eigh
from dash_shampoo.roots.minimax import Minimax
from dash_shampoo.roots.newton_db import NewtonDB, NewtonDBPaper
from dash_shampoo.roots.rule import resolve_precision
from dash_shampoo.roots.scaling import SCALINGS, largest_eigenvalue, schatten4
from dash_shampoo.roots.solve import (
    SOLVERS,
    Call,
    Root,
    calls,
    inverse_root,
    products,
    resolve_solver,
    root_of_zero,
    solver_options,
)
from dash_shampoo.roots.solver import Solver

__all__ = [
    "SCALINGS",
    "SOLVERS",
    "Call",
    "Chebyshev",
    "CoupledNewton",
    "CoupledNewtonPaper",
    "Eigh",
    "Minimax",
    "NewtonDB",
    "NewtonDBPaper",
    "Root",
    "Solver",
    "calls",
    "inverse_root",
    "largest_eigenvalue",
    "products",
    "resolve_precision",
    "resolve_solver",
    "root_of_zero",
    "schatten4",
    "solver_options",
]
