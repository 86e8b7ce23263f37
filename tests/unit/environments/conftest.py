from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.environments.pool import EnvironmentPool, make_environment


@pytest.fixture(scope="module")
def make_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., EnvironmentPool]]:
    """Start an environment with the settings of the tiny example and others."""
    pools = []

    def make(*overrides: str, run_dir: Path | None = None) -> EnvironmentPool:
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", list(overrides))
        pools.append(make_environment(config, run_dir or tmp_path_factory.mktemp("run")))
        return pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()
