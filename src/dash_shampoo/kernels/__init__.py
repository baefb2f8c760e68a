"""Batched matrix products, each with a precision of its own."""

from dash_shampoo.kernels.products import PRECISIONS, Product, coarsest, matmul, strict_products, unit_roundoff

__all__ = ["PRECISIONS", "Product", "coarsest", "matmul", "strict_products", "unit_roundoff"]
