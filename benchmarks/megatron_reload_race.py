"""Whether an engine reads a host copy before it is written: gradients of one chain of layers, by each engine.

Each of `--layers` regions saves its input, which is copied out; copies are slower than the layers, so that most are
still on their way when backward begins. Megatron-Core's engine copies everything out in its first step, plans no reload
for it, and then reloads on the compute stream, in `ChunkOffloadHandler.tensor_pop`, which waits for no copy out. Prints
one JSON line for each engine: the largest difference from gradients without offloading, in each step.

Run on one GPU: `python benchmarks/megatron_reload_race.py [--layers 48] [--mib 128]`. It needs no Transformer Engine.
"""

import argparse
import json
import os
import socket
import types
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.interface import MEGATRONS_INTERFACE, OffloadInterface, use_engine
from nemo_rl_offload.offload.backends.cuda import CudaBackend
from nemo_rl_offload.offload.engine import OffloadEngine

STEPS = 3


def gradient(interface: Any, x: Tensor, layers: int) -> Tensor:
    """Of the sum of `layers` sines of `x`, each of the last one's result, by an engine; None: without."""
    x = x.detach().requires_grad_()
    hidden = x
    if interface is not None:
        interface.init_chunk_handler(
            pp_rank=0,
            vp_size=None,
            vp_stage=None,
            min_offloaded_tensor_size=1,
            delta_offload_bytes_across_pp_ranks=0,
            activation_offload_fraction=1.0,
        )
    for _ in range(layers):
        if interface is None:
            hidden = torch.sin(hidden)
            continue
        manager = interface(True, hidden, "core_attn")
        with manager as inner:
            output = torch.sin(inner)
        hidden = manager.group_offload(output)
    hidden.sum().backward()
    if interface is not None:
        interface.reset()
    torch.cuda.synchronize()
    assert x.grad is not None
    return x.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--mib", type=int, default=128, help="of one layer's input")
    arguments = parser.parse_args()
    with socket.socket() as probe:  # Megatron's engine gathers its summary over ranks
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    if transformer_engine.cpu_offload is None:  # of which Megatron's engine sets a flag
        transformer_engine.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    x = torch.rand(arguments.mib << 18, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) + 0.5
    expected = gradient(None, x, arguments.layers)
    engine = OffloadEngine(CudaBackend(), host_memory_budget_bytes=(2 * arguments.layers * arguments.mib) << 20)
    for name, interface in (("megatron-core", MEGATRONS_INTERFACE), ("this project", OffloadInterface)):
        if interface is OffloadInterface:
            use_engine(engine, ["core_attn"])
        differences = [
            float((gradient(interface, x, arguments.layers) - expected).abs().max().nan_to_num(float("inf")))
            for _ in range(STEPS)
        ]
        print(json.dumps({"engine": name, "largest_difference_by_step": differences}), flush=True)
    print(json.dumps({"bytes_out": engine.stats().bytes_out, "gpu": torch.cuda.get_device_name()}))
    use_engine(None)
    engine.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
