"""Who takes part in a comparison: optimizers by name with options and learning rates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dash_shampoo.train.errors import InputError
from dash_shampoo.train.optimizers import optimizer_class
from dash_shampoo.train.settings import LEARNING_RATES, parse_option

# Around the usual learning rate of an optimizer that has one here.
FACTORS = (0.5, 1.0, 2.0)
# For others, whose usual rate is not known.
RATES = (1e-3, 3e-3, 1e-2)
# Settings of the run that an optimizer may have for itself.
OF_THE_RUN = ("steps", "warmup")


@dataclass(frozen=True)
class Contender:
    """An optimizer with its options.

    Attributes:
        label: what the user called it.
        optimizer: as for the setting of that name.
        rates: learning rates to try.
        options: of the optimizer.
        settings: of the run, in place of those that all share.
    """

    label: str
    optimizer: str
    rates: tuple[float, ...]
    options: dict[str, Any]
    settings: dict[str, int] = field(default_factory=dict)


def parse(text: str, rates: Sequence[float] = ()) -> Contender:
    """A contender from ``NAME[,key=value,...]``, such as "dash,solver=eigh" or "heavyball:SOAP,lr=[3e-3,1e-2]".

    Args:
        text: a name of the train command's, or ``module:Class``; values are in TOML's notation. Besides options of the
            optimizer there are ``lr``, a number or a list, and ``steps`` and ``warmup`` of its runs.
        rates: learning rates where ``text`` has no ``lr``.

    Raises:
        InputError: there is no such optimizer, its package is not installed, a learning rate is no number, or steps are
            no whole number.
    """
    name, *rest = re.split(r",(?=\w+=)", text)
    options = dict(parse_option(each) for each in rest)
    optimizer_class(name)
    settings = {key: options.pop(key) for key in OF_THE_RUN if key in options}
    if wrong := next((key for key, value in settings.items() if type(value) is not int or value < 1), None):
        raise InputError(f"{wrong} of {text!r} must be a whole number from 1 on, as in {wrong}=200")
    usual = LEARNING_RATES.get(name)
    own = options.pop("lr", list(rates) or ([usual * factor for factor in FACTORS] if usual else list(RATES)))
    own = own if isinstance(own, list) else [own]
    if not own or not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in own):
        raise InputError(f"lr of {text!r} must be a number or a list of numbers, as in lr=[3e-3,1e-2]")
    return Contender(text, name, tuple(map(float, own)), options, settings)


def parse_all(texts: Sequence[str], rates: Sequence[float] = ()) -> list[Contender]:
    """Contenders of different labels, as `parse` makes them.

    Raises:
        InputError: one stands there twice, or cannot be used.
    """
    if twice := next((text for text in texts if texts.count(text) > 1), None):
        raise InputError(f"{twice!r} is given twice")
    return [parse(text, rates) for text in texts]
