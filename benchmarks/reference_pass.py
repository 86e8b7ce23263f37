"""Log-probabilities of the reference beside those of the policy, of a worker as runs have it.

    python benchmarks/reference_pass.py --out benchmarks/results/DEVICE

A model of Qwen2.5-1.5B's shape with random weights and its own vocabulary, trained for one step, then asked in turn.
`exchanged`: the trained weights wait on the host meanwhile, as where the device has no room. `kept`: they stay beside
the reference's, where that makes no new highest peak. `exchange` is the way there and back alone. Weights are compared
bit by bit with those before, and the reference's log-probabilities with those of the start.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import HAS_GPU, environment, prepare_process, say
from grpo_step import write_model

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config

EXEMPLAR = PROJECT_ROOT / "examples/configs" / ("grpo_math_1B.yaml" if HAS_GPU else "grpo_tiny.yaml")
NUM_SAMPLES, LENGTH, ROWS = (256, 168, 32) if HAS_GPU else (8, 16, 4)
ROUNDS = 5
LINK_BYTES = 256 << 20 if HAS_GPU else 1 << 20


def make_worker(folder: Path, options: argparse.Namespace) -> Any:
    """As GRPO with a KL penalty makes one."""
    from nemo_rl_offload.policy.worker import PolicyWorker

    overrides = [
        f"policy.model_name={folder}",
        f"policy.train_global_batch_size={NUM_SAMPLES}",
        f"policy.train_micro_batch_size={ROWS // 4}",
        f"policy.logprob_batch_size={ROWS}",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        *options.set,
    ]
    policy = load_config(EXEMPLAR, overrides)["policy"]
    return PolicyWorker(policy, folder, seed=1, num_steps=10, keep_reference=True)


def make_batch(vocabulary_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(0, vocabulary_size, (NUM_SAMPLES, LENGTH), generator=generator),
        "input_lengths": torch.full((NUM_SAMPLES,), LENGTH),
        "token_mask": torch.ones(NUM_SAMPLES, LENGTH, dtype=torch.long),
        "sample_mask": torch.ones(NUM_SAMPLES),
    }


def seconds(work: Callable[[], object]) -> float:
    """By the clock, the device's work included."""
    _wait()
    begin = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - begin


def _wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def link_gb_per_s() -> dict[str, float]:
    """Of pinned memory: one way, the other, and each while both are busy."""
    if not HAS_GPU:
        return {}
    hosts = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(ways: tuple[int, ...]) -> None:
        for _ in range(8):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    pair = (hosts[0], devices[0]) if way else (devices[1], hosts[1])
                    pair[0].copy_(pair[1], non_blocking=True)

    found = {}
    for name, ways in {"in": (0,), "out": (1,), "each of both": (0, 1)}.items():
        seconds(lambda ways=ways: copy(ways))
        found[name] = 8 * LINK_BYTES / seconds(lambda ways=ways: copy(ways)) / 1e9
    return found


def measure(worker: Any) -> dict[str, Any]:
    from nemo_rl_offload.losses.reduction import normalizers
    from nemo_rl_offload.policy.residency.kept_weights import lasting_tensors

    batch = make_batch(worker._model.config.vocab_size)
    scored = {key: batch[key] for key in ("input_ids", "input_lengths")}
    start = worker.get_logprobs(scored)
    worker.train(batch, "nll", {}, normalizers(batch))
    trained = worker.get_logprobs(scored)
    before = [tensor.detach().clone() for tensor in lasting_tensors(worker._model.modules)]
    room = worker._phases.room_bytes
    passes: dict[str, Callable[[], object]] = {
        "logprobs": lambda: worker.get_logprobs(scored),
        "kept": lambda: worker.get_reference_policy_logprobs(scored),
        "exchanged": lambda: worker.get_reference_policy_logprobs(scored),
        "exchange": lambda: _exchange(worker),
    }
    samples: dict[str, list[float]] = {name: [] for name in passes}
    is_start = True
    for number in range(-1, ROUNDS):
        for name, work in passes.items():
            worker._phases.room_bytes = room if name == "kept" else lambda **_: 0
            spent = seconds(work)
            if number >= 0:
                samples[name].append(spent)
    for each in (room, lambda **_: 0):
        worker._phases.room_bytes = each
        is_start &= bool((worker.get_reference_policy_logprobs(scored) == start).all())
    after = lasting_tensors(worker._model.modules)
    medians = {name: statistics.median(each) for name, each in samples.items()}
    return {
        "weights_bytes": worker._reference.num_bytes,
        "room_bytes": room(within="train", beside="logprobs"),
        "seconds": samples,
        "medians": medians,
        "beyond_logprobs_s": {name: medians[name] - medians["logprobs"] for name in ("kept", "exchanged")},
        "is_the_starts": is_start,
        "has_trained": bool((trained != start).any()),
        "weights_are_bit_equal": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "peak_device_bytes": worker.peak_device_bytes(),
        "host_bytes": worker.host_bytes(),
    }


def _exchange(worker: Any) -> None:
    with worker._reference.in_place():
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more of the configuration")
    options = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        result: dict[str, Any] = {**environment(), "num_tokens": NUM_SAMPLES * LENGTH, "link_gb_per_s": link_gb_per_s()}
        begin = time.perf_counter()
        worker = make_worker(Path(folder), options)
        result["loading_s"] = time.perf_counter() - begin
        result |= measure(worker)
        worker.shutdown()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reference_pass.json").write_text(json.dumps(result, indent=1) + "\n")
    say(json.dumps({key: result[key] for key in ("medians", "beyond_logprobs_s", "link_gb_per_s")}))
    return 0 if result["is_the_starts"] and result["weights_are_bit_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
