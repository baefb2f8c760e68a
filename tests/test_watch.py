"""Numbers arrive on the host without anybody waiting for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dash_shampoo.watch import Watch


def test_what_was_posted_last_is_read() -> None:
    watch = Watch()
    assert watch.read(wait=True) is None
    for values in ([True, False], [3, 4]):
        watch.post(torch.tensor(values))
        assert watch.read(wait=False) == values


def test_a_later_change_of_the_tensor_is_not_seen() -> None:
    watch, tensor = Watch(), torch.tensor([1, 2])
    watch.post(tensor)
    tensor.zero_()
    assert watch.read(wait=False) == [1, 2]


def test_values_on_their_way_are_waited_for_only_if_asked() -> None:
    class Event:
        arrived = False

        def query(self) -> bool:
            return self.arrived

        def synchronize(self) -> None:
            self.arrived = True

    watch: Any = Watch()
    watch.post(torch.tensor([5]))
    watch._event = Event()
    assert watch.read(wait=False) is None
    assert watch.read(wait=True) == [5]
    assert watch.read(wait=False) == [5]


def test_reading_is_no_operation_of_torch() -> None:
    from tests.test_optimizer import CountOperations

    watch = Watch()
    watch.post(torch.tensor([1]))
    with CountOperations() as count:
        watch.read(wait=False)
    assert count.counts == {}


@pytest.mark.parametrize("value", [0, 7])
def test_scalars_are_plain_numbers(value: int) -> None:
    watch = Watch()
    watch.post(torch.tensor(value))
    assert watch.read(wait=False) == value
