"""One steady training step under torch's profiler, without offloading and with it.

    python benchmarks/profile_step.py --out benchmarks/results/DEVICE

Writes a trace for each, which https://ui.perfetto.dev opens, and when each lane was busy, which `make_docs.py` draws.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import HAS_GPU, environment, give_back_memory, prepare_process, profiled, say


def profile(workload: Any, variant: Any, path: Path) -> dict[str, Any]:
    """Trace a step after some others into `path` (.json.gz); returns its lanes."""
    import torch

    with variant.enter(workload):
        for _ in range(variant.num_warmup):
            workload.step()
        torch.cuda.synchronize()
        return profiled(workload.step, path, variant.name)


def run(options: argparse.Namespace) -> int:
    from variants import MODULE_SETS, nothing, ours
    from workload import Shape, Workload

    from nemo_rl_offload.bench.report import write_json

    options.out.mkdir(parents=True, exist_ok=True)
    sequence = options.sequence if HAS_GPU else 48
    workload = Workload(Shape(options.layers, sequence, 2, "grpo", options.impl))
    modules = MODULE_SETS[options.impl]
    data: dict[str, Any] = {"experiment": "profile", **environment(), **workload.describe(), "steps": []}
    for label, variant in (("without", nothing()), ("with", ours(options.modules, modules[options.modules]))):
        say(f"profiling {variant.name}")
        data["steps"].append(profile(workload, variant, options.out / f"profile_{label}.trace.json.gz"))
        give_back_memory()
        write_json(options.out / "profile.json", data, indent=None)
    for step in data["steps"]:
        print(step["name"], json.dumps({key: round(value, 1) for key, value in step["figures"].items()}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sequence", type=int, default=8192, metavar="TOKENS")
    parser.add_argument("--layers", type=int, default=8 if HAS_GPU else 2, metavar="N")
    parser.add_argument("--impl", choices=("torch", "transformer_engine"), default="torch")
    parser.add_argument("--modules", default="core_attn", help="a set of variants.py")
    options = parser.parse_args()
    prepare_process()
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
