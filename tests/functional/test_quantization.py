"""Quantization-aware training: weights are what they are worth in NVFP4 at every moment, and learn beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from example_runs import run_example, run_python
from ranks import Ranks
from safetensors.torch import load_file

from nemo_rl_offload.algorithms.distillation import teacher_config
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.config.rules.quantization import linears
from nemo_rl_offload.megatron.layers.quantization import nvfp4
from nemo_rl_offload.specs.model_shape import parse_model_shape
from nemo_rl_offload.specs.offload_modules import MOE_MODULES, SUPPORTED_MODULES
from nemo_rl_offload.specs.quantization import find_quantization

if TYPE_CHECKING:
    from rank_work import Outcome

pytestmark = pytest.mark.slow

CFG = str(PROJECT_ROOT / "examples/modelopt/quant_configs/nvfp4_a16.yaml")
BFLOAT16 = (".precision=bfloat16", "scheduler.lr_warmup_iters=0", "moe_router_bias_update_rate=0")
ON = (*BFLOAT16, f".quant_cfg={CFG}")
SGD = ("optimizer.optimizer=sgd", "optimizer.use_distributed_optimizer=false", "optimizer.clip_grad=0")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPES: dict[str, dict[str, int]] = {
    "qwen2": {key: size for key, size in WIDE.items() if key != "head_dim"},
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 32},
    "deepseek_v3_mtp": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "v_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {},
    "nemotron_h_latent": {},
}
TP, PP = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2-sp": (TP, "sequence_parallel=true"),
    "pp2": (PP,),
    "pp2-vpp2": (PP, "virtual_pipeline_model_parallel_size=2", "overlap_p2p_comm=true", "batch_p2p_comm=false"),
    "ep2": ("expert_model_parallel_size=2",),
    "etp2": ("expert_tensor_parallel_size=2",),
    "dp2-overlap": (
        "optimizer.use_distributed_optimizer=true",
        "distributed_data_parallel_config.overlap_grad_reduce=true",
        "distributed_data_parallel_config.overlap_param_gather=true",
    ),
}
_MODULES = tuple(name for name in SUPPORTED_MODULES if name not in MOE_MODULES)


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            place = tmp_path_factory.mktemp(family)
            (folders[family],) = ranks(1).run("write", family, place, **SHAPES[family])
        return folders[family]

    return folder_of


def joined(name: str) -> str | None:
    """What Megatron has in one weight has one name; None for what is not a linear's weight in a layer."""
    if not name.endswith("_proj.weight") or name.startswith("mtp."):
        return None
    return re.sub(r"\.(q|k|v)_proj", ".qkv", re.sub(r"\.(gate|up)_proj", ".fc1", name))


def quantized(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A folder's weights after quantization, all linears' that `joined` knows."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, weight in weights.items():
        if (whole := joined(name)) is not None:
            parts.setdefault(whole, []).append(weight.abs().amax().float())
    largest = {whole: torch.stack(each).amax() for whole, each in parts.items()}
    return {
        name: weight if (whole := joined(name)) is None else nvfp4(weight, 16, largest[whole])
        for name, weight in weights.items()
    }


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen2", layout) for layout in ("one", "tp2-sp", "pp2", "pp2-vpp2", "dp2-overlap")),
        *(("qwen3_moe", layout) for layout in ("one", "tp2-sp", "ep2", "etp2")),
    ],
)
def test_every_layout_starts_with_the_same_quantized_weights(
    family: str, layout: str, ranks: Callable[[int], Ranks], folder: Callable[[str], Path]
) -> None:
    path = folder(family)
    num_ranks, settings = (1, ()) if layout == "one" else (2, LAYOUTS[layout])
    (found, _), *_ = ranks(num_ranks).run("start_weights", path, (*ON, *settings))
    of_folder = {name: each.to(torch.bfloat16) for name, each in load_file(path / "model.safetensors").items()}
    expected = quantized(of_folder)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight.float().numpy(), err_msg=name)
    changed = {name for name, weight in expected.items() if not torch.equal(weight, of_folder[name])}
    assert changed == {name for name in expected if joined(name)}


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3_mtp", "nemotron_h", "nemotron_h_latent"])
@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_rules_know_the_names_of_linears_and_their_rows(
    family: str, layout: str, ranks: Callable[[int], Ranks], folder: Callable[[str], Path]
) -> None:
    path = folder(family)
    settings = () if layout == "one" else LAYOUTS[layout]
    results = ranks(1 if layout == "one" else 2).run("start_weights", path, (*BFLOAT16, *settings))
    found = [name for _, names in results for name in names if not name.startswith("mtp.")]
    content = json.loads((path / "config.json").read_text())
    known = dict(linears(parse_model_shape(content).shape, content.get("moe_latent_size"), 1, 1))
    assert sorted(found) == sorted(known)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_step_has_the_gradients_of_a_model_with_these_weights(
    family: str, ranks: Callable[[int], Ranks], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """What is straight-through: the plain model of a folder with quantized weights has the same bits."""
    (quantized_folder,) = ranks(1).run("write_start", folder(family), ON, tmp_path / "quantized")
    steps = ((0, 8), (1, 8))
    (aware,) = ranks(1).run("train", folder(family), (*ON, *SGD), steps)
    (plain,) = ranks(1).run("train", quantized_folder, (*BFLOAT16, *SGD), steps)
    assert aware.metrics[0] == plain.metrics[0]
    assert aware.digests[0] == plain.digests[0]
    assert aware.digests[1] != plain.digests[1], "after a step they are quantized again"


def test_weights_follow_what_learns_in_float32(ranks: Callable[[int], Ranks], folder: Callable[[str], Path]) -> None:
    rate = ("optimizer.lr=1e-3", "optimizer.min_lr=1e-3")
    (pairs,) = ranks(1).run("main_weights", folder("qwen3_moe"), (*ON, *SGD, *rate), 3)
    cfg, on = find_quantization(CFG), set[str]()
    for name, (each, is_as_at_start) in pairs.items():
        main = torch.from_numpy(each["main"])
        wide, weight = main.to(torch.bfloat16), torch.from_numpy(each["weight"])
        assert not is_as_at_start, name
        if cfg.block(f"{name.rpartition('.')[0]}.weight_quantizer") is None:
            assert torch.equal(weight, wide.float()), name
        else:
            on.add(name)
            assert torch.equal(weight, nvfp4(wide, 16, wide.abs().amax().float()).float()), name
            assert not torch.equal(weight, wide.float()), name
    assert {name for name in pairs if name not in on} <= {"output_layer.weight"}


@pytest.mark.parametrize(("family", "layout"), [("qwen2", "one"), ("qwen2", "tp2-sp"), ("qwen2", "pp2-vpp2")])
def test_offloading_changes_no_bit(
    family: str, layout: str, ranks: Callable[[int], Ranks], folder: Callable[[str], Path]
) -> None:
    num_ranks, settings = (1, ()) if layout == "one" else (2, LAYOUTS[layout])
    listed = ("fine_grained_activation_offloading=true", f"offload_modules=[{','.join(_MODULES)}]")
    outcomes: list[list[Outcome]] = [
        ranks(num_ranks).run("train", folder(family), (*ON, *SGD, *settings, *more), ((0, 8), (1, 8)))
        for more in ((), listed)
    ]
    for reference, outcome in zip(*outcomes, strict=True):
        assert outcome.metrics == reference.metrics
        assert outcome.digests == reference.digests
        assert sum(outcome.bytes_out.values()) > 0


@pytest.mark.parametrize(
    ("layout", "more"), [("tp2-sp", ()), ("dp2-overlap", ()), ("tp2-sp", ("optimizer.optimizer_cpu_offload=true",))]
)
def test_a_run_goes_on_with_the_same_bits(
    layout: str, more: tuple[str, ...], ranks: Callable[[int], Ranks], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = (*ON, *LAYOUTS[layout], *more)
    wholes = ranks(2).run("train_and_save", folder("qwen2"), settings, tmp_path)
    manifest = {name: digest for whole in wholes for name, digest in whole.manifest.items()}
    resumed = ranks(2).run("load_and_train", folder("qwen2"), settings, tmp_path, manifest)
    for whole, other in zip(wholes, resumed, strict=True):
        assert other.digest == whole.digest
        assert other.metrics == whole.metrics


def test_a_run_begins_with_the_weights_of_a_plain_one(
    ranks: Callable[[int], Ranks], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = (*BFLOAT16, *SGD, "optimizer.lr=0.3")
    ((plain, found),) = ranks(1).run("begin_with_a_checkpoint", folder("qwen2"), settings, ON, tmp_path)
    expected = quantized({name: torch.from_numpy(weight).to(torch.bfloat16) for name, weight in plain.items()})
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight.float().numpy(), err_msg=name)


def worth_themselves(path: Path) -> list[bool]:
    """Of a folder's linears, whether quantization leaves them."""
    weights = load_file(path / "model.safetensors")
    again = quantized(weights)
    return [torch.equal(again[name], weight) for name, weight in weights.items() if joined(name)]


@pytest.mark.sampled
def test_a_whole_run_hands_on_quantized_weights(tmp_path: Path) -> None:
    """What is exported is what the responses came from, and probabilities of generation are those of training."""
    run_dir, out = tmp_path / "run", tmp_path / "exported"
    settings = ("policy.precision=bfloat16", "policy.quant_cfg=W4A16_NVFP4_CFG", "grpo.max_num_steps=2")
    done = run_example("grpo", run_dir, "--config", "examples/configs/grpo_tiny.yaml", *settings)
    assert done.returncode == 0, done.stderr[-2000:]
    done = run_python("-m", "nemo_rl_offload.cli", "export", str(run_dir / "step_2"), str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(worth_themselves(out))
    assert not any(worth_themselves(PROJECT_ROOT / "examples/models/tiny_speller"))


def test_a_teacher_is_as_its_folder_is() -> None:
    config: Any = load_config(
        PROJECT_ROOT / "examples/configs/distillation_tiny.yaml",
        ["policy.precision=bfloat16", "policy.quant_cfg=W4A16_NVFP4_CFG"],
    )
    assert teacher_config(config)["quant_cfg"] is None
