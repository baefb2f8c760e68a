from tests.parallel.conftest import processes

__all__ = ["processes"]
