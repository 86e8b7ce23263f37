"""What a vLLM engine in 8 bits has and answers on a GPU: as it was built, after updates, with its first weights again.

`python tests/functional/vllm_fp8_cuda.py llama` prints what it found as JSON. The engine is built from a folder, gives
its weights up as beside training, gets other ones in small buckets, and then those of the folder again: it has to have
the same bits as a fresh one, and the same answers.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}

from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.generation.vllm.settings import engine_env

os.environ |= engine_env(
    load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", ["policy.generation.top_k=1"])["policy"][
        "generation"
    ],
    "cuda",
)

import torch
from models import write_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.worker import VllmWorker
from nemo_rl_offload.generation.weight_sync import cut_into_buckets, pack

SETTINGS = (
    "policy.precision=bfloat16",
    "policy.max_total_sequence_length=128",
    "policy.generation.backend=vllm",
    "policy.generation.top_k=1",
    "policy.generation.vllm_cfg.precision=fp8",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.2",
    "+policy.generation.vllm_kwargs.max_num_seqs=16",
)
EXEMPLAR = PROJECT_ROOT / "examples/configs/grpo_tiny.yaml"
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 192, "head_dim": 64, "num_experts": 8},
}
"""With widths that blocks of 128 divide, and that they do not."""
BUCKET_BYTES = 100_000
PROMPTS = [[3 + (7 * place + row) % 250 for place in range(20 + 3 * row)] for row in range(8)]
Weights = dict[str, Tensor]


class Handed:
    """A bucket as Ray's store would give it."""

    def __init__(self, bucket: Any) -> None:
        self.get = lambda: bucket


def hand_over(worker: VllmWorker, weights: Weights) -> None:
    for cut in cut_into_buckets(weights.items(), BUCKET_BYTES):
        bucket = pack(cut)
        worker.load_weight_bucket(Handed(bucket))  # type: ignore[arg-type]
        bucket.data[:] = 255  # another bucket may stand there by now
    worker.finish_weight_update()


def answers(worker: VllmWorker) -> list[Response]:
    generating = worker.generate(PROMPTS, 0, range(len(PROMPTS)), Sampling(24, top_k=1))
    while True:
        try:
            next(generating)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def contents(model: torch.nn.Module) -> Weights:
    return {
        name: each.detach().contiguous().flatten().view(torch.uint8).clone() for name, each in model.named_parameters()
    }


def different(found: Weights, expected: Weights) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, each in found.items() if not torch.equal(each, expected[name])]


def compared(found: list[Response], expected: list[Response]) -> dict[str, Any]:
    pairs = list(zip(found, expected, strict=True))
    return {
        "tokens": sum(one.tokens != other.tokens for one, other in pairs),
        "logprobs": max(abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=False)),
    }


@torch.no_grad()
def logprob_error(folder: Path, responses: list[Response]) -> float:
    """Mean distance of log-probabilities from those of transformers with the weights as they are."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    errors = []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        tokens = torch.tensor([prompt + response.tokens], device="cuda")
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0].cpu()
        errors.append((expected - torch.tensor(response.logprobs)).abs())
    return float(torch.cat(errors).mean())


def main(family: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_model(family, path, **SHAPES[family])
        start = {name: weight.bfloat16() for name, weight in load_file(path / "model.safetensors").items()}
        policy = load_config(EXEMPLAR, (*SETTINGS, f"policy.model_name={path}"))["policy"]
        worker = VllmWorker(policy, path, (1,), can_sleep=True)
        model = worker._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        built, first = contents(model), answers(worker)
        said: dict[str, Any] = {
            "types": {name: str(each.dtype).removeprefix("torch.") for name, each in model.named_parameters()},
            "kernels": sorted(
                {type(each.quant_method.fp8_linear).__name__ for each in model.modules() if has_kernel(each)}
            ),
            "logprob_error": logprob_error(path, first),
        }
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        generator = torch.Generator().manual_seed(1)
        others = {
            name: (each + 0.3 * each.float().std() * torch.randn(each.shape, generator=generator)).bfloat16()
            for name, each in start.items()
        }
        for name, weights in (("others", others), ("again", start), ("others_again", others), ("start", start)):
            worker.sleep()
            worker.wake()
            hand_over(worker, weights)
            said[name] = {
                "different": len(different(contents(model), built)),
                "answers": compared(answers(worker), first),
            }
        said["same_places"] = addresses == [parameter.data_ptr() for parameter in model.parameters()]
        lacking = next(name for name in start if name.endswith("down_proj.weight"))
        try:
            hand_over(worker, {name: each for name, each in start.items() if name != lacking})
        except ConfigError as error:
            said["missing"] = str(error)
    return said


def has_kernel(module: torch.nn.Module) -> bool:
    return hasattr(getattr(module, "quant_method", None), "fp8_linear")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
    os._exit(0)  # what vLLM ends by itself takes seconds
