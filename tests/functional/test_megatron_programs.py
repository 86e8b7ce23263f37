"""Programs of Megatron-Core's own, with this project's engine behind Megatron's flags: the same bits, counted bytes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_runs import python_path, run_python
from patience import PATIENCE_S
from plain_gpt import ATTENTION, MICRO_BATCH_SIZE, MLA, MOE, SEQUENCE, SHAPE
from ranks import Ranks

from nemo_rl_offload.config.loader import PROJECT_ROOT

pytestmark = pytest.mark.slow

PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP = PP | {"virtual_pipeline_model_parallel_size": 2}
TP: dict[str, Any] = {"tensor_model_parallel_size": 2}
EP = MOE | {"expert_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
NORMS = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"], "hidden_dropout": 0.1}
MTP = {"mtp_num_layers": 1}
MLPS = {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False}
"""Megatron's own recomputation of an MLP with a bias does not end."""
GATED = {"gated_linear_unit": True, "add_bias_linear": False}

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dp2": ({}, ATTENTION),
    "gated": (GATED, ATTENTION),
    "moe": (MOE, ATTENTION),
    "mla": (MLA, ATTENTION),
    "mtp": (MTP, ATTENTION),
    "full": (FULL, ("attn_norm",)),
    "core": (CORE, ("attn_norm", "qkv_linear", "mlp_norm")),
    "norms": (NORMS, ("attn_norm", "mlp_norm")),
    "mlps": (MLPS, ("attn_norm", "mlp_norm")),
    "pp2": (PP, ATTENTION),
    "pp2-vpp2": (VPP, ATTENTION),
    "pp2-mla": (PP | MLA, ATTENTION),
    "pp2-vpp2-moe": (VPP | MOE, ATTENTION),
    "pp2-full": (PP | FULL, ("attn_norm",)),
    "pp2-mtp": (PP | MTP, ATTENTION),
    "tp2": (TP, ATTENTION),
    "ep2": (EP, ATTENTION),
    "tp2-mla": (TP | MLA, ATTENTION),
    "norms-mla": (NORMS | MLA, ("attn_norm", "mlp_norm")),
}
MICROBATCHES = 4 + 3 + 2


@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes_in_any_layout(case: str, ranks: Callable[[int], Ranks]) -> None:
    changes, modules = CASES[case]
    for rank, (without, offloaded) in enumerate(ranks(2).run("plain_gpt", changes, modules)):
        assert offloaded.losses == without.losses
        assert offloaded.digest == without.digest
        assert offloaded.bytes_out.keys() == set(modules)
        assert offloaded.host_bytes == 0
        if "pipeline_model_parallel_size" not in changes:  # which keeps what it has received
            assert offloaded.ineffective_bytes == 0
        if "attn_proj" in modules:
            assert offloaded.bytes_out["attn_proj"] == attention_output_bytes(changes, rank)


def attention_output_bytes(changes: dict[str, Any], rank: int) -> int:
    """Of all layers and microbatches of a rank, in float32; layers that predict further tokens are the last stage's."""
    pipeline = changes.get("pipeline_model_parallel_size", 1)
    layers = SHAPE["num_layers"] // pipeline + (changes.get("mtp_num_layers", 0) if rank >= pipeline - 1 else 0)
    microbatches = MICROBATCHES * (2 if "virtual_pipeline_model_parallel_size" in changes else 1)
    width = SHAPE["hidden_size"] // changes.get("tensor_model_parallel_size", 1)
    return layers * microbatches * SEQUENCE * MICRO_BATCH_SIZE * width * 4


KNOBS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "half of the groups": ({"activation_offload_fraction": 0.5}, (0.3, 0.7)),
    "none after the first microbatch": ({"activation_offload_fraction": 0.0}, (1 / MICROBATCHES, 1 / MICROBATCHES)),
    "tensors too small": ({"min_offloaded_tensor_size": 10**6}, (0, 0)),
    "one copy at a time": ({"fine_grained_offloading_max_inflight_offloads": 0}, (1, 1)),
}


@pytest.mark.parametrize("knob", KNOBS)
def test_megatrons_knobs_are_followed(knob: str, ranks: Callable[[int], Ranks]) -> None:
    changes, (least, most) = KNOBS[knob]
    full = ranks(2).run("plain_gpt", {}, ATTENTION)[0][1]
    for without, offloaded in ranks(2).run("plain_gpt", changes, ATTENTION):
        assert offloaded.digest == without.digest
        share = sum(offloaded.bytes_out.values()) / sum(full.bytes_out.values())
        assert least <= share <= most


def test_later_pipeline_ranks_keep_more(ranks: Callable[[int], Ranks]) -> None:
    plain = [offloaded for _, offloaded in ranks(2).run("plain_gpt", PP, ATTENTION)]
    kept = PP | {"delta_offload_bytes_across_pp_ranks": 10_000}
    first, second = [offloaded for _, offloaded in ranks(2).run("plain_gpt", kept, ATTENTION)]
    assert first.bytes_out == plain[0].bytes_out
    difference = sum(plain[1].bytes_out.values()) - sum(second.bytes_out.values())
    assert 10_000 * 3 <= difference <= 40_000 * 3, "as many groups as reach it"
    assert second.digest == plain[1].digest


def test_models_one_after_another(ranks: Callable[[int], Ranks]) -> None:
    """After Megatron's `reset_instance` a model may offload otherwise. Megatron tells what left in the last step."""
    work = "plain_gpts_one_after_another", ("attn_norm", "mlp_norm"), ("core_attn",)
    for (first, told_first), (second, told_second) in ranks(2).run(*work):
        assert (first.losses, first.digest) == (second.losses, second.digest)
        assert first.bytes_out.keys() == {"attn_norm", "mlp_norm"}
        assert second.bytes_out.keys() == {"core_attn"}
        for trained, told in ((first, told_first), (second, told_second)):
            assert told == {name: total // 3 for name, total in trained.bytes_out.items()}, "2 of 6 microbatches"


def test_a_module_that_no_layer_has_is_warned_about(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(AssertionError, match="'moe_act' offloads nothing: no layer of this rank has such a module"):
        ranks(2).run("plain_gpt_strictly", MOE, (*ATTENTION, "moe_act"))


RAY_PROGRAM = """
import os
import ray
from nemo_rl_hook import install_offloading

@ray.remote
class Worker:
    def train(self):
        import plain_gpt
        from nemo_rl_offload.adapters import megatron_core

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        assert megatron_core.installed() is not None
        offloaded = plain_gpt.train({}, plain_gpt.ATTENTION)
        return offloaded, plain_gpt.train({}, ())

ray.init(num_cpus=1, include_dashboard=False, runtime_env={"worker_process_setup_hook": install_offloading})
offloaded, without = ray.get(Worker.remote().train.remote())
assert offloaded.digest == without.digest
print(sorted(offloaded.bytes_out))
"""


@pytest.mark.sampled
def test_the_hook_of_rays_workers() -> None:
    path = python_path(PROJECT_ROOT, PROJECT_ROOT / "examples/adapters", PROJECT_ROOT / "tests/functional")
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", RAY_PROGRAM]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(sorted(ATTENTION))


def test_another_programs_script_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys\n"
        "from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload\n"
        "print(__name__, sys.argv[1:], offload.FineGrainedActivationOffloadingInterface.__name__)\n"
    )
    done = run_python("-W", "ignore", "examples/adapters/megatron_lm.py", str(script), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("__main__ ['--lr', '1'] OffloadInterface\noffloaded ")


BESIDE_OURS = """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import plain_gpt
from nemo_rl_offload.megatron.step.mtp_loss import install_mtp_loss

alone = plain_gpt.train({"mtp_num_layers": 1}, ())
install_mtp_loss()
assert plain_gpt.train({"mtp_num_layers": 1}, ()) == alone
"""


def test_a_model_of_the_programs_own_keeps_megatrons_mtp_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside this project's models, in one process."""
    monkeypatch.setenv("PYTHONPATH", python_path(PROJECT_ROOT / "tests/functional"))
    done = run_python("-W", "ignore", "-c", BESIDE_OURS)
    assert done.returncode == 0, done.stderr


FREED = f"""
import os
os.environ |= {{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}}
import plain_gpt
plain_gpt.train({MLPS | {"recompute_modules": ["layernorm", "mlp"]}!r}, ("mlp_norm",))
"""


def test_a_recomputed_mlps_input_that_its_norm_frees_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(PROJECT_ROOT / "tests/functional"))
    done = run_python("-W", "ignore", "-c", FREED)
    assert done.returncode == 1
    assert "ConfigError: recompute_modules: 'layernorm' frees what 'mlp' saves and 'mlp_norm' offloads" in done.stderr
