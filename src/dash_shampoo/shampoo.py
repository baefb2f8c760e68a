"""The stages of Shampoo's step, each for all blocks of a `Part` at once (Algorithm 1 of arXiv 2602.02016).

Shapes: the gradient G, its mean M and the update U are (n, r, c); L is (n, r, r) and R is (n, c, c); numbers that
differ between blocks (the step count t, at least 1, and whether a block takes this step) are (n, 1, 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dash_shampoo.grafting import Scalar
from dash_shampoo.kernels import bmm
from dash_shampoo.stacks import Part


def bias(beta: Scalar, steps: Tensor) -> Tensor:
    """1 - beta^t, the weight that a running mean with decay ``beta`` has gathered after t = ``steps`` steps."""
    log = beta.log() if isinstance(beta, Tensor) else math.log(beta) if beta else -math.inf
    return -torch.expm1(steps * log)


def accumulate(part: Part, live: Tensor, steps: Tensor) -> None:
    """Takes the gradients of a part into its state."""
    gradient = part.gather(live)
    update_factors(part, gradient, live, steps)
    update_moments(part, gradient, live)


def move(part: Part, taken: Tensor, live: Tensor, steps: Tensor, started: bool | Tensor) -> None:
    """Moves the parameters of a part along their direction, or sends the update to those who hold them."""
    update = add_momentum(part, direction(part, steps, started), live)
    part.deliver(update, live, taken)


def update_factors(part: Part, gradient: Tensor, live: Tensor, steps: Tensor) -> None:
    """L <- beta2 L + (1 - beta2) G G^T and R <- beta2 R + (1 - beta2) G^T G.

    With bias correction the factors are kept corrected: the mean over t steps moves by (1 - beta2) / (1 - beta2^t) of
    the way to the newest product, which for a constant beta2 is the corrected mean of the paper.
    """
    if not part.sides:
        return
    beta2 = part.option("beta2")
    gain = (1 - beta2) * live
    if part.key.bias_correction:
        gain = (gain / bias(beta2, steps)).clamp(max=1)
    scaled = gradient * gain.sqrt()
    keep = 1 - gain
    if part.left is not None:
        part.left.accumulate(scaled, keep)
    if part.right is not None:
        part.right.accumulate(scaled.mT, keep)


def update_moments(part: Part, gradient: Tensor, live: Tensor) -> None:
    """M <- beta1 M + (1 - beta1) G, and the grafting method's statistic."""
    moment = part.moment.to(part.dtype)  # itself, unless it is kept in bfloat16
    moment.lerp_(gradient, (1 - part.option("beta1")) * live)
    if moment is not part.moment:
        part.moment.copy_(moment)
    if part.grafting is not None and part.statistic is not None:
        part.grafting.accumulate(part.statistic, gradient, live, part.option("graft_beta2"))


def mean_gradient(part: Part, steps: Tensor) -> Tensor:
    """M, bias-corrected if the groups say so. (n, r, c)"""
    moment = part.moment.to(part.dtype)
    return moment / bias(part.option("beta1"), steps) if part.key.bias_correction else moment


def grafted_step(part: Part, moment: Tensor, steps: Tensor) -> Tensor:
    """The step that the grafting method would take alone. (n, r, c)"""
    if part.grafting is None:
        return moment
    correction = bias(part.option("graft_beta2"), steps) if part.key.bias_correction else 1.0
    return part.grafting.step(moment, part.statistic, correction, part.option("graft_eps"))


def precondition(part: Part, moment: Tensor) -> Tensor:
    """L^(-1/p) M R^(-1/p), or one of the two factors alone for one-sided blocks. (n, r, c)"""
    update = moment if part.left is None else bmm(part.left.inverse(), moment)
    return update if part.right is None else bmm(update, part.right.inverse())


def graft(part: Part, update: Tensor, step: Tensor) -> Tensor:
    """U ||step||_F / ||U||_F per block; the grafted step itself where U has no direction (zero or not finite)."""
    have = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)
    if part.grafting is None:
        return update.masked_fill_(~torch.isfinite(have), 0)
    ratio = torch.linalg.vector_norm(step, dim=(1, 2), keepdim=True) / have
    usable = ratio * have < math.inf  # the product is ||step||, where both are finite
    return torch.where(usable, update * ratio, step)


def direction(part: Part, steps: Tensor, started: bool | Tensor) -> Tensor:
    """The update of each block before momentum. (n, r, c)

    Args:
        part: the blocks.
        steps: (n, 1, 1) steps that each block's parameter has taken, this one included; 1 before the first.
        started: whether Shampoo has started, for all blocks or per block (n, 1, 1); before, the grafting method runs
            alone.
    """
    moment = mean_gradient(part, steps)
    step = grafted_step(part, moment, steps)
    if not part.sides or started is False:
        return step.clone() if step is part.moment else step
    update = graft(part, precondition(part, moment), step)
    return torch.where(started, update, step) if isinstance(started, Tensor) else update


def add_momentum(part: Part, update: Tensor, live: Tensor) -> Tensor:
    """V <- momentum V + U; returns V, or U + momentum V with Nesterov's look-ahead. (n, r, c)"""
    if part.velocity is None:
        return update
    momentum = part.option("momentum")
    velocity = part.velocity
    velocity.copy_(torch.where(live > 0, velocity * momentum + update, velocity))
    return update + velocity * momentum if part.key.nesterov else velocity.to(part.dtype, copy=True)
