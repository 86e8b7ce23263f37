"""Random models and optimizers, trained with the optimizer on the device and on the host: no bit may differ.

    python tests/functional/optimizer_cases.py --cases 200

A case draws a family, a precision, an optimizer and what is around it (distributed or not, clipping, gradients'
precision), a share on the host and the size of a bucket; steps, of which some are skipped for a gradient that is no
number; and a checkpoint at a random step, from which a model with the optimizer at the same or the other place goes on
as a run does that was killed. Metrics, weights, main weights and state are compared after every step.
"""

import argparse
import contextlib
import io
import logging
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import MICRO_BATCH_SIZE, make_batch, make_policy, same_tensors, weights_of, write_model
from torch import Tensor

from nemo_rl_offload.losses.nll import NegativeLogLikelihood
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.megatron.build.model import MegatronModel, build_model
from nemo_rl_offload.megatron.checkpoint import distributed as checkpoint
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.offload.backends.host import HostBackend
from nemo_rl_offload.policy.residency.megatron_optimizer import keep_on_host

FAMILIES = ("qwen2", "qwen3_moe", "llama_biased", "qwen3_moe_mixed")


class Case(NamedTuple):
    """What is drawn."""

    family: str
    overrides: tuple[str, ...]
    share: float
    bucket_bytes: int
    skipped: tuple[bool, ...]
    """Of each step, whether a gradient is no number."""
    saved_after: int
    resumed_on_host: bool


class Outcome(NamedTuple):
    """What a case has shown."""

    faults: list[str]
    counts: list[str]


@dataclass(frozen=True)
class Times(NegativeLogLikelihood):
    """A loss times a value."""

    value: float

    def __call__(self, logprobs: Tensor, batch: Any, norm: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().__call__(logprobs, batch, norm)
        return loss * self.value, metrics


def make_case(seed: int) -> Case:
    chance = random.Random(seed)
    optimizer = chance.choice(["adam", "adam", "sgd"])
    is_distributed = optimizer == "adam" and chance.random() < 0.6
    overrides = {
        ".precision": chance.choice(["bfloat16", "float32"]),
        "optimizer.optimizer": optimizer,
        "optimizer.use_distributed_optimizer": str(is_distributed).lower(),
        "optimizer.lr": chance.choice([1e-3, 1e-2]),
        "optimizer.weight_decay": chance.choice([0.0, 0.1]),
        "optimizer.clip_grad": chance.choice([0.0, 0.05, 1.0]),
        "distributed_data_parallel_config.grad_reduce_in_fp32": chance.choice(["true", "false"]),
        "scheduler.lr_warmup_iters": chance.choice([0, 2]),
        "scheduler.lr_decay_style": chance.choice(["constant", "cosine"]),
    }
    if optimizer == "sgd":
        overrides["optimizer.sgd_momentum"] = chance.choice([0.0, 0.9])
    num_steps = chance.randint(2, 4)
    return Case(
        chance.choice(FAMILIES),
        tuple(f"{key}={value}" for key, value in overrides.items()),
        chance.choice([1.0, 1.0, 1.0, 0.7, 0.3, 0.0]),
        chance.choice([1, 1 << 13, 1 << 16, 1 << 28]),
        tuple(chance.random() < 0.2 for _ in range(num_steps)),
        chance.randint(1, num_steps - 1),
        chance.random() < 0.5,
    )


def state_of(model: MegatronModel) -> list[Tensor]:
    """Copies of main weights and state, of all of a model's optimizers."""
    found = []
    for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        for group in optimizer.optimizer.param_groups:
            for weight in group["params"]:
                state = optimizer.optimizer.state[weight]
                tensors = [state[key] for key in sorted(state) if torch.is_tensor(state[key])]
                found += [tensor.detach().cpu().clone() for tensor in (weight, *tensors)]
    return found


def run_case(seed: int, folder_of: Callable[[str], Path], scratch: Path) -> Outcome:
    """Train on both places, and from a checkpoint."""
    case = make_case(seed)

    def build(on_host: bool) -> MegatronModel:
        model = build_model(make_policy(*case.overrides), folder_of(case.family), num_steps=6)
        if on_host:
            assert model.optimizer is not None
            streamed = keep_on_host(
                model.optimizer, HostArena(HostBackend(), 1 << 30), case.share, bucket_bytes=case.bucket_bytes
            )
            host_bytes.append(sum(each.host_bytes for each in streamed))
        return model

    def step(model: MegatronModel, number: int) -> dict[str, float]:
        batch = make_batch(number)
        loss = Times(torch.nan if case.skipped[number] else 1.0)
        return train_step(model, batch, loss, normalizers(batch), MICRO_BATCH_SIZE, LogitsHeadFactory(1.0))

    def compare(where: str, one: MegatronModel, other: MegatronModel, *, state: bool) -> None:
        if not same_tensors(weights_of(one), weights_of(other)):
            faults.append(f"{where}: other weights")
        pairs = zip(state_of(one), state_of(other), strict=False)
        if state and not all(torch.equal(*pair) for pair in pairs):
            faults.append(f"{where}: other state")

    faults: list[str] = []
    host_bytes: list[int] = []
    with contextlib.redirect_stdout(io.StringIO()):
        resident, hosted, resumed = build(False), build(True), build(case.resumed_on_host)
        has_stepped, folder = False, scratch / str(seed)
        for number, is_skipped in enumerate(case.skipped):
            expected, found = step(resident, number), step(hosted, number)
            has_stepped |= not is_skipped
            if not _same(expected, found):
                faults.append(f"step {number}: {found} instead of {expected}")
            compare(f"step {number}", hosted, resident, state=has_stepped)
            if number + 1 > case.saved_after and folder.exists() and not _same(step(resumed, number), expected):
                faults.append(f"step {number} behind a checkpoint: other metrics")
            if number + 1 == case.saved_after and has_stepped:
                folder.mkdir()
                checkpoint.save(hosted if seed % 2 else resident, folder)
                checkpoint.load(resumed, folder)
                compare("a checkpoint", resumed, hosted, state=True)
        if folder.exists():
            compare("in the end", resumed, resident, state=True)
    overrides = dict(text.split("=") for text in case.overrides)
    has_master = overrides[".precision"] == "bfloat16"
    if case.share == 1.0 and (has_master or overrides["optimizer.optimizer"] == "adam") and not host_bytes[0]:
        faults.append("nothing went to the host")
    return Outcome(faults, [*_counted(case, overrides), *(["resumed"] if folder.exists() else [])])


def _same(one: dict[str, float], other: dict[str, float]) -> bool:
    return repr(sorted(one.items())) == repr(sorted(other.items()))  # a loss may be no number in both


def _counted(case: Case, overrides: dict[str, str]) -> list[str]:
    return [
        case.family,
        overrides[".precision"],
        overrides["optimizer.optimizer"],
        "distributed" if overrides["optimizer.use_distributed_optimizer"] == "true" else "whole",
        "in part" if case.share < 1 else "all of it",
        *(["clipped"] if float(overrides["optimizer.clip_grad"]) else []),
        *(["skipped steps"] if any(case.skipped) else []),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    from nemo_rl_offload.megatron.build.model import init_process_groups
    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    install_cpu_support()
    os.environ.update(RANK="0", WORLD_SIZE="1")
    init_process_groups(make_policy(), seed=1)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    num_faulty = 0
    with tempfile.TemporaryDirectory() as scratch:
        folders = {family: write_model(family, Path(scratch) / family) for family in FAMILIES}
        for seed in range(args.first_seed, args.first_seed + args.cases):
            outcome = run_case(seed, folders.__getitem__, Path(scratch))
            counts.update(outcome.counts)
            num_faulty += bool(outcome.faults)
            if outcome.faults:
                print(f"seed {seed}: {'; '.join(outcome.faults)}")
    print(f"{args.cases} cases, {num_faulty} with a bit that differs")
    print("cases that: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 1 if num_faulty else 0


if __name__ == "__main__":
    sys.exit(main())
