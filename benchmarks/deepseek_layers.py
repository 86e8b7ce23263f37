"""The first pipeline stage of Megatron-LM's PR 1913 on one GPU: DeepSeek-V3 layers, with offloading and without.

    python benchmarks/deepseek_layers.py --out benchmarks/results/DEVICE

Four layers (multi-latent attention, hidden 7168, experts of 2048, top-8, one shared expert), sequence 4096, bfloat16,
microbatches of one sequence. A rank of EP16 holds 16 of 256 experts and takes 4096 x 8 token copies when routing is
balanced; 16 experts in all, of which a token takes 8, give one GPU the same. The schedule is 1F1B as the first of four
stages runs it: three forwards ahead, then one forward and one backward in turn, over 32 microbatches: a global batch of
512 on 16 data-parallel ranks. As there, the stage stands still until the first gradient has come back through three
more stages, and between the last ones (`pipeline_waits`).

Correctness first: losses and gradients of two layers with offloading equal those without, bit for bit, under
deterministic algorithms. Then both are timed in turn, step by step, by the device's events; and with them steps without
offloading in which as many bytes are copied both ways (`bare_copies`), which no engine could be without.
"""

import argparse
import gc
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from bare_copies import BareCopies
from common import (
    HAS_GPU,
    Sample,
    environment,
    give_back_memory,
    in_turn,
    medians,
    prepare_process,
    profiled,
    say,
    settled_stats,
    timed,
)
from constants import NUM_AHEAD
from pipeline_waits import PipelineWaits, device_time
from torch import Tensor

from nemo_rl_offload.bench.process import deterministic
from nemo_rl_offload.bench.report import write_json
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.megatron.bridge import quiet
from nemo_rl_offload.megatron.config_check import provider_for
from nemo_rl_offload.megatron.model import init_process_groups, unwrap
from nemo_rl_offload.megatron.offload_interface import OffloadInterface, exclude_parameters, use_engine
from nemo_rl_offload.megatron.offload_setup import make_backend
from nemo_rl_offload.megatron.routing_result import pass_the_link
from nemo_rl_offload.megatron.setup import configure_provider
from nemo_rl_offload.offload import OffloadEngine
from nemo_rl_offload.offload.host_memory import spare_the_collector
from nemo_rl_offload.planner.catalogue import CATALOGUE

MODULES = ("attn_norm", "mlp_norm", "expert_fc1", "moe_act")  # those of the published run
GIB = 1 << 30
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
        *overrides,
    ]
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", settings)["policy"]


class Stage:
    """Layers on this device, and a step over them. Copies out hold up to `inflight_bytes` of the device's memory."""

    def __init__(
        self, policy: Any, num_layers: int, sequence: int, num_microbatches: int, inflight_bytes: int = GIB
    ) -> None:
        use_engine(None)
        self.engine = OffloadEngine(
            make_backend(), host_memory_budget_bytes=64 * GIB, min_tensor_bytes=0, max_inflight_bytes=inflight_bytes
        )
        with quiet():
            provider = provider_for(model_config(num_layers, is_small=not HAS_GPU))
            configure_provider(provider, policy)
            chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=not HAS_GPU)
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
        self.waits = PipelineWaits(NUM_AHEAD, 0.0, 0.0)
        self.bare_copies: BareCopies | None = None

    def use(self, engine: OffloadEngine | None, bare_copies: BareCopies | None = None) -> None:
        use_engine(engine, MODULES)
        self.bare_copies = bare_copies
        if bare_copies is not None:
            pass_the_link(True)  # as with an engine: as copies, the router's answers would wait behind these

    def forward(self, tokens: Tensor) -> Tensor:
        if self.bare_copies is not None:
            self.bare_copies.out()
        return self.model(tokens, self.positions, None, labels=tokens).mean()  # type: ignore[no-any-return]

    def step(self) -> Tensor:
        """1F1B of the first of four stages; gradients add up. Returns the losses."""
        alive: deque[Tensor] = deque()
        losses = []
        began = device_time()

        def backward() -> Any:
            began = device_time()
            losses.append(alive[0].detach())
            if self.bare_copies is not None:
                self.bare_copies.back()
            alive.popleft().backward()
            return began

        for number, tokens in enumerate(self.tokens):
            alive.append(self.forward(tokens))
            if len(alive) == NUM_AHEAD:
                if number == NUM_AHEAD - 1:
                    self.waits.for_first_gradient(began)
                began = backward()
        while alive:
            self.waits.for_next_gradient(began)
            began = backward()
        OffloadInterface.reset()
        return torch.stack(losses)

    def time_passes(self) -> None:
        """Let the waits be those beside stages that take as long as this one without offloading."""
        self.use(None)
        if not HAS_GPU:
            return
        times: list[tuple[float, float]] = []
        for tokens in self.tokens[:NUM_AHEAD]:
            start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            start.record()
            loss = self.forward(tokens)
            middle.record()
            loss.backward()
            end.record()
            torch.cuda.synchronize()
            times.append((start.elapsed_time(middle), middle.elapsed_time(end)))
        forward_ms, backward_ms = (min(column) for column in zip(*times, strict=True))
        self.waits = PipelineWaits(NUM_AHEAD, forward_ms, backward_ms)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def close(self) -> None:
        use_engine(None)
        self.engine.close()


def is_bit_identical(implementation: str, sequence: int) -> bool:
    """Whether two layers give the same losses and gradients with offloading, twice, as without."""
    with deterministic():
        stage = Stage(make_policy(MODULES, sequence, implementation), 2, sequence, NUM_AHEAD + 2)
        outcomes = []
        for engine in (None, None, stage.engine, stage.engine):
            stage.use(engine)
            stage.model.zero_grad(set_to_none=True)
            outcomes.append([stage.step(), *(gradient.clone() for gradient in stage.gradients())])
    assert stage.engine.stats().bytes_out > 0
    stage.close()
    plain, again, *offloaded = outcomes
    assert all(map(torch.equal, plain, again)), "the model itself does not repeat itself"
    return all(all(map(torch.equal, plain, other)) for other in offloaded)


def counters(engine: OffloadEngine) -> Sample:
    stats = settled_stats(engine)
    return {
        "bytes_out": stats.bytes_out,
        "stall_in_ms": stats.stall_in_ms,
        "stall_out_ms": stats.stall_out_ms,
        "demand_reloads": stats.demand_reloads,
    }


def measure(stage: Stage, data: dict[str, Any], rounds: int, path: Path) -> None:
    """Time steps without and with offloading, and beside bare copies, in turn; fills `data` and writes it after each
    round."""
    engine, samples, num_bytes = stage.engine, data["samples"], 0
    stage.time_passes()
    data |= {"forward_ms": stage.waits.forward_ms, "backward_ms": stage.waits.backward_ms}
    for number, name in in_turn(list(samples), rounds, num_warmup_rounds=1):
        if number >= 0 and not gc.get_freeze_count():
            spare_the_collector()  # as workers do
        is_bare = name == "copies"
        stage.use(engine if name == "on" else None, BareCopies(num_bytes // data["microbatches"]) if is_bare else None)
        if HAS_GPU:
            torch.cuda.empty_cache()
        stage.step()  # after the other one: caches of the allocator, and the arena's first slabs
        before = counters(engine)
        sample = timed(stage.step)
        after = counters(engine)
        moved = {key: after[key] - before[key] for key in after}
        if name == "on":
            num_bytes = int(moved["bytes_out"])
        if number >= 0:
            samples[name].append(sample | moved)
            say(f"round {number + 1} of {rounds}: {name} {sample['ms']:.1f} ms")
        if samples["copies"]:
            data["figures"] = derive(samples, data["microbatches"])
            data["stats"] = asdict(replace(engine.stats(), per_module={}))
            data["per_module"] = {name: asdict(each) for name, each in engine.stats().per_module.items()}
            write_json(path, data)
    gc.unfreeze()


def trace(stage: Stage, about: dict[str, Any], folder: Path) -> None:
    """A short step without and with offloading under torch's profiler, for https://ui.perfetto.dev, and its lanes."""
    stage.tokens = stage.tokens[: NUM_AHEAD + 2]
    steps = []
    for name, engine in (("off", None), ("on", stage.engine)):
        stage.use(engine)
        stage.step()
        steps.append(profiled(stage.step, folder / f"deepseek_{name}.trace.json.gz", f"offloading {name}"))
    title = f"{about['layers']} DeepSeek-V3 layers ({about['transformer_impl']}), {len(stage.tokens)} microbatches"
    write_json(
        folder / "deepseek_profile.json", {**environment(), "experiment": "profile", "title": title, "steps": steps}
    )


def derive(samples: dict[str, list[Sample]], num_microbatches: int) -> dict[str, float]:
    """Figures beside the published ones. Of the bytes of a step, those of four microbatches are alive at once."""
    off, on, copies = (medians(samples[name]) for name in ("off", "on", "copies"))
    live_bytes = on["bytes_out"] * NUM_AHEAD / num_microbatches
    saved = off["peak_allocated_bytes"] - on["peak_allocated_bytes"]
    return {
        "step_ms_off": off["ms"],
        "step_ms_on": on["ms"],
        "step_ms_copies": copies["ms"],
        "step_ms_spread": max(each["ms_spread"] for each in (off, on, copies)),
        "throughput_lost_percent": 100 * (1 - off["ms"] / on["ms"]),
        "throughput_lost_to_copies_percent": 100 * (1 - off["ms"] / copies["ms"]),
        "saved_bytes": saved,
        "offloaded_bytes_alive_at_the_peak": live_bytes,
        "saved_of_offloaded": saved / live_bytes,
        "saved_of_peak_percent": 100 * saved / max(1.0, off["peak_allocated_bytes"]),
        "peak_allocated_bytes_off": off["peak_allocated_bytes"],
        "peak_allocated_bytes_on": on["peak_allocated_bytes"],
        "peak_reserved_bytes_off": off["peak_reserved_bytes"],
        "peak_reserved_bytes_on": on["peak_reserved_bytes"],
        "stall_in_ms": on["stall_in_ms"],
        "stall_out_ms": on["stall_out_ms"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--microbatches", type=int, default=32 if HAS_GPU else 8, metavar="N", help="per step")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument(
        "--inflight", type=int, nargs="+", default=[1], metavar="GIB", help="bounds of copies under way, one run each"
    )
    parser.add_argument("--trace", action="store_true", help="profile a step without and with, after the last bound")
    options = parser.parse_args()
    prepare_process()
    sequence = 4096 if HAS_GPU else 32
    policy = make_policy(MODULES, sequence, options.impl)
    init_process_groups(policy, seed=1)
    same_bits = is_bit_identical(options.impl, min(sequence, 1024))
    for inflight_gib in options.inflight:
        give_back_memory()
        stage = Stage(policy, options.layers, sequence, options.microbatches, inflight_gib * GIB)
        data: dict[str, Any] = {
            "experiment": "E1",
            **environment(),
            "transformer_impl": options.impl,
            "model": model_config(options.layers, is_small=not HAS_GPU),
            "layers": options.layers,
            "sequence": sequence,
            "microbatches": options.microbatches,
            "modules": MODULES,
            "max_inflight_bytes": inflight_gib * GIB,
            "bit_identical": same_bits,
            "published": PUBLISHED,
            "samples": {"off": [], "on": [], "copies": []},
        }
        name = f"deepseek_{options.layers}_layers_{options.impl}_{inflight_gib}_gib_inflight.json"
        say(f"{inflight_gib} GiB in flight")
        measure(stage, data, options.rounds, options.out / name)
        if options.trace and inflight_gib == options.inflight[-1]:
            trace(stage, data, options.out)
        stage.close()
        del stage
        say(f"{data['device']}, {inflight_gib} GiB in flight, same bits: {same_bits}")
        for key, value in data["figures"].items():
            print(f"{key:36} {value:,.3f}")
    return 0 if same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
