"""A whole GRPO step by phase, with vLLM on the same GPU, beside vLLM alone.

    python benchmarks/grpo_step.py --out benchmarks/results/DEVICE
    python benchmarks/grpo_step.py --out benchmarks/results/DEVICE --part engine

A model of Qwen2.5-1.5B's shape with random weights and its own vocabulary. Part `alone` is vLLM as a user would call
it, with the same graphs and 256 requests at once, with what training asks for (seeds, log-probabilities) and without.
Part `engine` asks this project's policy for as many responses, in turn with vLLM alone on the same GPU, asked for the
same: with the engine in its caller's process, as it is here, and in another one, vLLM's own setting. Then it times what
surrounds them: handing over weights, sleep and wake. All three fit at `gpu_memory_utilization=0.2` of 80 GB. Part
`step` is `nemo-rl-offload run grpo`: what `metrics.jsonl` says of each phase, of steps after the first two. Each part
is a process of its own, one after another.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attempts import run_ours
from common import HAS_GPU, environment, say

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config

EXEMPLAR = PROJECT_ROOT / "examples/configs" / ("grpo_math_1B_vllm.yaml" if HAS_GPU else "grpo_tiny_vllm.yaml")
TOKENIZER = PROJECT_ROOT / "examples/models/tiny_speller"
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "bos_token_id": None,
    "dtype": "bfloat16",
}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "dtype": "float32",
}
NUM_PROMPTS = 16 if HAS_GPU else 4
NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = (256, 40, 512) if HAS_GPU else (8, 16, 8)
STEP_TOKENS = 128 if HAS_GPU else 8
ROUNDS = 4
PAIRED_ROUNDS = 8
NUM_STEPS = 7
LONGEST_PROMPT = 100
"""Bytes, which are tokens, of a problem and the template."""
PARTS = ("alone", "engine", "step")
LOGPROBS = {"logprobs": 0, "flat_logprobs": True}
ALONE: dict[str, dict[str, str]] = {
    "in its caller's process": {},
    "in another process": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
}
"""Settings of vLLM alone, by where its engine is."""


def write_model(folder: Path, changes: Mapping[str, Any] | None = None) -> None:
    """Random weights beside a tokenizer for bytes, in the shape above but for `changes`; a CPU has a small one.

    Another process writes them, since this one is to hold none of the device's memory.
    """
    writer = multiprocessing.get_context("spawn").Process(target=_write_model, args=(folder, dict(changes or {})))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(writer.exitcode)


def _write_model(folder: Path, changes: dict[str, Any]) -> None:
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"model_type": "qwen2", **SHAPE, **changes, **({} if HAS_GPU else SMALL)})
    dtype = getattr(torch, "bfloat16" if HAS_GPU else "float32")
    torch.manual_seed(0)
    with torch.device("cuda" if HAS_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def overrides(model: Path, options: argparse.Namespace) -> list[str]:
    """Of the exemplar: the shape's batches, and nothing that depends on what random weights answer."""
    size = NUM_REQUESTS if HAS_GPU else 16
    longest = PROMPT_TOKENS + max(NEW_TOKENS, STEP_TOKENS) + 64
    found = [
        f"policy.model_name={model}",
        f"policy.tokenizer.name={model}",
        f"policy.max_total_sequence_length={longest}",
        f"policy.train_global_batch_size={size}",
        f"data.max_input_seq_length={LONGEST_PROMPT}",
        "data.validation.size=4",
        f"grpo.num_prompts_per_step={NUM_PROMPTS}",
        f"grpo.num_generations_per_prompt={size // NUM_PROMPTS}",
        "grpo.val_period=1000",
        *("grpo.val_at_start=false", "grpo.val_at_end=false"),
        f"grpo.max_num_steps={NUM_STEPS}",
        "env.reasoning_gym.task=spell_backward",
        "env.reasoning_gym.params={min_word_len: 3, max_word_len: 5}",
        "checkpointing.enabled=false",
        "cluster.gpus_per_node=1",
    ]
    small = [] if HAS_GPU else [f"policy.{key}=16" for key in ("train_micro_batch_size", "logprob_batch_size")]
    return [*found, *small, *options.set]


def tokens_per_s(generate: Callable[[int], int]) -> list[float]:
    """Of some rounds after a first one."""
    rates = []
    for number in range(ROUNDS):
        begin = time.perf_counter()
        num_tokens = generate(number)
        rates.append(num_tokens / (time.perf_counter() - begin))
    return rates[1:]


def prompts() -> list[list[int]]:
    return [[(7 * place + 13 * number) % 255 for place in range(PROMPT_TOKENS)] for number in range(NUM_REQUESTS)]


def build_alone(model: Path, options: argparse.Namespace, more: Mapping[str, str]) -> Callable[[dict[str, Any]], int]:
    """vLLM with its defaults and the same graphs; what comes back answers all requests and counts the tokens."""
    config = load_config(EXEMPLAR, overrides(model, options))["policy"]
    from nemo_rl_offload.generation.vllm.settings import engine_arguments, engine_env

    os.environ |= engine_env(config["generation"], "cuda" if HAS_GPU else "cpu") | more
    arguments = engine_arguments(config, model, is_cpu=not HAS_GPU, can_sleep=False, cache_bytes=1 << 28)
    for name in ("worker_extension_cls", "logprobs_mode"):
        del arguments[name]
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]

    def generate(how: dict[str, Any]) -> int:
        params = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, **how)
        return sum(len(each.outputs[0].token_ids) for each in llm.generate(inputs, params, use_tqdm=False))

    return generate


def measure_alone(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Sampling without seeds or log-probabilities; and with them."""
    generate = build_alone(model, options, {})
    return {
        "tokens_per_s": tokens_per_s(lambda _: generate({})),
        "tokens_per_s_with_seeds": tokens_per_s(lambda number: generate({"seed": number})),
        "tokens_per_s_with_logprobs": tokens_per_s(lambda _: generate(LOGPROBS)),
        "tokens_per_s_with_both": tokens_per_s(lambda number: generate({"seed": number, **LOGPROBS})),
    }


class Alone:
    """vLLM alone in a process of its own, where a round can be asked for."""

    def __init__(self, model: Path, options: argparse.Namespace, more: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._own, other = context.Pipe()
        self._process = context.Process(target=self._serve, args=(model, options, more, other))
        self._process.start()
        other.close()  # so that its end is noticed
        self._own.recv()

    @staticmethod
    def _serve(model: Path, options: argparse.Namespace, more: Mapping[str, str], connection: Any) -> None:
        generate = build_alone(model, options, more)
        connection.send(None)
        while (number := connection.recv()) is not None:
            connection.send(generate({"seed": number, **LOGPROBS}))

    def generate(self, number: int) -> int:
        self._own.send(number)
        return int(self._own.recv())

    def stop(self) -> None:
        self._own.send(None)
        self._process.join()


def measure_engine(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The policy that trains, and its generator; what a step asks of them."""
    from nemo_rl_offload.cluster.virtual_cluster import VirtualCluster
    from nemo_rl_offload.generation.sampling import Sampling
    from nemo_rl_offload.policy.driver import Policy

    whole = load_config(EXEMPLAR, [*overrides(model, options), f"policy.generation.max_new_tokens={NEW_TOKENS}"])
    config = whole["policy"]
    times: dict[str, list[float]] = {name: [] for name in ("sleep", "wake_weights", "update_weights", "wake_cache")}

    def timed(name: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - begin)

    others = {name: Alone(model, options, more) for name, more in ALONE.items()}
    with VirtualCluster(**whole["cluster"], groups_per_slot=2) as cluster:
        policy = Policy(cluster, config, model, (256,), seed=0, num_steps=10, keep_reference=False)
        sampling, generator, trainers = Sampling.of(config), policy._generator, policy._trainers
        few = prompts()[:1]

        def generate(number: int) -> int:
            responses = policy.generate(prompts(), number, sampling)
            return sum(len(response.tokens) for response in responses)

        ways = {"": generate, **{f" alone, {name}": other.generate for name, other in others.items()}}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        try:
            for number in range(PAIRED_ROUNDS):
                for name, way in ways.items():
                    begin = time.perf_counter()
                    num_tokens = way(number)
                    rates[name].append(num_tokens / (time.perf_counter() - begin))
            for other in others.values():
                other.stop()
            for number in range(ROUNDS):
                timed("sleep", generator.sleep)
                timed("wake_weights", generator.wake)
                timed("update_weights", lambda: generator.update_weights(trainers))
                timed("wake_cache", lambda n=number: policy.generate(few, n, Sampling(1)))  # type: ignore[misc]
        finally:
            policy.shutdown()
    return {f"tokens_per_s{name}": each[1:] for name, each in rates.items()} | {"seconds": times}


def measure_step(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """By the command line."""
    more = [f"policy.generation.max_new_tokens={STEP_TOKENS}", *overrides(model, options)]
    return run_ours("grpo", EXEMPLAR, model.parent / "run", more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--name", default="vllm", help="of the result's file: grpo_step_NAME.json")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more overrides of the exemplar")
    parser.add_argument("--model", type=Path, help="a folder; one is written otherwise")
    parser.add_argument("--inner", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    measures = {"alone": measure_alone, "engine": measure_engine, "step": measure_step}
    if options.inner:
        options.inner.write_text(json.dumps(measures[options.part[0]](options.model, options)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"experiment": "grpo_step", "name": options.name, "overrides": options.set, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if not model.exists():
            say("writing a model")
            write_model(model)
        for part in options.part:
            say(f"part {part}")
            inner = Path(folder) / f"{part}.json"
            command = [sys.executable, __file__, "--out", str(options.out), "--part", part, "--model", str(model)]
            command += ["--inner", str(inner), *(["--set", *options.set] if options.set else [])]
            done = subprocess.run(command, check=False)
            found = json.loads(inner.read_text()) if inner.exists() else {"failed": done.returncode}
            result["parts"][part] = found
            result |= environment()  # after the first part: to ask for the device takes some of its memory
            say(json.dumps({key: value for key, value in found.items() if key not in ("steps", "summary")}))
            (options.out / f"grpo_step_{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
