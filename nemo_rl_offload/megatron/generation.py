"""Sampling from the training model with Megatron's static inference context and key/value cache.

Prompts of different lengths share a batch without padding on the left: the cache is filled up to the shortest prompt,
then every step decodes one position, and a row whose prompt goes on takes its next prompt token instead of the sampled
one. So every row sees exactly its own tokens, at its own positions, and the result does not depend on its neighbours.
Prompts are sorted by length first, which keeps those forced steps few. The alternative, padding on the left, needs
a mask in every decoding step. Limit: one batch runs until its longest response ends; there is no continuous batching.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.config.schema import GenerationConfig


def filter_logits(logits_BV: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Set logits outside the `top_k` most likely tokens, and outside the nucleus `top_p`, to minus infinity.

    The nucleus is the smallest set of most likely tokens whose probabilities reach `top_p` (Holtzman et al., 2020).
    """
    if top_k is not None and top_k < logits_BV.shape[-1]:
        threshold = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits_BV.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        outside = probabilities.cumsum(dim=-1) - probabilities >= top_p
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(-1, order, ordered.masked_fill(outside, -torch.inf))
    return logits_BV


def sample(logits_BV: Tensor, config: GenerationConfig, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row; returns tokens int64 [B] and their log-probabilities float32 [B]."""
    scaled = logits_BV.float() / config["temperature"]
    probabilities = filter_logits(scaled, config["top_k"], config["top_p"]).softmax(dim=-1)
    tokens = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    return tokens, scaled.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    batch_size: int,
    end_id: int,
    seed: int,
) -> list[Response]:
    """Sample one response for each prompt (token ids, none empty), in the order of `prompts`.

    `model` is Megatron's `GPTModel` without wrappers. Sampling is a function of `seed`, the prompts and `batch_size`.
    """
    assert all(prompts), "an empty prompt"
    device = torch.device(torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    results: dict[int, Response] = {}
    model.eval()
    with torch.no_grad():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = _generate_batch(model, [prompts[row] for row in rows], config, end_id, generator, device)
            results.update(zip(rows, batch, strict=True))
    return [results[row] for row in range(len(prompts))]


def _generate_batch(
    model: Any,
    prompts: list[Sequence[int]],
    config: GenerationConfig,
    end_id: int,
    generator: torch.Generator,
    device: torch.device,
) -> list[Response]:
    num_rows, shortest, longest = len(prompts), len(prompts[0]), len(prompts[-1])
    limit = longest + config["max_new_tokens"]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    tokens = torch.full((num_rows, limit), end_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    logprobs = torch.zeros(num_rows, limit, device=device)
    ends = lengths + config["max_new_tokens"]
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)

    context = StaticInferenceContext(num_rows, limit)
    start, position = 0, shortest
    while position < limit:
        logits = _advance(model, tokens[:, start:position], context)
        sampled, sampled_logprobs = sample(logits, config, generator)
        writes = (position >= lengths) & (position < ends) & ~finished
        tokens[:, position] = torch.where(writes, sampled, tokens[:, position])
        logprobs[:, position] = torch.where(writes, sampled_logprobs, logprobs[:, position])
        ends = torch.where(writes & (sampled == end_id), position + 1, ends)
        finished |= writes & (sampled == end_id)
        start, position = position, position + 1
        if bool((position >= ends).all()):
            break
    return _cut(tokens, logprobs, lengths, ends, finished)


def _advance(model: Any, new_tokens: Tensor, context: StaticInferenceContext) -> Tensor:
    """Run the model on the next tokens [B, S] of every row; returns the logits [B, vocabulary] after the last one."""
    num_new = new_tokens.shape[1]
    positions = torch.arange(num_new, device=new_tokens.device) + context.sequence_len_offset
    # The first pass is causal by position; later ones see the whole cache, for which Megatron itself lifts the mask.
    logits = model(
        new_tokens, positions.expand_as(new_tokens), None, inference_context=context, runtime_gather_output=True
    )
    context.sequence_len_offset += num_new
    context.enable_decode_mode()
    last: Tensor = logits[:, -1]
    return last


def _cut(tokens: Tensor, logprobs: Tensor, lengths: Tensor, ends: Tensor, finished: Tensor) -> list[Response]:
    rows = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), ends.tolist(), finished.tolist(), strict=True)
    return [
        Response(row_tokens[begin:end], row_logprobs[begin:end], done)
        for row_tokens, row_logprobs, begin, end, done in rows
    ]
