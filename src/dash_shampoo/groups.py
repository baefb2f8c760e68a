"""Parameter groups for a model: what Shampoo moves, and what AdamW does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from dash_shampoo.kinds import kinds
from dash_shampoo.names import bare_names


def param_groups(
    model: nn.Module,
    *,
    matrices: Mapping[str, Any] | None = None,
    convolutions: Mapping[str, Any] | None = None,
    stacks: Mapping[str, Any] | None = None,
    embeddings: Mapping[str, Any] | None = None,
    vectors: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Groups the trainable parameters of a model for `Dash`, with their names.

    Parameters are told by the modules that hold them (docs/groups.md). Six groups, of which empty ones are left out:

    - "matrices": the weights of linear layers and other parameters of two dimensions, moved by Shampoo;
    - "convolutions": weights of convolutions, each read as one matrix (first dimension, rest);
    - "stacks": other parameters of three or more dimensions, such as experts: a matrix over the last two for each;
    - "embeddings": embedding tables, output heads (linear layers onto a vocabulary), positions and what else is looked
      up, moved by AdamW, because one side of them is as long as the vocabulary and their rows are updated at very
      different rates;
    - "elementwise": biases and norms' weights of several dimensions, moved by AdamW without weight decay;
    - "vectors": parameters with at most one dimension above 1, moved as ``vectors=`` of `Dash` says and without weight
      decay.

    Args:
        model: the model; tied parameters appear once, under their first name.
        matrices: options of the first group, over the defaults ``{}``.
        convolutions: options of the second group, over those of the first and ``{"view": "matrix"}``.
        stacks: options of the third group, over those of the first and ``{"view": "stack"}``.
        embeddings: options of the fourth group, over ``{"algorithm": "adamw"}``.
        vectors: options of the last two groups, over ``{"weight_decay": 0.0}``.
        overrides: for each regular expression, options for the parameters whose full name it matches (`re.fullmatch`),
            on top of the options of the group that they leave. They make groups of their own, named by the expression.
            Of several expressions that match a name the first one counts.

    Returns:
        Groups for any `torch.optim` optimizer: ``name``, ``params`` as (name, parameter) pairs, and the options. Names
        are those of the bare model, whatever it is wrapped in: DistributedDataParallel, torch.compile, checkpointing.

    Raises:
        ValueError: an override is no regular expression, or there is no parameter for it.
    """
    patterns = {text: (_compiled(text), dict(own)) for text, own in (overrides or {}).items()}
    shampoo = dict(matrices or {})
    options: dict[str, dict[str, Any]] = {
        "matrices": shampoo,
        "convolutions": {**shampoo, "view": "matrix", **(convolutions or {})},
        "stacks": {**shampoo, "view": "stack", **(stacks or {})},
        "embeddings": {"algorithm": "adamw", **(embeddings or {})},
        "elementwise": {"algorithm": "adamw", "weight_decay": 0.0, **(vectors or {})},
        "vectors": {"weight_decay": 0.0, **(vectors or {})},
    }
    kind_of = kinds(model)
    groups: dict[str, dict[str, Any]] = {}
    unused = set(patterns)
    for name, parameter in bare_names(model):
        if not parameter.requires_grad:
            continue
        kind = kind_of[id(parameter)]
        text = next((text for text, (pattern, _) in patterns.items() if pattern.fullmatch(name)), None)
        unused.discard(text or "")
        label = kind if text is None else f"{kind}: {text}"
        own = {} if text is None else patterns[text][1]
        group = groups.setdefault(label, {"name": label, "params": [], **options[kind], **own})
        group["params"].append((name, parameter))
    if unused:
        shown = ", ".join(map(repr, sorted(unused)))
        raise ValueError(f"no trainable parameter's name matches {shown}, or only what an earlier override has matched")
    order = [*options, *groups]
    return sorted(groups.values(), key=lambda group: order.index(group["name"]))


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"the override {text!r} is no regular expression: {error}") from error
