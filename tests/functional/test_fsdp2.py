"""FSDP2 and tensor parallelism on two ranks: the same bits with offloading, counted bytes, in every combination."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from huggingface_models import DENSE_NAMES, DEVICE, all_came_back, gradients, identical, make_batch, make_model, offload
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = [
    pytest.mark.slow,
    *([pytest.mark.cuda] if DEVICE == "cuda" else []),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none"),
]

LAYERS = ["model.layers.*"]
ATTENTION = ["attn_norm", "qkv_linear", "core_attn", "attn_proj"]


class Case(NamedTuple):
    names: Sequence[str]
    prepare: Callable[[Any], Any] = lambda model: model
    """What is done to the model before it is sharded."""
    param_dtype: torch.dtype | None = None
    reshard: bool = True
    offload_first: bool = False
    """Offloading begins before the model is sharded."""
    tensor_parallel: bool = False


def checkpoint_layers(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def checkpoint_all_but_attention(model: Any) -> Any:
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm", "mlp"):
            setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
    return model


def checkpoint_parts(model: Any) -> Any:
    for layer in checkpoint_all_but_attention(model).model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    return model


def compile_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def low_rank(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


CASES = {
    "plain": Case(DENSE_NAMES),
    "offload first": Case(DENSE_NAMES, offload_first=True),
    "bfloat16": Case(DENSE_NAMES, param_dtype=torch.bfloat16),
    "weights stay gathered": Case(DENSE_NAMES, reshard=False),
    "weights stay gathered in bfloat16": Case(DENSE_NAMES, param_dtype=torch.bfloat16, reshard=False),
    "layers recomputed": Case(LAYERS, checkpoint_layers, torch.bfloat16),
    "layers recomputed, offload first": Case(LAYERS, checkpoint_layers, offload_first=True),
    "all but attention recomputed": Case(ATTENTION[1:], checkpoint_all_but_attention, torch.bfloat16),
    "every part recomputed": Case(["core_attn", "model.layers.*.mlp"], checkpoint_parts),
    "compiled": Case(LAYERS, compile_layers),
    "low rank": Case(["core_attn", "attn_norm", "mlp_act"], low_rank),
    "low rank in bfloat16": Case(["core_attn", "mlp_act"], low_rank, torch.bfloat16, offload_first=True),
    # What goes through its linears is no plain tensor there.
    "tensor parallel": Case(["attn_norm", "core_attn", "mlp_norm", "mlp_act"], tensor_parallel=True),
}


def layers_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers"))


def shard(model: Any, case: Case) -> None:
    if case.tensor_parallel:
        mesh = init_device_mesh(DEVICE, (2,))
        columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
        for layer in layers_of(model):
            plan = {f"self_attn.{name}": ColwiseParallel() for name in columns[:3]}
            plan |= {f"mlp.{name}": ColwiseParallel() for name in columns[3:]}
            plan |= {f"{'self_attn' if name == 'o_proj' else 'mlp'}.{name}": RowwiseParallel() for name in rows}
            parallelize_module(layer, mesh, plan)
        return
    policy = MixedPrecisionPolicy(param_dtype=case.param_dtype)
    for part in (*layers_of(model), model):
        fully_shard(part, mp_policy=policy, reshard_after_forward=case.reshard)


def local_gradients(model: nn.Module, rank: int, case: Case) -> list[Tensor]:
    """Of two microbatches, whose gradients add up; all ranks of tensor parallelism have the same."""
    seed = 0 if case.tensor_parallel else rank
    found = gradients(model, [make_batch(11, seed), make_batch(6, seed)])
    return [each.to_local() if hasattr(each, "to_local") else each for each in found]


def built(case: Case) -> Any:
    torch.manual_seed(0)
    return case.prepare(make_model("llama" if case.tensor_parallel else "qwen3"))


def run_cases(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if DEVICE == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", rank=rank, world_size=2)
    found = {}
    for name, case in CASES.items():
        model = built(case)
        shard(model, case)
        expected = local_gradients(model, rank, case)
        model = built(case)
        if not case.offload_first:
            shard(model, case)
        with offload(model, list(case.names)) as active:
            if case.offload_first:
                shard(model, case)
            results = [local_gradients(model, rank, case) for _ in range(2)]
        stats = active.stats()
        found[name] = {
            "same": all(identical(each, expected) for each in results),
            "moved": sorted(name for name, each in stats.per_module.items() if each.bytes_out),
            "back": all_came_back(stats),
            "none left": stats.host_bytes == 0,
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of every case, on both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_cases, args=(port, folder), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_and_counted_bytes(case: str, outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        assert rank[case].pop("moved") == sorted(CASES[case].names)
        assert rank[case] == {"same": True, "back": True, "none left": True}
