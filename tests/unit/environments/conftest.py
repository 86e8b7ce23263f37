import logging
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Ray on this machine, for all tests of environments."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
