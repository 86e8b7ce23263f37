import logging
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Ray on this machine."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
