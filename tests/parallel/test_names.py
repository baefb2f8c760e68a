"""State goes by the names of the bare model, whatever it is wrapped in."""

from __future__ import annotations

import pytest

from tests.parallel import names
from tests.parallel.processes import Processes
from tests.parallel.test_equality import assert_equal


@pytest.mark.parametrize("route", ["own", "flat"])
@pytest.mark.parametrize("saved", ["bare", "wrapped"])
def test_state_of_every_wrapper_loads_into_every_other(processes: Processes, saved: str, route: str) -> None:
    (expected,) = processes.run(names.straight, 1)
    (exchanged,) = processes.run(names.exchange, 1, saved, route)
    assert len(exchanged) == 16
    assert_equal(list(exchanged.values()), expected)
