"""The engine inside TRL's SFTTrainer and beside FSDP2, in turn with what these programs have themselves.

    python benchmarks/adapters.py --out benchmarks/results/DEVICE
    python benchmarks/adapters.py --out benchmarks/results/DEVICE --program fsdp2

A model of Qwen2.5-1.5B's shape as transformers builds it, float32 weights, computing in bfloat16, one sequence a step.
Each attempt is a process of its own: some steps, of which the first are left out. `loss` is the last one's; offloading
and recomputation change no bit of it where the kernels are deterministic. TRL's own offloading
(`activation_offloading`) and torch's (`save_on_cpu`) take every tensor; ours takes what is listed.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import HAS_GPU, environment, say
from grpo_step import SHAPE, SMALL, TOKENIZER

LENGTH = 8192 if HAS_GPU else 64
NUM_STEPS = 8
WARMUP_STEPS = 3
DEVICE = "cuda" if HAS_GPU else "cpu"
ATTENTION = ["attn_norm", "core_attn", "attn_proj"]
LAYERS = ["model.layers.*"]
HOST_BUDGET = "48GiB" if HAS_GPU else "64MiB"
SETTINGS: dict[str, Any] = {"host_memory_budget": HOST_BUDGET} | ({} if HAS_GPU else {"min_tensor_bytes": 0})

Attempt = dict[str, Any]
OURS: dict[str, Attempt] = {
    "ours: attention": {"modules": ATTENTION},
    "ours: attention and activations": {"modules": [*ATTENTION, "mlp_act"]},
}
CHECKPOINTING: Attempt = {"gradient_checkpointing": True}
OURS_BESIDE_CHECKPOINTING = {"checkpointing, ours: layers": CHECKPOINTING | {"modules": LAYERS}}
ATTEMPTS: dict[str, dict[str, Attempt]] = {
    "trl": {
        "nothing": {},
        "TRL's offloading": {"activation_offloading": True},
        **OURS,
        "checkpointing": CHECKPOINTING,
        "checkpointing, TRL's offloading": CHECKPOINTING | {"activation_offloading": True},
        **OURS_BESIDE_CHECKPOINTING,
    },
    "fsdp2": {
        "nothing": {},
        "save_on_cpu": {"save_on_cpu": True},
        **OURS,
        "checkpointing": CHECKPOINTING,
        **OURS_BESIDE_CHECKPOINTING,
    },
}


class Clock:
    """Milliseconds of each step, after the device is done."""

    def __init__(self) -> None:
        self.steps_ms: list[float] = []
        self._begin = time.perf_counter()

    def step(self) -> None:
        if HAS_GPU:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps_ms.append((now - self._begin) * 1e3)
        self._begin = now
        if HAS_GPU and len(self.steps_ms) == WARMUP_STEPS:
            torch.cuda.reset_peak_memory_stats()


def make_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**{**SHAPE, **({} if HAS_GPU else SMALL), "dtype": "float32", "use_cache": False})
    with torch.device(DEVICE):
        return Qwen2ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def token_rows(vocabulary_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary_size, (NUM_STEPS, LENGTH), generator=generator).tolist()


def measure_trl(attempt: Attempt, folder: Path) -> dict[str, Any]:
    """SFTTrainer with its defaults, but for what an attempt sets."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from nemo_rl_offload import OffloadCallback

    clock = Clock()

    class Times(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.step()

    model, own = make_model(), dict(attempt)
    modules = own.pop("modules", None)
    offloading = [] if modules is None else [OffloadCallback(modules, **SETTINGS)]
    arguments = {"gradient_checkpointing": False, "bf16": True, "per_device_train_batch_size": 1, "max_length": LENGTH}
    arguments |= {"max_steps": NUM_STEPS, "save_strategy": "no", "logging_steps": 1, "report_to": [], "seed": 1}
    arguments |= {"output_dir": str(folder), "disable_tqdm": True, "use_cpu": not HAS_GPU, "optim": "adamw_torch_fused"}
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**arguments | own),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in token_rows(model.config.vocab_size)]),
        processing_class=AutoTokenizer.from_pretrained(TOKENIZER),
        callbacks=[Times(), *offloading],
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    num_bytes = offloading[0].stats().bytes_out if offloading else 0
    return {"steps_ms": clock.steps_ms, "loss": losses[-1], "bytes_out": num_bytes / NUM_STEPS}


def measure_fsdp2(attempt: Attempt, folder: Path) -> dict[str, Any]:
    """`fully_shard` of each layer with mixed precision, one rank, and transformers' own loss."""
    import torch.distributed as dist
    from torch.autograd.graph import save_on_cpu
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from nemo_rl_offload import offload_activations

    dist.init_process_group("nccl" if HAS_GPU else "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    model = make_model()
    if attempt.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    modules = attempt.get("modules")
    offload = None if modules is None else offload_activations(model, modules, **SETTINGS)
    hooks: Callable[[], Any] = partial(save_on_cpu, pin_memory=HAS_GPU) if attempt.get("save_on_cpu") else nullcontext
    clock = Clock()
    model.train()
    for row in token_rows(model.config.vocab_size):
        tokens = torch.tensor([row], device=DEVICE)
        with hooks():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if offload is not None:
            offload.end_step()
        clock.step()
    num_bytes = 0 if offload is None else offload.stats().bytes_out
    dist.destroy_process_group()
    return {"steps_ms": clock.steps_ms, "loss": float(loss.detach()), "bytes_out": num_bytes / NUM_STEPS}


MEASURES = {"trl": measure_trl, "fsdp2": measure_fsdp2}


def _measure(program: str, attempt: Attempt, folder: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    try:
        found = MEASURES[program](attempt, folder)
    except torch.OutOfMemoryError:
        found = {"error": "out of memory"}
    else:
        found["ms"] = statistics.median(found["steps_ms"][WARMUP_STEPS:])
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated() if HAS_GPU else 0
    (folder / "found.json").write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--program", nargs="+", choices=list(ATTEMPTS), default=list(ATTEMPTS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for program in options.program:
        result: dict[str, Any] = {"experiment": "adapters", "program": program, "length": LENGTH, "attempts": {}}
        for name, attempt in ATTEMPTS[program].items():
            with tempfile.TemporaryDirectory() as folder:
                worker = multiprocessing.get_context("spawn").Process(
                    target=_measure, args=(program, attempt, Path(folder))
                )
                worker.start()
                worker.join()
                kept = Path(folder) / "found.json"
                found = json.loads(kept.read_text()) if kept.exists() else {"error": f"ended with {worker.exitcode}"}
            say(f"{program}, {name}: {json.dumps(found)}")
            result["attempts"][name] = found
            (options.out / f"adapters_{program}.json").write_text(json.dumps(result, indent=1) + "\n")
        result |= environment()
        (options.out / f"adapters_{program}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
