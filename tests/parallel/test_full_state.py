"""What torch.distributed.checkpoint asks for is read where it says so, and what it fills up is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dash_shampoo.parallel.full_state import Asked, asked, refuse_mixture

SOURCE = """
def _get_optim_state_dict(info):
    return call()

def of_another_version(options):
    return call()
"""


def torchs(function: str, argument: Any) -> Any:
    """What a function of a module with the name of torch's gets from `asked`."""
    module = {"__name__": "torch.distributed.checkpoint.state_dict", "call": asked}
    exec(SOURCE, module)
    return module[function](argument)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_options_are_those_of_the_caller(full: bool, offload: bool) -> None:
    info = SimpleNamespace(full_state_dict=full, cpu_offload=offload)
    assert torchs("_get_optim_state_dict", info) == Asked(whole=full, everywhere=not offload)
    assert asked() is None


def test_a_version_of_torch_that_says_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"full_state_dict\(\)"):
        torchs("of_another_version", SimpleNamespace(full_state_dict=True, cpu_offload=True))


def test_a_state_filled_up_with_ones_own_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    state = {"age": 1, "step": torch.ones(()), "tile0.moment": torch.zeros(1, 2)}
    loaded = {"step": torch.ones(()), "tile0.moment": torch.zeros(1, 2)}
    own = {parameter: state}
    refuse_mixture({"layer.weight": state}, own)
    refuse_mixture({"layer.weight": {**state, **loaded}}, own)
    with pytest.raises(ValueError, match=r"layer\.weight lacks what this process owns"):
        refuse_mixture({"layer.weight": {**state, "step": loaded["step"]}}, own)
