"""The output head alone, and a training step with it: log-probabilities from logits, and without them.

    python benchmarks/output_head.py --out benchmarks/results/DEVICE

First the head and a loss of it, forward and backward, of Qwen2.5-1.5B's hidden size and vocabulary: time, memory beside
hidden states, weight and the weight's gradient, and errors against float64. Heads take turns, round after round. Then
training steps and log-probability passes of the whole 1.5B model in packs, with either head, torch's layers and
Transformer Engine's; model FLOPs are those of `planner.cost.flops`, the optimizer's step apart.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import HAS_GPU, environment, give_back_memory, medians, prepare_process, say, timed

HIDDEN, VOCABULARY = (1536, 151_936) if HAS_GPU else (32, 1000)
LENGTHS = (4096, 16_384) if HAS_GPU else (64, 128)
ROUNDS = 5
MODEL = "Qwen/Qwen2.5-1.5B"
PACK = 16_384 if HAS_GPU else 128
NUM_PACKS = 4
SEQUENCES_PER_PACK = 16


def heads() -> dict[str, Callable[[Any, Any, Any], Any]]:
    """Functions of hidden states [N, H], weight [V, H] and ids [N] that return log-probabilities [N]."""
    from nemo_rl_offload.megatron.step.fused_linear import Head, linear_logprobs
    from nemo_rl_offload.megatron.step.head import map_logit_chunks, token_logprobs

    def logits(chunk_size: int | None) -> Callable[[Any, Any, Any], Any]:
        def compute(hidden: Any, weight: Any, ids: Any) -> Any:
            rows, targets = (hidden @ weight.T)[None], torch.nn.functional.pad(ids, (1, 0))[None, :-1]
            mapped = map_logit_chunks(token_logprobs, rows, targets, temperature=1.0, chunk_size=chunk_size)
            return mapped[0, 1:]

        return compute

    def fused(**how: Any) -> Callable[[Any, Any, Any], Any]:
        head = Head(scale=1.0, num_local=VOCABULARY, first=0, group=None, by_kernel=HAS_GPU, **how)
        return lambda hidden, weight, ids: linear_logprobs(hidden[:-1], weight, ids[:-1, None], head, entropy=False)[0][
            :, 0
        ]

    found = {
        "logits": logits(None),
        "logits in chunks": logits(LENGTHS[0] // 4),
        "fused": fused(),
        "fused, 256 tokens": fused(chunk_tokens=256),
        "fused, 1024 tokens": fused(chunk_tokens=1024),
        "fused, 4096 tokens": fused(chunk_tokens=4096),
    }
    for mib in (160, 320, 1280):
        found[f"fused, blocks of {mib} MiB"] = fused(block_bytes=mib << 20)
    return found


def measure_heads(num_tokens: int) -> dict[str, Any]:
    device = torch.cuda.current_device() if HAS_GPU else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    hidden = torch.randn(num_tokens, HIDDEN, device=device, generator=generator).to(dtype)
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN, device=device, generator=generator)).to(dtype)
    ids = torch.randint(0, VOCABULARY, (num_tokens,), device=device, generator=generator)
    factors = torch.randn(num_tokens - 1, device=device, generator=generator)

    def run(compute: Callable[[Any, Any, Any], Any]) -> list[Any]:
        leaves = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        logprobs = compute(*leaves, ids)
        return [logprobs.detach(), *torch.autograd.grad((logprobs * factors).sum(), leaves)]

    entries: dict[str, Any] = {}
    for name, compute in heads().items():
        entries[name] = {"samples": []}
        try:
            run(compute)
            give_back_memory()
            before = torch.cuda.memory_allocated() if HAS_GPU else 0
            if HAS_GPU:
                torch.cuda.reset_peak_memory_stats()
            run(compute)
            peak = (torch.cuda.max_memory_allocated() if HAS_GPU else 0) - before
            entries[name]["bytes_beside_weight_gradient"] = peak - weight.nbytes
        except torch.OutOfMemoryError:
            entries[name]["out_of_memory"] = True
            give_back_memory()
    for _ in range(ROUNDS):
        for name, compute in heads().items():
            if "out_of_memory" not in entries[name]:
                entries[name]["samples"].append(timed(lambda compute=compute: run(compute)))
    for entry in entries.values():
        if entry["samples"]:
            entry["medians"] = medians(entry["samples"])
    return {"num_tokens": num_tokens, "heads": entries}


def measure_errors(num_tokens: int) -> dict[str, Any]:
    """Relative distance to float64 of the log-probabilities and both gradients, in bfloat16."""
    device = torch.cuda.current_device() if HAS_GPU else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(num_tokens, HIDDEN, device=device, generator=generator).bfloat16()
    weight = (0.05 * torch.randn(VOCABULARY, HIDDEN, device=device, generator=generator)).bfloat16()
    ids = torch.randint(0, VOCABULARY, (num_tokens,), device=device, generator=generator)
    factors = torch.randn(num_tokens - 1, device=device, generator=generator)

    def run(compute: Callable[[Any, Any, Any], Any], dtype: torch.dtype) -> list[Any]:
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        logprobs = compute(*leaves, ids)
        return [logprobs.detach(), *torch.autograd.grad((logprobs * factors).sum(), leaves)]

    def exact(h: Any, w: Any, targets: Any) -> Any:
        return (h[:-1] @ w.T).log_softmax(-1).gather(-1, targets[:-1, None])[:, 0]

    wanted = run(exact, torch.float64)
    errors = {}
    for name, compute in heads().items():
        found = run(compute, torch.bfloat16)
        distances = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
        errors[name] = dict(zip(("logprobs", "hidden", "weight"), distances, strict=True))
        del found
    return {"num_tokens": num_tokens, "errors": errors}


def measure_steps(implementation: str) -> dict[str, Any]:
    """Steps and passes of the whole model in packs."""
    from workload import Shape, Workload, random_batch

    from nemo_rl_offload.batching.plan import MicrobatchSplit
    from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
    from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
    from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
    from nemo_rl_offload.planner.cost.flops import training_flops
    from nemo_rl_offload.specs.catalogue import load_model_shape

    num_layers = 28 if HAS_GPU else 2
    length = PACK // SEQUENCES_PER_PACK
    vocabulary = VOCABULARY if HAS_GPU else 256
    workload = Workload(Shape(num_layers, PACK, NUM_PACKS, "sft", implementation, vocabulary, MODEL))
    lengths = [length] * (NUM_PACKS * SEQUENCES_PER_PACK)
    batch = random_batch(lengths, vocabulary, 1)
    split = MicrobatchSplit((SEQUENCES_PER_PACK,) * NUM_PACKS, (PACK,) * NUM_PACKS, is_packed=True)
    flops = training_flops(load_model_shape(MODEL, None), lengths)
    factories = {"logits in chunks": LogitsHeadFactory(1.0, 1024), "fused": FusedHeadFactory(1.0, vocabulary)}
    entries: dict[str, Any] = {}
    for name, factory in factories.items():
        workload.heads = factory
        entry = entries[name] = {}
        try:
            for what, function in (
                ("train", lambda: workload.step(batch, split)),
                ("logprobs", lambda: compute_logprobs(workload.model, batch, split, workload.heads)),
            ):
                give_back_memory()
                if HAS_GPU:
                    torch.cuda.reset_peak_memory_stats()
                function()
                function()
                samples = [timed(function) for _ in range(ROUNDS)]
                entry[what] = medians(samples)
                entry[what]["peak_bytes"] = torch.cuda.max_memory_allocated() if HAS_GPU else 0
            entry["optimizer_ms"] = workload.optimizer_ms()
            step_ms = entry["train"]["ms"] - entry["optimizer_ms"]
            entry["train_tflops"] = flops / step_ms / 1e9
            entry["logprobs_tflops"] = flops / 3 / entry["logprobs"]["ms"] / 1e9
            say(f"{implementation}, {name}: {entry}")
        except torch.OutOfMemoryError:
            entry["out_of_memory"] = True
            give_back_memory()
    return {"implementation": implementation, "flops": flops, "lengths": lengths, "heads": entries}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("head", "step"), action="append")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    options = parser.parse_args()
    parts = options.part or ["head", "step"]
    prepare_process()
    from megatron.core import parallel_state

    from nemo_rl_offload.megatron.build.model import join_alone

    result: dict[str, Any] = {"environment": environment(), "hidden_size": HIDDEN, "vocabulary_size": VOCABULARY}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"output_head_{'_'.join(parts)}_{options.impl}.json"
    if "head" in parts:
        join_alone("nccl" if HAS_GPU else "gloo")
        parallel_state.initialize_model_parallel()
        result["head"] = []
        for num_tokens in LENGTHS:
            result["head"].append(measure_heads(num_tokens))
            say(str(result["head"][-1]))
            path.write_text(json.dumps(result, indent=1) + "\n")
        result["errors"] = measure_errors(LENGTHS[0] // 2)
        say(str(result["errors"]))
        path.write_text(json.dumps(result, indent=1) + "\n")
    if "step" in parts:
        result["steps"] = measure_steps(options.impl)
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
