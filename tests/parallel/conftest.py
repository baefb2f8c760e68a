from collections.abc import Iterator

import pytest

from tests.parallel.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    pool = Processes()
    yield pool
    pool.close()
