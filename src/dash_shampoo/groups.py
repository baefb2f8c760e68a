"""Parameter groups for a model: what Shampoo moves, and what AdamW does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def param_groups(
    model: nn.Module,
    *,
    matrices: Mapping[str, Any] | None = None,
    embeddings: Mapping[str, Any] | None = None,
    vectors: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Groups the trainable parameters of a model for `Dash`, with their names.

    Three groups, of which empty ones are left out:

    - "matrices": parameters of two or more dimensions, moved by Shampoo;
    - "embeddings": embedding tables and the output head (the last linear layer as wide as an embedding table is long),
      moved by AdamW, because one side of them is as long as the vocabulary and its rows are updated at very different
      rates;
    - "vectors": 0-D and 1-D parameters, moved as ``vectors=`` of `Dash` says and without weight decay.

    Args:
        model: the model; tied parameters appear once.
        matrices: options of the first group, over the defaults ``{}``.
        embeddings: options of the second group, over ``{"algorithm": "adamw"}``.
        vectors: options of the third group, over ``{"weight_decay": 0.0}``.
        overrides: for each regular expression, options for the parameters whose full name it matches (`re.fullmatch`);
            they make groups of their own, named by the expression, on top of the options of the group they leave.

    Returns:
        Groups for any `torch.optim` optimizer: ``name``, ``params`` as (name, parameter) pairs, and the options.

    Raises:
        ValueError: an override matches no parameter.
    """
    options: dict[str, dict[str, Any]] = {
        "matrices": {**(matrices or {})},
        "embeddings": {"algorithm": "adamw", **(embeddings or {})},
        "vectors": {"weight_decay": 0.0, **(vectors or {})},
    }
    tables = _tables(model)
    groups: dict[str, dict[str, Any]] = {}
    unused = set(overrides or {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "vectors" if parameter.ndim < 2 else "embeddings" if id(parameter) in tables else "matrices"
        pattern = next((pattern for pattern in overrides or {} if re.fullmatch(pattern, name)), None)
        unused.discard(pattern or "")
        label = kind if pattern is None else f"{kind}: {pattern}"
        own = {} if pattern is None else (overrides or {})[pattern]
        group = groups.setdefault(label, {"name": label, "params": [], **options[kind], **own})
        group["params"].append((name, parameter))
    if unused:
        raise ValueError(f"no parameter's name matches {', '.join(map(repr, sorted(unused)))}")
    order = [*options, *groups]
    return sorted(groups.values(), key=lambda group: order.index(group["name"]))


def _tables(model: nn.Module) -> set[int]:
    """Identities of the embedding tables and of the output head's weight."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    lengths = {module.num_embeddings for module in embeddings}
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features in lengths]
    weights: list[Tensor] = [module.weight for module in embeddings]
    # The last such layer is the head; an inner layer may happen to be as wide as the vocabulary.
    weights += [module.weight for module in heads[-1:]]
    return {id(weight) for weight in weights}
