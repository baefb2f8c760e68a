"""Batched matrix products, each with a precision of its own."""

from dash_shampoo.kernels.device import has_tensor_cores
from dash_shampoo.kernels.flags import strict_products
from dash_shampoo.kernels.products import (
    PRECISIONS,
    Product,
    accumulate,
    bmm,
    coarsest,
    matmul,
    promised_error,
    temporaries,
    unit_roundoff,
)

__all__ = [
    "PRECISIONS",
    "Product",
    "accumulate",
    "bmm",
    "coarsest",
    "has_tensor_cores",
    "matmul",
    "promised_error",
    "strict_products",
    "temporaries",
    "unit_roundoff",
]
