"""Generation in workers of its own samples what the training workers would have sampled."""

from pathlib import Path

import pytest
from test_grpo_run import TIMEOUT_S, leftovers, metrics, saved_state, start_run

APART = "policy.generation.colocated.enabled=false"
RESOURCES = "policy.generation.colocated.resources.gpus_per_node"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2], ids=["one", "tensor-parallel"])
def test_a_run_does_not_depend_on_who_generates(num_workers: int, tmp_path: Path) -> None:
    together = (f"cluster.gpus_per_node={num_workers}", f"policy.megatron_cfg.tensor_model_parallel_size={num_workers}")
    apart = (*together, f"cluster.gpus_per_node={2 * num_workers}", APART, f"{RESOURCES}={num_workers}")
    for name, overrides in (("together", together), ("apart", apart)):
        process = start_run(tmp_path / name, "policy.megatron_cfg.optimizer.lr=1e-3", *overrides, mark=str(tmp_path))
        _, errors = process.communicate(timeout=2 * TIMEOUT_S)
        assert process.returncode == 0, errors
    assert leftovers(str(tmp_path)) == []
    expected, found = (metrics(tmp_path / name) for name in ("together", "apart"))
    assert expected[4, "train"]["reward"] != expected[1, "train"]["reward"]
    for key, values in expected.items():
        memory = [name for name in values if name.startswith(("memory", "offload/peak"))]
        assert {k: v for k, v in values.items() if k not in memory} == {
            k: v for k, v in found[key].items() if k not in memory
        }
    assert saved_state(tmp_path / "together") == saved_state(tmp_path / "apart")
