"""Grafting: Shampoo gives the direction of an update, a simpler method its length.

Each method keeps at most one statistic of the gradients, of the gradient's own shape, and turns the (averaged) gradient
into the step that it would take alone. `Dash` rescales every block of Shampoo's direction to that step's Frobenius norm
(Anil et al., arXiv 2002.09018; Shi et al., arXiv 2309.06497).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Scalar = float | Tensor  # a number, or one number per block: (n, 1, 1)


class Grafting:
    """A method whose step lends its norm. This base is SGD: no statistic, the step is the gradient itself."""

    def shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        """Shape of the statistic of one block, or ``None`` if the method keeps none."""
        return None

    def accumulate(self, statistic: Tensor, gradient: Tensor, live: Tensor, beta2: Scalar) -> None:
        """Takes ``gradient`` (n, r, c) into ``statistic`` (n, *shape), in place.

        Args:
            statistic: running statistic, zero at first.
            gradient: zero in blocks that do not take this step.
            live: (n, 1, 1), 1 for blocks that take this step and 0 for those that must stay as they are.
            beta2: decay of the running mean of squares.
        """

    def step(self, moment: Tensor, statistic: Tensor | None, correction: Scalar, eps: Scalar) -> Tensor:
        """The method's own step (n, r, c) for the averaged gradient ``moment``; a new tensor or ``moment`` itself.

        Args:
            moment: (n, r, c) gradient, averaged and bias-corrected.
            statistic: what `accumulate` keeps.
            correction: 1 - beta2^t per block, or 1 without bias correction.
            eps: added to the denominator; where that is zero even so, the step is.
        """
        return moment


class AdaGrad(Grafting):
    """Divides by the root of the sum of squared gradients (Duchi et al., 2011)."""

    def shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        return rows, columns

    def accumulate(self, statistic: Tensor, gradient: Tensor, live: Tensor, beta2: Scalar) -> None:
        statistic.addcmul_(gradient, gradient)

    def step(self, moment: Tensor, statistic: Tensor | None, correction: Scalar, eps: Scalar) -> Tensor:
        assert statistic is not None
        return _quotient(moment, statistic.sqrt(), eps)


class RMSprop(AdaGrad):
    """Divides by the root of the running mean of squared gradients, without bias correction."""

    def accumulate(self, statistic: Tensor, gradient: Tensor, live: Tensor, beta2: Scalar) -> None:
        statistic.lerp_(gradient * gradient, (1 - beta2) * live)


class Adam(RMSprop):
    """RMSprop with bias correction (Kingma and Ba, arXiv 1412.6980)."""

    def step(self, moment: Tensor, statistic: Tensor | None, correction: Scalar, eps: Scalar) -> Tensor:
        assert statistic is not None
        return _quotient(moment, (statistic / correction).sqrt_(), eps)


class FactoredRMSprop(RMSprop):
    """RMSprop that keeps the row and column means of the squares only (Shazeer and Stern, arXiv 1804.04235).

    Their product over the mean stands for the squares: r + c numbers in place of r c. Grafting uses nothing of the step
    but its norm, for which that is close.
    """

    def shape(self, rows: int, columns: int) -> tuple[int, ...] | None:
        return (rows + columns,)

    def accumulate(self, statistic: Tensor, gradient: Tensor, live: Tensor, beta2: Scalar) -> None:
        squares = gradient * gradient
        means = torch.cat([squares.mean(dim=2), squares.mean(dim=1)], dim=1).unsqueeze(1)  # (n, 1, r + c)
        statistic.unsqueeze(1).lerp_(means, (1 - beta2) * live)

    def step(self, moment: Tensor, statistic: Tensor | None, correction: Scalar, eps: Scalar) -> Tensor:
        assert statistic is not None
        return super().step(moment, _outer(statistic, moment.shape[1]), correction, eps)


class FactoredAdam(FactoredRMSprop):
    """`FactoredRMSprop` with bias correction."""

    def step(self, moment: Tensor, statistic: Tensor | None, correction: Scalar, eps: Scalar) -> Tensor:
        assert statistic is not None
        return super().step(moment, statistic.unsqueeze(1).div(correction).squeeze(1), correction, eps)


def _quotient(moment: Tensor, root: Tensor, eps: Scalar) -> Tensor:
    """moment / (root + eps), and 0 where that denominator is: ``eps`` may be zero. ``root`` is used up."""
    denominator = root.add_(eps)
    if isinstance(eps, Tensor) or eps < torch.finfo(root.dtype).tiny:
        denominator.masked_fill_(denominator == 0, math.inf)
    return moment / denominator


def _outer(statistic: Tensor, rows: int) -> Tensor:
    """The squares (n, r, c) that row and column means (n, r + c) stand for."""
    row, column = statistic[:, :rows, None], statistic[:, None, rows:]
    total = row.mean(dim=1, keepdim=True)
    return row * (column / total.masked_fill(total == 0, 1))


METHODS: dict[str, Grafting | None] = {
    "none": None,
    "sgd": Grafting(),
    "adagrad": AdaGrad(),
    "rmsprop": RMSprop(),
    "adam": Adam(),
    "factored-rmsprop": FactoredRMSprop(),
    "factored-adam": FactoredAdam(),
}

# What the option `grafting` may be; the factored methods are for `state_dtype="bf16"`.
NAMES = tuple(name for name in METHODS if not name.startswith("factored"))
