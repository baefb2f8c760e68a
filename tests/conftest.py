import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True, max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
