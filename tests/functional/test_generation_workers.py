"""Generation in workers of its own samples what the training workers would have sampled."""

from pathlib import Path

import pytest
from test_grpo_run import TIMEOUT_S, metrics, saved_state, start_run, wait_until_gone

COLOCATED = "policy.generation.colocated"
STAGES = ("pipeline_model_parallel_size=2", "num_layers_in_first_pipeline_stage=1")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), STAGES], ids=["one", "pipeline"])
def test_a_run_does_not_depend_on_who_generates(settings: tuple[str, ...], tmp_path: Path) -> None:
    num_workers = 2 if settings else 1
    layout = [f"policy.megatron_cfg.{setting}" for setting in settings]
    apart = [f"{COLOCATED}.enabled=false", f"{COLOCATED}.resources.gpus_per_node={num_workers}"]
    for name, overrides in (
        ("together", [f"cluster.gpus_per_node={num_workers}"]),
        ("apart", [f"cluster.gpus_per_node={2 * num_workers}", *apart]),
    ):
        process = start_run(tmp_path / name, *layout, *overrides, mark=str(tmp_path))
        _, errors = process.communicate(timeout=2 * TIMEOUT_S)
        assert process.returncode == 0, errors
        wait_until_gone(str(tmp_path))
    expected, found = (metrics(tmp_path / name) for name in ("together", "apart"))
    assert expected[1, "train"]["grad_norm"] > 0, "there are weights to hand over"
    for key, values in expected.items():
        of_both = [
            {name: value for name, value in each.items() if not name.startswith(("memory", "offload/peak"))}
            for each in (values, found[key])
        ]
        assert of_both[0] == of_both[1]
    assert saved_state(tmp_path / "together") == saved_state(tmp_path / "apart")
