"""Time of messages between ranks, by which layouts are compared: bytes over the rate, nothing hidden behind compute.

A step's simulated time has messages in its rates (`Device.achieved`), whatever the layout. So this is no part of it: it
is added where layouts are put in order, and it is the same for the same layout. Bytes of each rank:

- tensor parallelism: attention and a dense MLP each gather their input and scatter their output, forward and backward
  (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2; without sequence parallelism two all-reduces are as much);
- experts: tokens go to them and come back, forward and backward; ranks that share each expert have all their tokens;
- context parallelism: keys and values of the others, in forward and again in backward, and their gradients; of a
  recurrent layer what goes into its recurrence, and what comes out in float32, forward and backward;
- pipeline: a chunk's input, and its gradient;
- data parallelism: gradients are scattered and weights gathered, once a step.

Ranks of a tensor-parallel group are neighbours, those of context, expert and data parallelism follow, and stages are
the farthest from each other, as Megatron-Core orders them.
"""

from nemo_rl_offload.planner.cost.memory import trained_parameters
from nemo_rl_offload.planner.cost.recurrent import mixer_of
from nemo_rl_offload.planner.cost.storages import LayerContext
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.specs.model_shape import LayerKind
from nemo_rl_offload.specs.parallel_layout import stage_layers


def messages_ms(job: Job) -> float:
    """Of a step, on the stage where they take most."""
    layout, shape = job.layout, job.shape
    by_kind = {kind: _layer_ms(job, job.context, kind) for kind in set(shape.layer_kinds)}
    stages = stage_layers(layout, shape.num_layers)
    microbatch_ms = max(
        sum(by_kind[shape.layer_kinds[layer]] for chunk in chunks for layer in chunk) for chunks in stages
    )
    stage_ranks = layout.world // layout.pipeline
    if layout.pipeline > 1:
        num_bytes = 2 * layout.virtual * job.context.hidden_bytes
        microbatch_ms += _ms(job, num_bytes, job.node_ranks if stage_ranks < job.node_ranks else 2 * job.node_ranks)
    rounds = job.num_microbatches + (layout.pipeline - 1) / layout.virtual
    return rounds * microbatch_ms + max(_update_ms(job, rank, chunks) for rank, chunks in enumerate(stages))


def _layer_ms(job: Job, context: LayerContext, kind: LayerKind) -> float:
    layout, shape, size = job.layout, job.shape, job.numbers.element_bytes
    hidden = context.tokens.count * shape.hidden_size * size
    experts = shape.experts if kind.mlp == "experts" else None
    splits_mlp = kind.mlp is not None and (experts is None or experts.shared_ffn_hidden_size > 0)
    num_halves = (kind.mixer is not None) + splits_mlp
    found = _ms(job, 4 * num_halves * hidden * _others(layout.tensor), layout.tensor)
    if experts is not None:
        sent = 4 * context.norm_tokens * experts.experts_per_token * (experts.latent_size or shape.hidden_size) * size
        found += _ms(job, sent * _others(layout.expert), layout.expert * layout.expert_tensor)
        found += _ms(job, sent * (layout.expert_tensor - 1), layout.expert_tensor)
    if layout.context > 1 and kind.mixer in ("mamba", "delta_net"):
        mixer = mixer_of(context, kind)
        exchanged = context.tokens.count * ((mixer.projected - mixer.gate) * size + 4 * mixer.gate)
        found += _ms(job, 2 * exchanged * _others(layout.context), layout.tensor * layout.context)
    elif layout.context > 1 and kind.mixer is not None:
        widths = context.groups * (shape.query_head_dim + shape.value_head_dim)
        if shape.latent_attention is not None:
            widths = context.heads * (shape.query_head_dim + shape.value_head_dim)
        keys = context.tokens.count * widths * size
        found += _ms(job, 3 * (layout.context - 1) * keys, layout.tensor * layout.context)
    return found


def _update_ms(job: Job, rank: int, chunks: list[range]) -> float:
    layout = job.layout
    parameters = trained_parameters(job.shape, layout, chunks, rank, job.adapters)
    each = job.optimizer.gradient_bytes + job.numbers.element_bytes
    data = layout.data * layout.context
    return _ms(job, parameters.shared * each * _others(data), data * layout.tensor) + _ms(
        job, parameters.expert * each * _others(layout.expert_data), layout.world // layout.pipeline
    )


def _others(num_ranks: int) -> float:
    """The share of what a group has that is not a rank's own."""
    return (num_ranks - 1) / num_ranks


def _ms(job: Job, num_bytes: float, reach: int) -> float:
    """Of so many bytes to each other of `reach` neighbouring ranks: what leaves the machine and what stays travel at
    once."""
    outside = num_bytes * max(0.0, 1 - job.node_ranks / reach)
    rates = job.device.peers_gb_per_s, job.device.network_gb_per_s
    return max((num_bytes - outside) / rates[0], outside / rates[1]) / 1e6
