import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.parallel.processes import Processes
from tests.scripts import Scripts

settings.register_profile("project", deadline=None, derandomize=True, max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Real processes, started when a test first asks for them."""
    pool = Processes()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    """What runs scripts as processes of their own."""
    runner = Scripts()
    yield runner
    runner.close()
