"""GRPO steps beside TRL's GRPOTrainer, with vLLM on the same GPU, at equal settings.

    python benchmarks/beside_trl.py --out benchmarks/results/DEVICE
    python benchmarks/beside_trl.py --out benchmarks/results/DEVICE --attempt ours "TRL float32"
    python benchmarks/beside_trl.py --out benchmarks/results/DEVICE --shape 7b --response-tokens 32768 --prompts 1 \\
        --responses 2 --steps 1 --kl-weight 0 --attempt "TRL bfloat16"

The model of `grpo_step.py`, with its prompts, group size, lengths, learning rate, AdamW and weight of KL. Each attempt
is a process of its own, one after another: ours is `nemo-rl-offload run grpo`, and needs no TRL. TRL's are those that
its documents advise: weights in float32 (`bf16=True` over them, as this project keeps float32 main weights beside
bfloat16) or in bfloat16, with gradient checkpointing (its default) and without, larger microbatches, vLLM asleep while
it trains or awake. What does not run is listed with its error. The longest sequences are found by `--response-tokens`:
responses of random weights seldom end before they are that long. TRL's microbatch has one row where they are long, and
"two updates" of the same responses have Adam's state in the second without a second generation. Training takes as much
for a long prompt, `--prompt-tokens`, which takes seconds where a response takes minutes. `--card-gib` makes a card as
small as another.

TRL's phases are timed around its own methods, each after the device is done; its log-probabilities include the
reference's. Memory is `attempts.py`'s.
"""

import argparse
import json
import os
import random
import statistics
import string
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpo_step
from attempts import WARMUP_STEPS, Ours, Theirs, add_card, measure_attempt, measure_attempts, wait_for_device
from common import HAS_GPU
from grpo_step import EXEMPLAR, LONGEST_PROMPT, NUM_PROMPTS, NUM_REQUESTS, NUM_STEPS, STEP_TOKENS

from nemo_rl_offload.config.loader import load_config

NUM_RESPONSES = NUM_REQUESTS if HAS_GPU else 16
LEARNING_RATE, KL_WEIGHT = 1e-6, 0.01
MICROBATCH_TOKENS = 2048
"""Of TRL's responses, at the most, where that is more than one."""
VLLM_SHARE = 0.3
"""Of the GPU's memory, as in TRL's documents."""
LORA_DIM, LORA_ALPHA = 16, 32
PROJECTIONS = "linear_q,linear_k,linear_v,linear_proj,linear_fc1_gate,linear_fc1_up,linear_fc2"
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {},
    "7b": {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "tie_word_embeddings": False}
    | {"num_attention_heads": 28, "num_key_value_heads": 4},
    "14b": {"vocab_size": 152_064, "hidden_size": 5120, "intermediate_size": 13_824, "tie_word_embeddings": False}
    | {"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
    "experts": {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768}
    | {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True},
}


_OFF = ("policy.megatron_cfg.fine_grained_activation_offloading=false", "policy.megatron_cfg.offload_modules=null")
_ENGINE = "policy.megatron_cfg.transformer_impl=transformer_engine"
_ENGINES_MODULES = "policy.megatron_cfg.offload_modules=[core_attn,attn_proj]"
_ON_HOST = ("policy.megatron_cfg.optimizer.optimizer_cpu_offload=true",)
_AWAY = (
    "policy.offload_optimizer_for_logprob=true",
    "policy.megatron_cfg.recompute_modules=[mlp_act,mlp_fc1,moe_act]",
)
_LORA = (
    "policy.megatron_cfg.peft.enabled=true",
    f"policy.megatron_cfg.peft.target_modules=[{PROJECTIONS}]",
    f"policy.megatron_cfg.peft.dim={LORA_DIM}",
    f"policy.megatron_cfg.peft.alpha={LORA_ALPHA}",
)
ATTEMPTS: dict[str, Ours | Theirs] = {
    "ours": Ours(),
    "ours: nothing offloaded": Ours(_OFF),
    "ours: Transformer Engine": Ours((_ENGINE, _ENGINES_MODULES)),
    "ours: Transformer Engine, nothing offloaded": Ours((_ENGINE, *_OFF)),
    "ours: optimizer on the host": Ours(_ON_HOST),
    "ours: optimizer away while vLLM generates": Ours((_ENGINE, _ENGINES_MODULES, *_AWAY)),
    "ours: LoRA": Ours(_LORA),
    "TRL float32": Theirs("float32"),
    "TRL float32, no checkpointing": Theirs("float32", arguments={"gradient_checkpointing": False}),
    "TRL float32, microbatches of 32": Theirs("float32", arguments={"per_device_train_batch_size": 32}),
    "TRL float32, vLLM awake": Theirs("float32", arguments={"vllm_enable_sleep_mode": False}),
    "TRL float32, liger": Theirs("float32", arguments={"use_liger_kernel": True}),
    "TRL bfloat16": Theirs("bfloat16"),
    "TRL bfloat16, liger": Theirs("bfloat16", arguments={"use_liger_kernel": True}),
    "TRL bfloat16, liger, two updates": Theirs("bfloat16", arguments={"use_liger_kernel": True, "num_iterations": 2}),
    "TRL bfloat16, no checkpointing": Theirs("bfloat16", arguments={"gradient_checkpointing": False}),
    "TRL LoRA": Theirs("bfloat16", uses_lora=True),
    "TRL LoRA, liger": Theirs("bfloat16", uses_lora=True, arguments={"use_liger_kernel": True}),
    "TRL LoRA, no checkpointing": Theirs("bfloat16", uses_lora=True, arguments={"gradient_checkpointing": False}),
}


def settings(options: argparse.Namespace) -> tuple[str, ...]:
    """What ours and TRL's have alike, as overrides."""
    shared = (f"policy.generation.vllm_cfg.gpu_memory_utilization={options.share}",)
    longest = (f"policy.max_total_sequence_length={longest_of(options)}",)
    return (
        f"policy.megatron_cfg.optimizer.lr={LEARNING_RATE}",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        f"loss_fn.reference_policy_kl_penalty={options.kl_weight}",
        f"policy.generation.max_new_tokens={options.response_tokens}",
        f"policy.train_global_batch_size={options.responses}",
        f"grpo.num_prompts_per_step={options.prompts}",
        f"grpo.num_generations_per_prompt={options.responses // options.prompts}",
        f"grpo.max_num_steps={options.steps}",
        *(longest if options.prompt_tokens or options.response_tokens > STEP_TOKENS or not HAS_GPU else ()),
        *(shared if HAS_GPU else ("policy.generation.backend=megatron",)),
    )


def longest_of(options: argparse.Namespace) -> int:
    """Tokens of the longest prompt and its response."""
    return int((options.prompt_tokens or LONGEST_PROMPT) + options.response_tokens)


def long_prompts(options: argparse.Namespace) -> list[str]:
    """Random letters, a token each, for all steps; an empty list where prompts are reasoning-gym's."""
    draw, size = random.Random(1), options.prompt_tokens
    num = options.steps * options.prompts if size else 0
    return ["".join(draw.choices(string.ascii_lowercase, k=size)) for _ in range(num)]


def long_prompt_settings(folder: Path, options: argparse.Namespace) -> list[str]:
    """What has our runs read those prompts, which are written to `folder`."""
    if not (prompts := long_prompts(options)):
        return []
    texts = {"train": prompts, "validation": ["3 + 4"]}
    for split, each in texts.items():
        lines = "".join(json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in each)
        (folder / f"{split}.jsonl").write_text(lines)
    return [
        *(f"data.{split}.path={folder / split}.jsonl" for split in texts),
        f"data.max_input_seq_length={options.prompt_tokens}",
        'data.prompt_template="{question}"',
        "data.env_name=function",
        "env.function.path=examples.smollm2.last_number:last_number",
    ]


def measure_ours(attempt: Ours, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By the command line, as `grpo_step.py` does."""
    overrides = [*settings(options), *attempt.overrides, *options.set]
    of_prompts = long_prompt_settings(model.parent, options)
    found = grpo_step.measure_step(model, argparse.Namespace(set=[*overrides, *of_prompts]))
    return {**found, "overrides": overrides}


def prompt_texts(model: Path, options: argparse.Namespace) -> list[str]:
    """Those of our runs, as text."""
    if prompts := long_prompts(options):
        return prompts
    from nemo_rl_offload.data.prompt_tokens import encode_prompt
    from nemo_rl_offload.data.prompts import problems_of
    from nemo_rl_offload.data.tokenizer import load_tokenizer

    config = load_config(EXEMPLAR, grpo_step.overrides(model, argparse.Namespace(set=settings(options))))
    tokenizer: Any = load_tokenizer(model)
    problems = problems_of(config["env"]["reasoning_gym"], seed=1, size=options.steps * options.prompts)
    template = config["data"]["prompt_template"]
    return [tokenizer.decode(encode_prompt(tokenizer, template, problem.question)) for problem in problems]


class Phases:
    """Seconds of each phase of each step of TRL's trainer, by wrapping the methods that are the phases."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's time to a phase of this step."""
        wait_for_device()
        begin = time.perf_counter()
        yield
        wait_for_device()
        self._now[name] += time.perf_counter() - begin

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time each call of a method."""
        call: Callable[..., Any] = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.timed(name):
                return call(*args, **kwargs)

        setattr(owner, method, wrapped)

    def end_step(self, step_s: float, num_tokens: float) -> None:
        """Keep the step, with what is left for the phases that lie around others."""
        inner_s = self._now["generation"] + self._now["refit"]
        rollout_s = self._now["rollout"]
        phases = {
            "refit": self._now["refit"],
            "generation": self._now["generation"],
            "logprobs": rollout_s - inner_s,
            "train": step_s - rollout_s,
            "step": step_s,
        }
        found = {f"timing/{name}_s": seconds for name, seconds in phases.items()}
        self.steps.append({**found, "tokens_per_s": num_tokens / step_s})
        self._now.clear()


def measure_theirs(attempt: Theirs, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """TRL's trainer in this process."""
    begin = time.time()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    micro = min(8 if HAS_GPU else 4, max(1, MICROBATCH_TOKENS // (options.prompt_tokens + options.response_tokens)))
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": options.share,
        "vllm_max_model_length": longest_of(options),
    }
    arguments = {
        "per_device_train_batch_size": micro,
        "num_generations": options.responses // options.prompts,
        "max_completion_length": options.response_tokens,
        "max_steps": options.steps,
        "bf16": HAS_GPU,
        "gradient_checkpointing": True,
        "beta": options.kl_weight,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": attempt.dtype},
        **(vllm if HAS_GPU else {"use_cpu": True}),
        **attempt.arguments,
    }
    most = arguments["per_device_train_batch_size"]
    micro = max(size for size in range(1, most + 1) if options.responses % size == 0)
    arguments |= {"per_device_train_batch_size": micro, "gradient_accumulation_steps": options.responses // micro}
    adapters = None
    if attempt.uses_lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=LORA_DIM, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    phases = Phases()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.begin = self.num_tokens = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_device()
            self.begin = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            wait_for_device()
            seen = float(state.num_input_tokens_seen)
            phases.end_step(time.perf_counter() - self.begin, seen - self.num_tokens)
            self.num_tokens = seen

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 7) / 7 for text in completions]

    trainer = GRPOTrainer(
        str(model),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(model.parent / "trl"), **arguments),
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompt_texts(model, options)]),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=adapters,
        callbacks=[Clock()],
    )
    phases.wrap(trainer, "_generate_and_score_completions", "rollout")
    if HAS_GPU:
        phases.wrap(trainer.vllm_generation, "sync_weights", "refit")
        phases.wrap(trainer.vllm_generation, "generate", "generation")
    else:
        phases.wrap(trainer, "_generate_single_turn", "generation")
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "completions/mean_length" in log]
    steady = phases.steps[WARMUP_STEPS:] or phases.steps[-1:]
    return {
        "wall_s": time.time() - begin,
        "first_step_s": phases.steps[0]["timing/step_s"],
        "medians": {name: statistics.median(step[name] for step in steady) for name in steady[0]},
        "steps": phases.steps,
        "mean_response_tokens": statistics.mean(lengths),
        "arguments": {**arguments, "lora": attempt.uses_lora},
    }


def measure(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One attempt, in a process of its own."""
    keys = ("share", "kl_weight", "prompts", "responses", "prompt_tokens", "response_tokens", "steps")
    return measure_attempt(__file__, name, ATTEMPTS[name], model, options, keys)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--attempt", nargs="+", choices=ATTEMPTS, default=list(ATTEMPTS))
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--name", help="of the result's file: beside_trl_NAME.json; the shape otherwise")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more overrides of ours")
    add_card(parser)
    parser.add_argument("--share", type=float, default=VLLM_SHARE, help="of the GPU's memory, for vLLM")
    parser.add_argument("--kl-weight", type=float, default=KL_WEIGHT, help="0: no reference policy")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="a step")
    parser.add_argument("--responses", type=int, default=NUM_RESPONSES, help="a step")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="of random prompts; 0: reasoning-gym's")
    parser.add_argument("--response-tokens", type=int, default=STEP_TOKENS, help="of each response, at the most")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--model", type=Path, help="a folder; one is written otherwise")
    parser.add_argument("--inner", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        attempt = ATTEMPTS[options.attempt[0]]
        ways: Any = measure_ours if isinstance(attempt, Ours) else measure_theirs
        options.inner.write_text(json.dumps(ways(attempt, options.model, options)))
        return 0
    path = options.out / f"beside_trl_{options.name or options.shape}.json"
    sizes = {key: getattr(options, key) for key in ("prompts", "responses", "prompt_tokens", "response_tokens")}
    result: dict[str, Any] = {"experiment": "beside_trl", "shape": options.shape, **sizes}
    positions = max(grpo_step.SHAPE["max_position_embeddings"], longest_of(options))
    changes = {**SHAPES[options.shape], "max_position_embeddings": positions}
    write_model = partial(grpo_step.write_model, changes=changes)
    measure_attempts(options, path, result, write_model, partial(measure, options=options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
