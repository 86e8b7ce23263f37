"""The first pipeline stage of Megatron-LM's PR 1913 on one GPU: DeepSeek-V3 layers, with offloading and without.

    python benchmarks/deepseek_layers.py --out benchmarks/results/DEVICE

Four layers (multi-latent attention, hidden 7168, experts of 2048, top-8, one shared expert), sequence 4096, bfloat16,
microbatches of one sequence. A rank of EP16 holds 16 of 256 experts and takes 4096 x 8 token copies when routing is
balanced; 16 experts in all, of which a token takes 8, give one GPU the same. The schedule is 1F1B as the first of four
stages runs it: three forwards ahead, then one forward and one backward in turn.

Correctness first: losses and gradients of two layers with offloading equal those without, bit for bit, under
deterministic algorithms. Then both are timed in turn, step by step, by the device's events.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.megatron.bridge import quiet
from nemo_rl_offload.megatron.config_check import provider_for
from nemo_rl_offload.megatron.model import init_process_groups, unwrap
from nemo_rl_offload.megatron.offload_interface import OffloadInterface, exclude_parameters, use_engine
from nemo_rl_offload.megatron.offload_setup import install_offloading
from nemo_rl_offload.megatron.setup import configure_provider
from nemo_rl_offload.offload import OffloadEngine
from nemo_rl_offload.planner.catalogue import CATALOGUE

MODULES = ("attn_norm", "mlp_norm", "expert_fc1", "moe_act")  # those of the published run
NUM_AHEAD = 4  # microbatches in flight on the first of four stages
PUBLISHED = {"tflops_lost_percent": 1.9, "saved_of_peak_percent": 17.8}


def model_config(num_layers: int, is_small: bool) -> dict[str, Any]:
    """DeepSeek-V3's, but for the number of layers and experts, and a vocabulary that leaves memory to the layers."""
    changes = {
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": 0,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "rope_scaling": None,
    }
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    return {**CATALOGUE["deepseek-ai/DeepSeek-V3"], **changes, **(small if is_small else {})}


def make_policy(modules: Sequence[str], sequence: int, implementation: str, *overrides: str) -> Any:
    cfg = "policy.megatron_cfg"
    settings = [
        "policy.precision=bfloat16",
        f"policy.max_total_sequence_length={sequence}",
        f"{cfg}.transformer_impl={implementation}",
        f"{cfg}.fine_grained_activation_offloading=true",
        f"{cfg}.offload_modules=[{','.join(modules)}]",
        f"{cfg}.min_offloaded_tensor_size=0",
        f"{cfg}.moe_router_load_balancing_type=none",
        f"{cfg}.activation_offload.host_memory_budget=64GiB",
        *overrides,
    ]
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", settings)["policy"]


class Stage:
    """Layers on this device, and a step over them."""

    def __init__(self, policy: Any, num_layers: int, sequence: int, num_microbatches: int) -> None:
        use_engine(None)
        self.engine = install_offloading(policy)
        assert self.engine is not None
        with quiet():
            provider = provider_for(model_config(num_layers, is_small=not torch.cuda.is_available()))
            configure_provider(provider, policy)
            chunks = provider.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available()
            )
        self.model = unwrap(chunks[0]).train()
        exclude_parameters(self.engine, [self.model])
        generator = torch.Generator(torch.cuda.current_device()).manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1)
            for buffer in self.model.buffers():
                if buffer.is_floating_point() and buffer.ndim == 1 and buffer.shape[0] == 16:
                    buffer.zero_()  # the router's bias
        self.tokens = torch.randint(
            0, 1024, (num_microbatches, 1, sequence), generator=generator, device=generator.device
        )
        self.positions = torch.arange(sequence, device=generator.device)[None]

    def use(self, engine: OffloadEngine | None) -> None:
        use_engine(engine, MODULES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, self.positions, None, labels=tokens).mean()  # type: ignore[no-any-return]

    def step(self) -> Tensor:
        """1F1B of the first of four stages; gradients add up. Returns the losses."""
        alive: deque[Tensor] = deque()
        losses = []
        for tokens in self.tokens:
            alive.append(self.forward(tokens))
            if len(alive) == NUM_AHEAD:
                losses.append(alive[0].detach())
                alive.popleft().backward()
        while alive:
            losses.append(alive[0].detach())
            alive.popleft().backward()
        OffloadInterface.reset()
        return torch.stack(losses)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def close(self) -> None:
        use_engine(None)
        assert self.engine is not None
        self.engine.close()


def is_bit_identical(implementation: str, sequence: int) -> bool:
    """Whether two layers give the same losses and gradients with offloading, twice, as without."""
    torch.use_deterministic_algorithms(True)
    stage = Stage(make_policy(MODULES, sequence, implementation), 2, sequence, NUM_AHEAD + 2)
    outcomes = []
    for engine in (None, None, stage.engine, stage.engine):
        stage.use(engine)
        stage.model.zero_grad(set_to_none=True)
        outcomes.append([stage.step(), *(gradient.clone() for gradient in stage.gradients())])
    torch.use_deterministic_algorithms(False)
    assert stage.engine is not None
    assert stage.engine.stats().bytes_out > 0
    stage.close()
    plain, again, *offloaded = outcomes
    assert all(map(torch.equal, plain, again)), "the model itself does not repeat itself"
    return all(all(map(torch.equal, plain, other)) for other in offloaded)


def timed_step(stage: Stage) -> dict[str, float]:
    if not torch.cuda.is_available():
        stage.step()
        return {"ms": 0.0, "peak_allocated_bytes": 0, "peak_reserved_bytes": 0}
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    stage.step()
    end.record()
    torch.cuda.synchronize()
    return {
        "ms": float(start.elapsed_time(end)),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def measure(implementation: str, num_layers: int, sequence: int, num_microbatches: int, rounds: int) -> dict[str, Any]:
    stage = Stage(make_policy(MODULES, sequence, implementation), num_layers, sequence, num_microbatches)
    engine = stage.engine
    assert engine is not None
    samples: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for number in range(-2, rounds):
        for name, used in (("off", None), ("on", engine)):
            stage.use(used)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            stage.step()  # after the other one: caches of the allocator, and the arena's first slabs
            before = engine.stats()
            sample = timed_step(stage)
            if number >= 0:
                after = engine.stats()
                sample["bytes_out"] = after.bytes_out - before.bytes_out
                sample["stall_ms"] = after.stall_in_ms + after.stall_out_ms - before.stall_in_ms - before.stall_out_ms
                samples[name].append(sample)
    stats = asdict(replace(engine.stats(), per_module={}))
    per_module = {name: asdict(each) for name, each in engine.stats().per_module.items()}
    stage.close()
    return {"samples": samples, "stats": stats, "per_module": per_module}


def derive(measured: dict[str, Any], num_microbatches: int) -> dict[str, float]:
    """Figures beside the published ones. Of the bytes of a step, those of four microbatches are alive at once."""
    medians = {
        name: {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        for name, samples in measured["samples"].items()
    }
    off, on = medians["off"], medians["on"]
    live_bytes = on["bytes_out"] * NUM_AHEAD / num_microbatches
    saved = off["peak_allocated_bytes"] - on["peak_allocated_bytes"]
    return {
        "step_ms_off": off["ms"],
        "step_ms_on": on["ms"],
        "throughput_lost_percent": 100 * (1 - off["ms"] / on["ms"]) if on["ms"] else 0.0,
        "saved_bytes": saved,
        "offloaded_bytes_alive_at_the_peak": live_bytes,
        "saved_of_offloaded": saved / live_bytes if live_bytes else 0.0,
        "saved_of_peak_percent": 100 * saved / max(1.0, off["peak_allocated_bytes"]),
        "peak_reserved_bytes_off": off["peak_reserved_bytes"],
        "peak_reserved_bytes_on": on["peak_reserved_bytes"],
        "stall_ms": on["stall_ms"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="per step")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    sequence = 4096 if has_gpu else 32
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    if not has_gpu:
        from nemo_rl_offload.megatron.cpu import install_cpu_support

        install_cpu_support()
    init_process_groups(make_policy(MODULES, sequence, options.impl), seed=1)
    same_bits = is_bit_identical(options.impl, min(sequence, 1024))
    gc.collect()
    measured = measure(options.impl, options.layers, sequence, options.microbatches, options.rounds)
    data = {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "transformer_impl": options.impl,
        "layers": options.layers,
        "microbatches": options.microbatches,
        "modules": MODULES,
        "bit_identical": same_bits,
        "figures": derive(measured, options.microbatches),
        "published": PUBLISHED,
        **measured,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"deepseek_{options.layers}_layers_{options.impl}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({key: data[key] for key in ("device", "bit_identical", "figures")}, indent=1) + "\n")
    return 0 if same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
