"""Megatron's flex dispatcher trains as the all-to-all one does. DeepEP itself runs on GPUs alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import make_policy, write_model
from ranks import Ranks, relative_error
from test_parallel_layouts import LAYOUTS, MODULES, SGD, STEPS, TOLERANCE, assert_same_bits

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.megatron.build.model import build_model


@pytest.mark.sampled
@pytest.mark.slow
def test_flex_trains_as_alltoall_does(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    family = "deepseek_v3"
    (folder,) = ranks(1).run("write", family, tmp_path)
    modules = ",".join(MODULES["deepseek_v3_mtp"])
    for layout in ("ep2", "tp2-sp-ep2", "tp2-sp-etp2"):
        settings = (*SGD, *LAYOUTS[layout][1])
        expected = ranks(2).run("train", folder, settings, STEPS)
        found = ranks(2).run("train_by_flex", folder, settings, STEPS)
        for wanted, metrics in zip(expected[-1].metrics, found[-1].metrics, strict=True):
            assert metrics == pytest.approx(wanted, rel=TOLERANCE, abs=1e-7)
        assert relative_error(found[0].gradients, expected[0].gradients) < TOLERANCE
        assert relative_error(found[0].weights, expected[0].weights) < TOLERANCE
        offloaded = ("fine_grained_activation_offloading=true", f"offload_modules=[{modules}]")
        moved = ranks(2).run("train_by_flex", folder, (*settings, *offloaded), STEPS)
        assert_same_bits(moved, found)
        assert all(outcome.bytes_out["expert_fc1"] > 0 for outcome in moved)


@pytest.mark.usefixtures("megatron_process_group")
@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(("backend", "package"), [("deepep", "deep_ep"), ("hybridep", "hybrid-ep"), ("ncclep", "NCCL")])
def test_a_worker_without_the_library_is_told(
    backend: str, package: str, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model("qwen3_moe", tmp_path)
    policy = make_policy("moe_token_dispatcher_type=flex", f"moe_flex_dispatcher_backend={backend}")
    monkeypatch.setattr("nemo_rl_offload.megatron.build.transformer_config.have_gpu", lambda: has_gpu)
    with pytest.raises(ConfigError, match=f"flex with {backend} .*{package if has_gpu else 'needs a GPU'}"):
        build_model(policy, folder, num_steps=None)
    if backend == "deepep" and not has_gpu:
        dense = write_model("qwen2", tmp_path / "dense")
        assert torch.isfinite(next(build_model(policy, dense, num_steps=None).modules[0].parameters())).all()
