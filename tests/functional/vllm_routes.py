"""Compares the experts that a vLLM engine returns with those of transformers' routers, on a CPU.

`python tests/functional/vllm_routes.py --family qwen3_moe` prints what it found as JSON: of prompts that share
blocks of the prefix cache, in batches and of requests that join what is under way, before and after an update of all
weights. vLLM stays in this process: a test starts one.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm_agreement as agreement  # which prepares the environment
from safetensors.torch import load_file
from torch import Tensor
from vllm_agreement import BLOCK_SIZE, EACH, END_ID, NEW_TOKENS, PROMPTS, SHAPES, Reference, responses

from models import write_model  # isort: skip

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.settings import Request
from nemo_rl_offload.generation.vllm.worker import VllmWorker

SAMPLING = Sampling(NEW_TOKENS)


def routes_of(reference: Reference, tokens: list[int]) -> Tensor:
    """[tokens, layers with experts, top-k], of transformers' routers."""
    layers = [layer.mlp for layer in reference._model.model.layers if hasattr(layer.mlp, "gate")]
    found: list[Tensor] = []

    def take(mlp: Any, made: Any) -> None:
        found.append(made[2] if isinstance(made, tuple) else mlp.route_tokens_to_experts(made)[0])

    hooks = [mlp.gate.register_forward_hook(lambda _module, _inputs, made, mlp=mlp: take(mlp, made)) for mlp in layers]
    reference.logprobs(tokens, 1.0)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def share_alike(found: list[Response], reference: Reference, moved: int = 0) -> float:
    """Share of the tokens' choices that are transformers'; `moved`: of the tokens so many places before."""
    alike = []
    for prompt, response in zip(PROMPTS, found, strict=True):
        expected = routes_of(reference, prompt + response.tokens)[:-1]
        assert response.routed_experts is not None
        assert response.routed_experts.dtype.name == "int8"
        assert response.routed_experts.shape == expected.shape
        said = torch.from_numpy(response.routed_experts).long().roll(moved, 0)
        alike.append((said.sort(-1)[0] == expected.sort(-1)[0]).all(-1).flatten())
    return float(torch.cat(alike).float().mean())


def continuous(worker: VllmWorker) -> list[Response]:
    """Half of the requests join the others."""
    requests = [Request(number, prompt, 3, number, SAMPLING) for number, prompt in enumerate(PROMPTS)]
    ended = dict(worker.advance(requests[::2]))
    ended |= dict(worker.advance(requests[1::2]))
    while len(ended) < len(requests):
        ended |= dict(worker.advance([]))
    return [ended[number] for number in range(len(requests))]


def compare(family: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        dense = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
        shape = SHAPES[family] | dense | {"num_hidden_layers": 4}
        folder = write_model(family, Path(scratch) / "model", **shape)
        overrides = [
            f"policy.model_name={folder}",
            "policy.router_replay.enabled=true",
            f"policy.generation.max_new_tokens={NEW_TOKENS}",
            f"+policy.generation.vllm_kwargs.block_size={BLOCK_SIZE}",
        ]
        config: Any = load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", overrides)["policy"]
        worker = VllmWorker(config, folder, (END_ID,), can_sleep=True)
        weights = load_file(folder / "model.safetensors")
        before = Reference(folder, weights)
        sampled = responses(worker, PROMPTS, 5, EACH, SAMPLING)
        found |= {"alike": share_alike(sampled, before), "alike_moved": share_alike(sampled, before, moved=1)}
        found["alike_continuous"] = share_alike(continuous(worker), before)
        weights = agreement.changed(weights, 0)
        agreement.hand_over(worker, weights)
        sampled = responses(worker, PROMPTS, 5, EACH, SAMPLING)
        found["alike_after_update"] = share_alike(sampled, Reference(folder, weights))
        found["alike_with_old_weights"] = share_alike(sampled, before)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=SHAPES, default="qwen3_moe")
    print(json.dumps(compare(parser.parse_args().family)))
