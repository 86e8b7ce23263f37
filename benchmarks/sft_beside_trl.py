"""Steps of supervised fine-tuning beside TRL's SFTTrainer, at equal settings.

    python benchmarks/sft_beside_trl.py --out benchmarks/results/DEVICE
    python benchmarks/sft_beside_trl.py --out benchmarks/results/DEVICE --attempt ours "TRL float32, packing"

The model of `beside_trl.py`, prompts and completions of random letters, of which a step has 64: of a quarter of
`--tokens` up to `--tokens` each, a token a byte. Both sides learn the completions, by AdamW with the same rate. Ours
is `nemo-rl-offload run sft` in packs. TRL's ways are those that its documents advise: weights in float32 (`bf16=True`
over them, as this project keeps float32 main weights beside bfloat16) or in bfloat16, gradient checkpointing (its
default), liger's kernels (of `liger-kernel`, to be installed beside TRL), packing, activations offloaded. TRL's packs
keep sequences apart where FlashAttention is installed, and warn where it is not; a step has as many whole packs as 64
sequences fill. What does not run is listed with its error. Tokens a second are those of sequences, without padding.
"""

import argparse
import json
import os
import random
import statistics
import string
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpo_step
from attempts import (
    WARMUP_STEPS,
    Ours,
    Theirs,
    add_card,
    measure_attempt,
    measure_attempts,
    run_ours,
    wait_for_device,
)
from beside_trl import SHAPES
from common import HAS_GPU

from nemo_rl_offload.config.loader import PROJECT_ROOT

EXEMPLAR = PROJECT_ROOT / "examples/configs" / ("sft.yaml" if HAS_GPU else "sft_tiny.yaml")
NUM_SEQUENCES = 64 if HAS_GPU else 8
"""A step."""
PACK_TOKENS = 16_384 if HAS_GPU else 128
TOKENS = 1024 if HAS_GPU else 32
NUM_STEPS = 7
LEARNING_RATE = 1e-6
PROMPT = "q\n"
_MEGATRON = "policy.megatron_cfg"
_ENGINE = f"{_MEGATRON}.transformer_impl=transformer_engine"
_OFF = (f"{_MEGATRON}.fine_grained_activation_offloading=false", f"{_MEGATRON}.offload_modules=null")
_NO_RECOMPUTE = f"{_MEGATRON}.recompute_granularity=null"
_WITHOUT_CHECKPOINTING = {"gradient_checkpointing": False}
_LIGER, _PACKING = {"use_liger_kernel": True}, {"packing": True, "max_length": PACK_TOKENS}
ATTEMPTS: dict[str, Ours | Theirs] = {
    "ours": Ours((_ENGINE, f"{_MEGATRON}.offload_modules=[core_attn,attn_proj]")),
    "ours: nothing offloaded": Ours((_ENGINE, *_OFF)),
    "ours: nothing offloaded or recomputed": Ours((_ENGINE, *_OFF, _NO_RECOMPUTE)),
    "ours: layers of torch": Ours(),
    "ours: optimizer on the host": Ours((f"{_MEGATRON}.optimizer.optimizer_cpu_offload=true",)),
    "ours: experts offloaded": Ours((_ENGINE, f"{_MEGATRON}.offload_modules=[expert_fc1,moe_act]")),
    "TRL float32": Theirs("float32"),
    "TRL float32, liger": Theirs("float32", arguments=_LIGER),
    "TRL float32, liger, no checkpointing": Theirs("float32", arguments={**_LIGER, **_WITHOUT_CHECKPOINTING}),
    "TRL float32, packing": Theirs("float32", arguments=_PACKING),
    "TRL float32, packing, liger": Theirs("float32", arguments={**_PACKING, **_LIGER}),
    "TRL float32, packing, liger, no checkpointing": Theirs(
        "float32", arguments={**_PACKING, **_LIGER, **_WITHOUT_CHECKPOINTING}
    ),
    "TRL float32, packing, liger, activations offloaded": Theirs(
        "float32", arguments={**_PACKING, **_LIGER, "activation_offloading": True}
    ),
    "TRL bfloat16, packing, liger": Theirs("bfloat16", arguments={**_PACKING, **_LIGER}),
}


def completions(options: argparse.Namespace) -> Iterator[str]:
    """Of every step, the same on both sides."""
    draw = random.Random(1)
    for _ in range(options.steps * NUM_SEQUENCES):
        size = draw.randint(options.tokens // 4, options.tokens) - len(PROMPT) - 1
        yield "".join(draw.choices(string.ascii_lowercase + " ", k=size - 1)) + "."


def settings(model: Path, data: Path, options: argparse.Namespace) -> list[str]:
    """What our attempts have alike, as overrides of the exemplar."""
    return [
        f"policy.model_name={model}",
        f"policy.tokenizer.name={model}",
        f"policy.max_total_sequence_length={options.tokens}",
        f"policy.train_global_batch_size={NUM_SEQUENCES}",
        "policy.train_micro_batch_size=1",
        "policy.sequence_packing.enabled=true",
        f"policy.sequence_packing.train_mb_tokens={PACK_TOKENS}",
        f"{_MEGATRON}.optimizer.lr={LEARNING_RATE}",
        f"{_MEGATRON}.optimizer.min_lr={LEARNING_RATE}",
        f"{_MEGATRON}.optimizer.weight_decay=0.01",
        f"{_MEGATRON}.optimizer.adam_beta2=0.999",
        f"{_MEGATRON}.scheduler.lr_decay_style=constant",
        f"{_MEGATRON}.scheduler.lr_warmup_iters=0",
        f"sft.max_num_steps={options.steps}",
        *("sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false"),
        f"data.train.path={data}",
        "data.validation.path=null",
        f'data.prompt_template="{{question}}{PROMPT[1:]}"',
        "data.shuffle=false",
        *("checkpointing.enabled=false", "cluster.gpus_per_node=1"),
    ]


def measure_ours(attempt: Ours, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By the command line."""
    data = model.parent / "train.jsonl"
    records = ({"prompt": PROMPT.strip(), "completion": text} for text in completions(options))
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    overrides = [*settings(model, data, options), *attempt.overrides, *options.set]
    found = run_ours("sft", EXEMPLAR, model.parent / "run", overrides)
    shown = [text for text in overrides if str(model.parent) not in text]
    return {**found, "overrides": shown}


def arguments_of(attempt: Theirs, texts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Of TRL's configuration."""
    arguments = {
        "max_length": options.tokens,
        "max_steps": options.steps,
        "bf16": HAS_GPU,
        "gradient_checkpointing": True,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": attempt.dtype},
        "per_device_train_batch_size": 8 if HAS_GPU else 4,
        **({} if HAS_GPU else {"use_cpu": True}),
        **attempt.arguments,
    }
    if arguments.get("packing"):
        num_tokens = sum(len(PROMPT) + len(text) + 1 for text in texts) // options.steps
        num_packs = max(1, num_tokens // PACK_TOKENS)
        return arguments | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": num_packs}
    return arguments | {"gradient_accumulation_steps": NUM_SEQUENCES // arguments["per_device_train_batch_size"]}


def measure_theirs(attempt: Theirs, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """TRL's trainer in this process."""
    begin = time.time()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = list(completions(options))
    arguments = arguments_of(attempt, rows, options)
    steps_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_device()
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait_for_device()
            steps_s.append(time.perf_counter() - self.begin)

    trainer = SFTTrainer(
        str(model),
        args=SFTConfig(output_dir=str(model.parent / "trl"), **arguments),
        train_dataset=Dataset.from_list([{"prompt": PROMPT, "completion": text} for text in rows]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Clock()],
    )
    trainer.train()
    history = [log for log in trainer.state.log_history if "num_tokens" in log]
    seen = [0.0, *(log["num_tokens"] for log in history)]
    steps = [
        {"timing/step_s": seconds, "tokens_per_s": (after - before) / seconds, "loss": float(log["loss"])}
        for seconds, before, after, log in zip(steps_s, seen, seen[1:], history, strict=False)
    ]
    steady = steps[WARMUP_STEPS:] or steps[-1:]
    return {
        "wall_s": time.time() - begin,
        "first_step_s": steps_s[0],
        "medians": {name: statistics.median(step[name] for step in steady) for name in steady[0]},
        "steps": steps,
        "arguments": arguments,
    }


def measure(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One attempt, in a process of its own."""
    return measure_attempt(__file__, name, ATTEMPTS[name], model, options, ("tokens", "steps"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--attempt", nargs="+", choices=ATTEMPTS, default=list(ATTEMPTS))
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--name", help="of the result's file: sft_beside_trl_NAME.json; the shape otherwise")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more overrides of ours")
    add_card(parser)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the longest sequences")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--model", type=Path, help="a folder; one is written otherwise")
    parser.add_argument("--inner", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        attempt = ATTEMPTS[options.attempt[0]]
        ways: Any = measure_ours if isinstance(attempt, Ours) else measure_theirs
        options.inner.write_text(json.dumps(ways(attempt, options.model, options)))
        return 0
    path = options.out / f"sft_beside_trl_{options.name or options.shape}.json"
    sizes = {"sequences": NUM_SEQUENCES, "tokens": options.tokens, "pack_tokens": PACK_TOKENS}
    result: dict[str, Any] = {"experiment": "sft_beside_trl", "shape": options.shape, **sizes}
    write_model = partial(grpo_step.write_model, changes=SHAPES[options.shape])
    measure_attempts(options, path, result, write_model, partial(measure, options=options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
