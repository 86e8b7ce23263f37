"""Bytes between ranks, by hand."""

from dataclasses import replace

import pytest
from jobs import make_job

from nemo_rl_offload.planner.cost.messages import messages_ms
from nemo_rl_offload.planner.job import Job
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

PEERS, NETWORK = 360e6, 40e6
"""Bytes per ms."""


def ms(name: str, layout: ParallelLayout, **changes: object) -> float:
    return messages_ms(make_job(name, layout=layout, num_microbatches=4, **changes))


def test_tensor_parallel_ranks_gather_and_scatter_four_times_a_half() -> None:
    """Of 8192 elements a token and 80 layers, seven eighths are others'. Nothing else is sent."""
    layout = ParallelLayout(8, tensor=8, sequence_parallel=True)
    hidden = 4096 * 8192 * 2
    by_hand = 4 * 80 * 8 * hidden * 7 / 8 / PEERS
    assert ms("meta-llama/Llama-3.1-70B", layout) == pytest.approx(by_hand)


def test_gradients_and_weights_cross_the_network_where_copies_of_the_model_do() -> None:
    """6 bytes of each of 8.19 billion parameters, but for a rank's own; half of the ranks are in another machine."""
    name = "Qwen/Qwen3-8B"
    one, two = (ms(name, ParallelLayout(world)) for world in (8, 16))
    assert one == pytest.approx(6 * 8.191e9 * 7 / 8 / PEERS, rel=1e-3)
    assert two == pytest.approx(6 * 8.191e9 * 15 / 16 / 2 / NETWORK, rel=1e-3)


def test_tokens_travel_to_experts_and_back_in_both_passes() -> None:
    """8 experts of a token, 48 layers; with all experts on each rank none travel, and their gradients do."""
    name, layout = "Qwen/Qwen3-30B-A3B", ParallelLayout(8, expert=8)
    frozen = {"shape": replace(make_job(name).shape, num_layers=48)}
    shared = make_job(name, layout=layout)
    sent = 4 * 48 * 4 * 4096 * 8 * 2048 * 2 * 7 / 8 / PEERS
    without = messages_ms(replace(shared, num_microbatches=0))
    assert ms(name, layout, **frozen) - without == pytest.approx(sent)


def test_ranks_that_share_each_expert_receive_each_others_tokens() -> None:
    """Of two ranks, those that come to the other's half of the sequence, as far as they are for these experts."""
    name = "Qwen/Qwen3-30B-A3B"
    whole, shared = (
        ParallelLayout(8, tensor=2, expert=4, expert_tensor=size, sequence_parallel=True) for size in (1, 2)
    )
    own = 4 * 48 * 4 * 4096 // 2 * 8 * 2048 * 2 / PEERS
    jobs = [make_job(name, layout=layout, num_microbatches=4) for layout in (whole, shared)]
    of_passes = [messages_ms(job) - messages_ms(replace(job, num_microbatches=0)) for job in jobs]
    assert of_passes[1] - of_passes[0] == pytest.approx(own)


@pytest.mark.parametrize(("tensor", "context"), [(1, 8), (8, 2)])
def test_keys_and_values_of_others_come_three_times(tensor: int, context: int) -> None:
    """Where tensor and context parallelism are more ranks than a machine has, over the network."""
    name, layout = "meta-llama/Llama-3.1-8B", ParallelLayout(16, tensor, context=context, sequence_parallel=tensor > 1)
    job = make_job(name, layout=layout)
    keys = 4096 // context * 8 // tensor * 2 * 128 * 2
    received = 3 * (context - 1) * keys * 32
    outside = received * max(0, 1 - 8 / (tensor * context))
    by_hand = max((received - outside) / PEERS, outside / NETWORK)
    assert _of_microbatch(job) - _tensor_ms(job) == pytest.approx(by_hand)


def test_stages_send_inputs_and_gradients() -> None:
    """Each chunk of four, and the first stage in another machine than the second where each has one."""
    name = "meta-llama/Llama-3.1-8B"
    for world, rate in ((2, PEERS), (16, NETWORK * 2)):
        layout = ParallelLayout(world, pipeline=2, virtual=4)
        assert _of_microbatch(make_job(name, layout=layout)) == pytest.approx(8 * 4096 * 4096 * 2 / rate)


def _of_microbatch(job: Job) -> float:
    return messages_ms(replace(job, num_microbatches=2)) - messages_ms(replace(job, num_microbatches=1))


def _tensor_ms(job: Job) -> float:
    tensor, layers = job.layout.tensor, job.shape.num_layers
    hidden = 4096 // job.layout.context * job.shape.hidden_size * 2
    return 8 * layers * hidden * (tensor - 1) / tensor / PEERS
