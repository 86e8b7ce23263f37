"""One figure for all ranks, and a reason for each module that offloads nothing."""

from dataclasses import asdict
from typing import Any

import pytest

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.offload.stats import ModuleStats, OffloadStats
from nemo_rl_offload.policy.offload_totals import idle_modules, offload_totals

M = "policy.megatron_cfg"


def policy(*overrides: str) -> Any:
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]


def test_every_figure_of_the_engine_is_added_up_or_is_a_time() -> None:
    counted = {name for name, value in asdict(OffloadStats()).items() if isinstance(value, int)}
    totals = offload_totals(policy(), [OffloadStats(bytes_out=3), OffloadStats(bytes_out=4)])
    assert counted - totals.keys() == {"host_bytes"}, "of now, which is 0 between steps"
    assert totals["bytes_out"] == 7


def test_times_are_of_the_slowest_rank_and_the_overlap_is_of_all_copies() -> None:
    ranks = [OffloadStats(stall_out_ms=1, stall_in_ms=4, copy_ms=20), OffloadStats(stall_out_ms=3, copy_ms=60)]
    totals = offload_totals(policy(), ranks)
    assert (totals["stall_out_ms"], totals["stall_in_ms"], totals["overlap"]) == (3, 4, pytest.approx(0.9))
    untimed = offload_totals(policy(), [OffloadStats()])
    assert (untimed["stall_out_ms"], untimed["stall_in_ms"], untimed["overlap"]) == (None, None, None)


def test_megatrons_engine_counts_nothing() -> None:
    totals = offload_totals(policy(f"{M}.activation_offload.engine=megatron"), [])
    assert (totals["engine"], totals["bytes_out"], totals["per_module"]) == ("megatron", None, {})
    assert "core_attn" in totals["modules"]
    assert list(idle_modules(policy(), totals)) == []


def test_auto_names_what_it_moved() -> None:
    stats = OffloadStats(per_module={"core_attn": ModuleStats(bytes_out=5), "mlp_norm": ModuleStats(small_bytes=5)})
    stats.per_module["core_attn"].num_groups = 1
    auto = policy(f"{M}.offload_modules=auto", f"{M}.activation_offload.gpu_memory_budget=1GiB")
    totals = offload_totals(auto, [stats])
    assert totals["modules"] == ["core_attn"]
    assert list(idle_modules(auto, totals)) == []


@pytest.mark.parametrize(
    ("counted", "reason"),
    [
        (ModuleStats(bytes_out=5, num_groups=1), None),
        (ModuleStats(num_groups=1), None),
        (ModuleStats(denied_bytes=5, small_bytes=1), "host_memory_budget leaves no room. Raise that."),
        (ModuleStats(kept_bytes=5, small_bytes=1), "leave all on the device."),
        (
            ModuleStats(small_bytes=1),
            "below min_offloaded_tensor_size=4096 elements. Lower that.",
        ),
        (ModuleStats(), "no tensor is saved there in this model. Take it out of the list."),
    ],
)
def test_why_a_module_offloads_nothing(counted: ModuleStats, reason: str | None) -> None:
    config = policy(f"{M}.offload_modules=[core_attn]", f"{M}.min_offloaded_tensor_size=4096")
    other_rank = OffloadStats()
    totals = offload_totals(config, [OffloadStats(per_module={"core_attn": counted}), other_rank])
    found = list(idle_modules(config, totals))
    assert [line.endswith(str(reason)) for line in found] == [True] * (reason is not None)
    assert all(line.startswith(f"{M}.offload_modules: nothing is offloaded of core_attn: ") for line in found)


def test_modules_that_are_idle_for_one_reason_share_a_sentence() -> None:
    config = policy(f"{M}.offload_modules=[attn_norm,core_attn,mlp_norm]")
    stats = OffloadStats(per_module={"attn_norm": ModuleStats(denied_bytes=3)})
    first, second = idle_modules(config, offload_totals(config, [stats]))
    assert "of attn_norm: activation_offload.host_memory_budget" in first
    assert "of core_attn, mlp_norm: no tensor" in second
