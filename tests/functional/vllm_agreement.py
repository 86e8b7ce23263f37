"""Compares a vLLM engine with transformers after each of many updates of its weights, on a CPU.

`python tests/functional/vllm_agreement.py --family qwen2 --updates 50` prints what it found as JSON. Each update
changes all weights, hands them over in small buckets, and compares greedy responses to prompts that share whole blocks
of the prefix cache. Then two faults are planted, which the same comparison has to find: a cache that is not forgotten,
and two weights that take each other's place. vLLM stays in this process: a test starts one.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.generation.vllm.settings import engine_env

os.environ |= engine_env(load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml")["policy"]["generation"], "cpu")

import psutil
import torch
from models import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.worker import VllmWorker
from nemo_rl_offload.generation.weight_sync import WeightBucket, cut_into_buckets, pack
from nemo_rl_offload.specs.multimodal import is_of_tower, text_name, text_part

_LATENT = {"qk_rope_head_dim": 16, "max_position_embeddings": 256}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256},
    "qwen3_moe": {"head_dim": 32, "max_position_embeddings": 256},
    "gemma3_text": {"head_dim": 32, "max_position_embeddings": 256},
    "gemma3": {"head_dim": 32, "max_position_embeddings": 256},
    "deepseek_v3_mtp": _LATENT | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "glm4_moe_lite_mtp": _LATENT | {"n_routed_experts": 8, "n_group": 1},
    "deepseek_v3": _LATENT | {"q_lora_rank": None, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "deepseek_v2": _LATENT | {"n_group": 2, "rope_parameters": _YARN},
}
"""With heads that the kernels for CPUs take. The first has tied embeddings, the second experts, the third windows, the
others latent attention: the fourth a layer that vLLM has no use for, the last groups of experts that transformers does
not read."""
BLOCK_SIZE, NEW_TOKENS, END_ID = 32, 8, 1
BUCKET_BYTES = 10_000
"""So that weights go through several, and several through one."""
PREFIX = [3 + (7 * place) % 250 for place in range(2 * BLOCK_SIZE)]
PROMPTS = [[*PREFIX, 5 + row][: None if row % 2 else row + 3] for row in range(12)]
"""Half of them begin with two blocks in common."""
EACH = range(len(PROMPTS))
Weights = dict[str, Tensor]


class Handed:
    """A bucket as Ray's store would give it."""

    def __init__(self, bucket: WeightBucket) -> None:
        self.get = lambda: bucket


def changed(weights: Weights, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


def hand_over(worker: VllmWorker, weights: Weights) -> None:
    for cut in cut_into_buckets(weights.items(), BUCKET_BYTES):
        worker.load_weight_bucket(Handed(pack(cut)))  # type: ignore[arg-type]
    worker.finish_weight_update()


class Reference:
    """Transformers with given weights, of a folder with the same configuration."""

    def __init__(self, folder: Path, weights: Weights) -> None:
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            whole = load_file(folder / "model.safetensors")
            whole |= {name: weights[text_name(name)] for name in whole if text_name(name) in weights}
            save_file(whole, Path(copy) / "model.safetensors", {"format": "pt"})
            self._model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, tokens: list[int], temperature: float) -> Tensor:
        """Of all tokens at each position, [S, V]."""
        return (self._model(torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)

    def greedy(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NEW_TOKENS:
            tokens.append(int(self.logprobs(tokens, 1.0)[-1].argmax()))
            if tokens[-1] == END_ID:
                break
        return tokens[len(prompt) :]


def responses(worker: VllmWorker, *asked: Any) -> list[Response]:
    """Of `VllmWorker.generate`, which yields how far it is."""
    generating = worker.generate(*asked)
    while True:
        try:
            next(generating)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def num_different(worker: VllmWorker, reference: Reference) -> int:
    found = responses(worker, PROMPTS, 0, EACH, Sampling(NEW_TOKENS, top_k=1))
    return sum(each.tokens != reference.greedy(prompt) for prompt, each in zip(PROMPTS, found, strict=True))


def largest_error(responses: list[Response], reference: Reference, temperature: float) -> float:
    """Of log-probabilities."""
    errors = [0.0]
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logprobs = reference.logprobs(prompt + response.tokens, temperature)[len(prompt) - 1 : -1]
        expected = logprobs.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]
        errors.append(float((expected - torch.tensor(response.logprobs)).abs().max()))
    return max(errors)


def sampled(worker: VllmWorker, reference: Reference) -> Iterator[tuple[str, Any]]:
    for name, sampling in (("plain", Sampling(NEW_TOKENS, 0.7)), ("truncated", Sampling(NEW_TOKENS, 0.7, 0.9, 20))):
        whole = responses(worker, PROMPTS, 5, EACH, sampling)
        yield f"logprob_error_{name}", largest_error(whole, reference, sampling.temperature)
        yield f"repeats_{name}", responses(worker, PROMPTS, 5, EACH, sampling) == whole
        pieces = responses(worker, PROMPTS[:5], 5, EACH[:5], sampling) + responses(
            worker, PROMPTS[5:], 5, EACH[5:], sampling
        )
        yield f"pieces_equal_whole_{name}", [each.tokens for each in pieces] == [each.tokens for each in whole]
        yield f"seeds_differ_{name}", responses(worker, PROMPTS, 6, EACH, sampling) != whole
        responses_end = [
            each.tokens[-1] == END_ID if each.finished else len(each.tokens) == NEW_TOKENS for each in whole
        ]
        yield f"ends_{name}", all(responses_end)


def exchanged(weights: Weights) -> Weights:
    """With two weights of the same shape in each other's place."""
    first, second = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
    return {**weights, first: weights[second], second: weights[first]}


def z_scores(worker: VllmWorker, reference: Reference) -> dict[str, float]:
    """How far sampled tokens are from what the reference says, in standard deviations: of their log-probabilities, of
    how often the likeliest token comes, and one with an even number."""
    sums = {name: [0.0, 0.0] for name in ("logprob", "likeliest", "even")}
    sampling = Sampling(NEW_TOKENS, 0.2)
    for seed in range(20):
        for prompt, response in zip(PROMPTS, responses(worker, PROMPTS, seed, EACH, sampling), strict=True):
            logprobs_SV = reference.logprobs(prompt + response.tokens, sampling.temperature)[len(prompt) - 1 : -1]
            for logprobs_V, token in zip(logprobs_SV, response.tokens, strict=True):
                numbers_V = torch.arange(len(logprobs_V))
                for name, value_V in (
                    ("logprob", logprobs_V.clamp(min=-50)),
                    ("likeliest", (numbers_V == logprobs_V.argmax()).float()),
                    ("even", (numbers_V % 2 == 0).float()),
                ):
                    mean = (logprobs_V.exp() * value_V).sum()
                    sums[name][0] += float(value_V[token] - mean)
                    sums[name][1] += float((logprobs_V.exp() * (value_V - mean) ** 2).sum())
    return {name: float(difference / variance**0.5) for name, (difference, variance) in sums.items()}


def drafted(
    worker: VllmWorker, reference: Reference, weights: Weights, *, layer: int | None
) -> Iterator[tuple[str, Any]]:
    """What speculative decoding changes: the time alone. `layer`: the model's own that drafts."""
    found = responses(worker, PROMPTS, 5, EACH, Sampling(NEW_TOKENS, top_k=1))
    yield "num_drafted", sum(each.num_drafted for each in found)
    yield "num_accepted", sum(each.num_accepted for each in found)
    yield "z_scores", z_scores(worker, reference)
    extension = worker._llm.llm_engine.model_executor.driver_worker.worker
    own = extension._own_parameters_of_drafts()
    if layer is not None:
        name = f"model.layers.{layer}.eh_proj.weight"
        yield "drafts_follow", torch.equal(own[name], weights[name])
    before = {name: each.clone() for name, each in own.items()}
    extension.keep_drafts()
    with torch.no_grad():
        for each in own.values():
            each.fill_(torch.nan)
    extension.give_drafts_back()
    yield "drafts_return", all(torch.equal(each, before[name]) for name, each in own.items())


def compare(family: str, num_updates: int, speculative: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(family, Path(scratch) / "model", **SHAPES[family])
        config: Any = load_config(
            PROJECT_ROOT / "examples/configs/grpo_tiny.yaml",
            [
                f"policy.model_name={folder}",
                f"policy.generation.max_new_tokens={NEW_TOKENS}",
                "policy.generation.top_k=1",
                f"+policy.generation.vllm_kwargs.block_size={BLOCK_SIZE}",
            ],
        )["policy"]
        if speculative:
            own = speculative != "draft_model"
            model = {} if own else {"model": str(shutil.copytree(folder, Path(scratch) / "draft"))}
            drafts = {"method": speculative, "num_speculative_tokens": 3, **model}
            config["generation"]["vllm_kwargs"]["speculative_config"] = drafts
        refused = {**config, "generation": {**config["generation"], "vllm_kwargs": {"no_such_argument": 1}}}
        try:
            VllmWorker(refused, folder, (END_ID,), can_sleep=True)
        except ConfigError as error:
            found["refusal"] = str(error)
        torch.distributed.destroy_process_group()
        worker = VllmWorker(config, folder, (END_ID,), can_sleep=True)
        part = text_part(json.loads((folder / "config.json").read_text()))
        weights = {
            text_name(name): weight
            for name, weight in load_file(folder / "model.safetensors").items()
            if part is None or not is_of_tower(part, name)
        }
        found["different"] = [num_different(worker, Reference(folder, weights))]
        for number in range(num_updates):
            before, weights = weights, changed(weights, number)
            hand_over(worker, weights)
            found["different"].append(num_different(worker, reference := Reference(folder, weights)))
        found |= sampled(worker, reference)
        if speculative:
            layer = None if speculative == "draft_model" else AutoConfig.from_pretrained(folder).num_hidden_layers
            found |= drafted(worker, reference, weights, layer=layer)

        forget, worker._llm.reset_prefix_cache = worker._llm.reset_prefix_cache, lambda: True
        hand_over(worker, before)
        found["different_with_stale_cache"] = num_different(worker, Reference(folder, before))
        worker._llm.reset_prefix_cache = forget
        hand_over(worker, exchanged(weights))
        found["different_with_exchanged_weights"] = num_different(worker, reference)
        hand_over(worker, weights)
        found["different_at_last"] = num_different(worker, reference)
        try:
            hand_over(worker, {name: weight for name, weight in weights.items() if "layers.1.mlp" not in name})
        except ConfigError as error:
            found["missing"] = str(error)
    listening = [each.laddr for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return found | {
        "listens_at": sorted({address.ip for address in listening}),
        "children": [child.name() for child in psutil.Process().children(recursive=True)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=SHAPES, default="qwen2")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--speculative", choices=["draft_model", "deepseek_mtp"])
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.family, arguments.updates, arguments.speculative)))
