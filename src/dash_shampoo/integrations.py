"""For libraries that make the optimizer themselves: what they have to be told to make Dash (docs/integrations.md)."""

from __future__ import annotations

from typing import Any

from torch import nn

from dash_shampoo.groups import param_groups
from dash_shampoo.optimizer import Dash


class DashFactory:
    """Makes Dash from a model, with the groups of `param_groups`.

    For Transformers' Trainer, which makes its optimizer once the model is wrapped:

        Trainer(model, args, optimizer_cls_and_kwargs=(DashFactory, {"lr": 5e-3, "weight_decay": 0.1}), ...)

    Trainer hands on the options that stand there, and neither ``args.learning_rate`` nor ``args.weight_decay``.
    """

    def __call__(self, model: nn.Module, **options: Any) -> Dash:
        """Dash for ``model``, with ``options`` of `Dash`."""
        return Dash(param_groups(model), **options)


def trainer_callback() -> Any:
    """A callback with which Transformers' Trainer saves all of Dash's state under DistributedDataParallel.

    Trainer saves ``state_dict()`` of the first process. Before it does, this gathers the state there.

    Returns:
        What ``Trainer(callbacks=[...])`` takes.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class Consolidate(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                optimizer = kwargs["optimizer"]
                getattr(optimizer, "optimizer", optimizer).consolidate_state_dict()

        on_epoch_end = on_step_end

    return Consolidate()


def register_timm(name: str = "dash") -> None:
    """Lets timm make Dash by its name: ``create_optimizer_v2(model, "dash", lr=5e-3, param_group_fn=param_groups)``.

    Args:
        name: what timm shall call it, without an underscore.

    Raises:
        ImportError: timm is not installed, or has no registry (before 1.0.12).
        ValueError: ``name`` has an underscore, at which timm would cut it.
    """
    if "_" in name:
        raise ValueError(f"timm cuts names at underscores: choose one without, not {name!r}")
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    default_registry.register(
        OptimInfo(name, Dash, description="Shampoo with stacked blocks", has_eps=False, has_betas=True)
    )
