"""Compares vLLM engines of two devices with transformers after updates of their weights, on a CPU.

`python tests/functional/vllm_devices.py qwen2:tensor:dies qwen2:pipeline:hangs qwen3_moe:expert:missing` prints what it
found as JSON, by case: a family of models; what the devices share, which is layers, the layers' number, or layers and
experts; and a fault that ends the engine: a weight that does not come (`missing`), devices that draw with different
seeds (`disagree`), or a device that is killed or stopped while it generates. Before that two weights take each other's
place, which the comparison has to find.
"""

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import vllm_agreement
from cpu_processes import cpu_cluster
from models import write_model
from safetensors.torch import load_file
from vllm_agreement import BUCKET_BYTES, NEW_TOKENS, PROMPTS, SHAPES, Reference, Weights, changed, exchanged

from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
from nemo_rl_offload.cluster.worker_group import Stored
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.errors import NemoRLOffloadError
from nemo_rl_offload.generation.interface import GeneratorSetup
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.generator import VllmGenerator
from nemo_rl_offload.generation.vllm.worker import VllmWorker
from nemo_rl_offload.generation.weight_sync import WeightBucket, cut_into_buckets, pack

SIZES = {"tensor": ("tensor",), "pipeline": ("pipeline",), "expert": ("tensor", "expert")}
TIMEOUT_S = 45
GREEDY = Sampling(NEW_TOKENS, top_k=1)


class Source:
    """Gives weights as training does."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def weight_buckets(self) -> Iterator[Stored[WeightBucket]]:
        for cut in cut_into_buckets(self._weights.items(), BUCKET_BYTES):
            yield Stored.put(pack(cut))


def start(folder: Path, kind: str, cluster: VirtualCluster) -> VllmGenerator:
    sizes = [f"policy.generation.vllm_cfg.{each}_parallel_size=2" for each in SIZES[kind]]
    overrides = [
        f"policy.model_name={folder}",
        f"policy.generation.max_new_tokens={NEW_TOKENS}",
        *(f"+policy.generation.vllm_kwargs.{each}distributed_timeout_seconds={TIMEOUT_S}" for each in ("", "cpu_")),
        *sizes,
    ]
    config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]
    nobody: Any = None
    generator = VllmGenerator(GeneratorSetup(config, (vllm_agreement.END_ID,), folder, cluster, None, nobody))
    generator.prepare()
    generator.start(nobody)
    return generator


def compare(folder: Path, generator: VllmGenerator, num_updates: int) -> dict[str, Any]:
    weights = load_file(folder / "model.safetensors")
    reference = Reference(folder, weights)

    def num_different() -> int:
        answers = generator.generate(PROMPTS, 0, GREEDY)
        pairs = zip(PROMPTS, answers, strict=True)
        return sum(each.tokens != reference.greedy(prompt) for prompt, each in pairs)

    found: dict[str, Any] = {"different": [num_different()]}
    for number in range(num_updates):
        weights = changed(weights, number)
        generator.update_weights(Source(weights))  # type: ignore[arg-type]
        reference = Reference(folder, weights)
        found["different"].append(num_different())
    sampling = Sampling(NEW_TOKENS, 0.7)
    sampled = generator.generate(PROMPTS, 5, sampling)
    found["logprob_error"] = vllm_agreement.largest_error(sampled, reference, sampling.temperature)
    found["repeats"] = generator.generate(PROMPTS, 5, sampling) == sampled
    generator.update_weights(Source(exchanged(weights)))  # type: ignore[arg-type]
    found["different_with_exchanged_weights"] = num_different()
    found["listens_at"] = sorted(set(listening()))
    return found


def error_of(fault: str, generator: VllmGenerator, weights: Weights) -> str:
    """What is said after a fault."""
    try:
        if fault == "missing":
            left = {name: weight for name, weight in weights.items() if "layers.1.mlp" not in name}
            generator.update_weights(Source(left))  # type: ignore[arg-type]
        elif fault == "disagree":
            calls = [(PROMPTS, seed, vllm_agreement.EACH, Sampling(1)) for seed in (1, 2)]
            generator._group.run_streamed(VllmWorker.generate, calls, lambda *_: None)
        else:
            (second,) = (device for device in devices() if device.environ()["RANK"] == "1")
            threading.Timer(0.3, second.suspend if fault == "hangs" else second.kill).start()
            generator.generate(PROMPTS * 1000, 0, GREEDY)
    except NemoRLOffloadError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def devices() -> Iterator[psutil.Process]:
    """The processes of engines below this one."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "VLLM_NO_USAGE_STATS" in process.environ() and "RankActor" in "".join(process.cmdline()):
                yield process


def listening() -> Iterator[str]:
    """Addresses where engines listen."""
    for device in devices():
        for each in device.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                yield each.laddr.ip.removeprefix("::ffff:")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", help="FAMILY:KIND:FAULT")
    parser.add_argument("--updates", type=int, default=3)
    arguments = parser.parse_args()
    for name in ("RANK", "WORLD_SIZE"):  # of the one process that `vllm_agreement` is for
        del os.environ[name]
    results = {}
    with tempfile.TemporaryDirectory() as scratch, cpu_cluster(2) as cluster:
        for case in arguments.cases:
            family, kind, fault = case.split(":")
            folder = write_model(family, Path(scratch) / case, **SHAPES[family])
            generator = start(folder, kind, cluster)
            results[case] = compare(folder, generator, arguments.updates)
            results[case]["error"] = error_of(fault, generator, load_file(folder / "model.safetensors"))
            generator.stop()
    print(json.dumps(results))
