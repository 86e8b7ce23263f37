"""Nothing of a run listens but for this machine."""

from pathlib import Path

import pytest
from listeners import listeners_of_a_run
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

pytestmark = pytest.mark.slow


@pytest.mark.sampled
@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_listen_on_loopback(num_workers: int, tmp_path: Path) -> None:
    found = listeners_of_a_run(tmp_path / "run", num_workers)
    names = " ".join(listener.process for listener in found)
    for process in ("gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent", "RankActor", "python"):
        assert process in names
    assert [listener for listener in found if listener.is_open] == []
    assert DEFAULT_DASHBOARD_AGENT_LISTEN_PORT not in {listener.port for listener in found}, "another Ray would need it"
