"""Sampling from the training model with Megatron's static inference context and key/value cache.

Prompts of different lengths share a batch without padding on the left: the cache is filled up to the shortest prompt,
then every step decodes one position, and a row whose prompt goes on takes its next prompt token instead of the sampled
one. So every row sees exactly its own tokens, at its own positions, and the result does not depend on its neighbours.
Prompts are sorted by length first, which keeps those forced steps few. The alternative, padding on the left, needs
a mask in every decoding step. Limit: one batch runs until its longest response ends; there is no continuous batching.

All ranks of one tensor-, pipeline- and expert-parallel group get the same prompts and stay in step. Pipeline stages
hand activations on one after the other, and the last one's logits go to all of them, so that each rank samples the
same tokens from the same random state. Sequence and context parallelism are off meanwhile: a decoding step has one
position.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import forward_only
from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.data.tokenizer import load_tokenizer
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.stop_strings import StopStrings

TOLD_EVERY_S = 1.0
type Chunks = Sequence[Any]
"""Megatron's modules, which have no types."""


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


def sample(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row; returns tokens int64 [B] and their log-probabilities float32 [B].

    At temperature 0 the tokens are the likeliest, and the log-probabilities those at temperature 1.
    """
    scaled = logits_BV.float() / (sampling.temperature or 1.0)
    if sampling.temperature == 0:
        tokens = scaled.argmax(dim=-1)
    else:
        probabilities = filter_logits(scaled, sampling.top_k, sampling.top_p).softmax(dim=-1)
        tokens = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    return tokens, scaled.log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)


_OF_SEQUENCE_PARALLELISM = {
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "disable_sequence_parallel_comm": True,  # of adapters
}
_OF_CONTEXT_PARALLELISM = {"context_parallel_size": 1, "cp_group": None}


@contextmanager
def _with_whole_sequences(chunks: Chunks) -> Iterator[None]:
    """Every rank runs the model on whole sequences: a decoding step's one position cannot be split."""
    config = chunks[0].config
    off = (_OF_SEQUENCE_PARALLELISM if config.sequence_parallel else {}) | (
        _OF_CONTEXT_PARALLELISM if config.context_parallel_size > 1 else {}
    )
    modules = [module for chunk in chunks for module in chunk.modules()]
    holders = {id(each): each for module in modules for each in (module, getattr(module, "config", module))}
    before = [
        (each, name, getattr(each, name))
        for each in holders.values()
        for name, value in off.items()
        if getattr(each, name, value) != value
    ]
    for each, name, _ in before:
        setattr(each, name, off[name])
    _forget_positions(modules)
    try:
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)
        _forget_positions(modules)


def _forget_positions(modules: Chunks) -> None:
    """Position embeddings keep what they returned, whole or a rank's part, by the length alone."""
    for module in modules:
        if hasattr(module, "cp_group") and hasattr(type(module).forward, "cache_clear"):
            type(module).forward.cache_clear()


def generate(*args: Any, **kwargs: Any) -> list[Response]:
    """As `generating`, without a word on the way."""
    responses = generating(*args, **kwargs)
    while True:
        try:
            next(responses)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def generating(
    chunks: Chunks,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    batch_size: int,
    end_ids: Sequence[int],
    seed: int,
    max_length: int = 1 << 60,
) -> Generator[Generated, None, list[Response]]:
    """Sample one response for each prompt (token ids, none empty), in the order of `prompts`; yields its progress.

    None is longer than `max_new_tokens`, nor than what its prompt leaves of `max_length`.

    `chunks` are this pipeline stage's `GPTModel`s without wrappers. Any of `end_ids` ends a response, and so does a
    stop string. Sampling is a function of `seed`, the prompts and `batch_size`.
    """
    assert all(prompts), "an empty prompt"
    device = torch.device(torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    results: dict[int, Response] = {}
    progress = _Progress()
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad(), forward_only(chunks[0].config), _with_whole_sequences(chunks):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = yield from _generate_batch(
                chunks, [prompts[row] for row in rows], sampling, end_ids, generator, progress, max_length
            )
            progress.add(len(batch), sum(len(response.tokens) for response in batch))
            results.update(zip(rows, batch, strict=True))
    return [results[row] for row in range(len(prompts))]


class _Progress:
    """What batches have sampled, told every `TOLD_EVERY_S`."""

    def __init__(self) -> None:
        self._num_responses = self._num_tokens = 0
        self._told_s = time.monotonic()

    def add(self, num_responses: int, num_tokens: int) -> None:
        """A batch has ended."""
        self._num_responses += num_responses
        self._num_tokens += num_tokens

    def of_batch(self, lengths: Tensor, ends: Tensor, position: int) -> Iterator[Generated]:
        """How far all is, if it is time to tell; of this batch the rows are filled up to `position`."""
        if (now_s := time.monotonic()) - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = now_s
        num_ended, num_sampled = int((ends <= position).sum()), int((ends.clamp(max=position) - lengths).clamp(0).sum())
        yield Generated(self._num_responses + num_ended, self._num_tokens + num_sampled)


def _generate_batch(
    chunks: Chunks,
    prompts: list[Sequence[int]],
    sampling: Sampling,
    end_ids: Sequence[int],
    generator: torch.Generator,
    progress: _Progress,
    max_length: int,
) -> Generator[Generated, None, list[Response]]:
    num_rows, shortest, longest = len(prompts), len(prompts[0]), len(prompts[-1])
    limit, device = min(longest + sampling.max_new_tokens, max_length), generator.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    end_tokens = torch.tensor(end_ids, device=device)
    tokens = torch.full((num_rows, limit), end_ids[0], device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    logprobs = torch.zeros(num_rows, limit, device=device)
    ends = (lengths + sampling.max_new_tokens).clamp(max=max_length)
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)

    stops = _stop_strings(sampling, num_rows)
    context = StaticInferenceContext(num_rows, limit)
    start, position = 0, shortest
    while position < limit:
        logits = _advance(chunks, tokens[:, start:position], context)
        sampled, sampled_logprobs = sample(logits, sampling, generator)
        writes = (position >= lengths) & (position < ends) & ~finished
        tokens[:, position] = torch.where(writes, sampled, tokens[:, position])
        logprobs[:, position] = torch.where(writes, sampled_logprobs, logprobs[:, position])
        ended = writes & torch.isin(sampled, end_tokens)
        if stops is not None:
            ended |= torch.tensor(stops.completed(sampled.tolist(), writes.tolist()), device=device)
        ends = torch.where(ended, position + 1, ends)
        finished |= ended
        start, position = position, position + 1
        if bool((position >= ends).all()):
            break
        yield from progress.of_batch(lengths, ends, position)
    return _cut(tokens, logprobs, lengths, ends, finished)


def _stop_strings(sampling: Sampling, num_rows: int) -> StopStrings | None:
    if not sampling.stop_strings:
        return None
    assert sampling.tokenizer is not None, "stop strings are text"
    return StopStrings(_tokenizer(sampling.tokenizer), sampling.stop_strings, num_rows)


_tokenizer = cache(load_tokenizer)


def _advance(chunks: Chunks, new_tokens: Tensor, context: StaticInferenceContext) -> Tensor:
    """Run the model on the next tokens [B, S] of every row; returns the logits [B, vocabulary] after the last one."""
    num_rows, num_new = new_tokens.shape
    positions = torch.arange(num_new, device=new_tokens.device) + context.sequence_len_offset
    group, config = parallel_state.get_pipeline_model_parallel_group(), chunks[0].config
    output = new_tokens.new_empty(0)
    for chunk in chunks:
        if not chunk.pre_process:
            hidden_SBH = torch.empty(
                num_new, num_rows, config.hidden_size, dtype=config.params_dtype, device=new_tokens.device
            )
            dist.recv(hidden_SBH, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
            chunk.set_input_tensor(hidden_SBH)
        # The first pass is causal by position; later ones see the whole cache, for which Megatron lifts the mask.
        output = chunk(
            new_tokens, positions.expand_as(new_tokens), None, inference_context=context, runtime_gather_output=True
        )
        if not chunk.post_process:
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank(), group=group)
    context.sequence_len_offset += num_new
    context.enable_decode_mode()
    if group.size() == 1:
        return output[:, -1]
    vocabulary_size = chunks[-1].vocab_size
    logits = output[:, -1] if chunks[-1].post_process else output.new_empty(num_rows, vocabulary_size)
    logits = logits.float().contiguous()  # gloo sends the bytes behind a slice, not the slice
    dist.broadcast(logits, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return logits


def _cut(tokens: Tensor, logprobs: Tensor, lengths: Tensor, ends: Tensor, finished: Tensor) -> list[Response]:
    rows = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), ends.tolist(), finished.tolist(), strict=True)
    return [
        Response(row_tokens[begin:end], row_logprobs[begin:end], done)
        for row_tokens, row_logprobs, begin, end, done in rows
    ]
