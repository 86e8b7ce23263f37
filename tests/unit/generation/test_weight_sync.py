"""Weights as one stream of bytes cut into buckets: any types and shapes come back bit for bit."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.generation import weight_sync
from nemo_rl_offload.generation.weight_sync import (
    BUCKET_BYTES,
    Assembler,
    DeviceBucket,
    WeightExport,
    WeightLoader,
    cut_into_buckets,
    device_buffer,
    pack,
    pack_on_device,
)
from nemo_rl_offload.specs.allocator import EXPANDABLE, VARIABLES

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.float8_e4m3fn]


@st.composite
def named_weights(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    weights = []
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        num_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
        data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        flat = torch.tensor(list(data), dtype=torch.uint8)
        if dtype == torch.bool:
            flat = flat % 2
        weight = flat.view(dtype).view(shape)
        if len(shape) > 1 and draw(st.booleans()):
            weight = weight.transpose(0, 1)  # not contiguous, as Bridge's exports may be
        weights.append((f"w{number}", weight))
    return weights


def bits(weight: Tensor) -> bytes:
    return weight.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(deadline=None, max_examples=200)
@given(weights=named_weights(), bucket_bytes=st.integers(1, 200))
def test_weights_survive_the_buckets(weights: list[tuple[str, Tensor]], bucket_bytes: int) -> None:
    buckets = [pack(cut) for cut in cut_into_buckets(weights, bucket_bytes)]
    sizes = [len(bucket.data) for bucket in buckets]
    assert sum(sizes) == sum(weight.nbytes for _, weight in weights)
    assert all(size == bucket_bytes for size in sizes[:-1])
    assert all(size <= bucket_bytes for size in sizes)
    assembler = Assembler()
    found = []
    for bucket in buckets:
        bucket.data.flags.writeable = False  # as in Ray's store
        found += list(assembler.add(bucket))
        bucket.data.flags.writeable = True
        bucket.data[:] = 0  # the store is free for others
    assert [name for name, _ in found] == [name for name, _ in weights]
    for (name, weight), (_, expected) in zip(found, weights, strict=True):
        assert (weight.dtype, weight.shape) == (expected.dtype, expected.shape), name
        assert bits(weight) == bits(expected), name


@settings(deadline=None, max_examples=100)
@given(weights=named_weights(), bucket_bytes=st.integers(1, 200))
def test_weights_survive_a_buffer_that_each_bucket_is_written_to(
    weights: list[tuple[str, Tensor]], bucket_bytes: int
) -> None:
    buffer, opened, assembler, found = torch.empty(bucket_bytes, dtype=torch.uint8), [], Assembler(), []
    for cut in cut_into_buckets(weights, bucket_bytes):
        bucket = DeviceBucket(pack_on_device(cut, buffer), (lambda one: opened.append(one) or one, (buffer,)))
        found += [(name, bits(weight), weight.shape) for name, weight in assembler.add(bucket)]
        assert len(opened) == 1, "torch counts who opens it"
        opened.clear()
    assert found == [(name, bits(weight), weight.shape) for name, weight in weights]


def test_buckets_on_the_device_end_with_their_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "_conversion", lambda model: (None, []))
    monkeypatch.setattr(weight_sync, "exported_weights", lambda *_, **__: iter(WEIGHTS.items()))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(weight_sync, "DEVICE_BUCKET_BYTES", 1 << 10)
    monkeypatch.setattr(weight_sync, "reduce_tensor", lambda buffer: (lambda: buffer, ()))
    model: Any = SimpleNamespace(auto_bridge=None, modules=[], config=SimpleNamespace(vocab_size=1))
    export, assembler, found = WeightExport(model, on_device=True), Assembler(), dict[str, Tensor]()
    while (bucket := export.next_device_bucket()) is not None:
        found |= dict(assembler.add(bucket))
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in found)
    assert export._buffer is None, "training has its memory again"


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("", ["cuda"]),
        ("expandable_segments:False", ["cuda"]),
        (EXPANDABLE, ["expandable_segments:False", "cuda", EXPANDABLE]),
        (
            f"max_split_size_mb:9,{EXPANDABLE}",
            ["max_split_size_mb:9,expandable_segments:False", "cuda", f"max_split_size_mb:9,{EXPANDABLE}"],
        ),
        ("expandable_segments : True", ["expandable_segments : False", "cuda", "expandable_segments : True"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_handed_over_lies_in_segments_that_do_not_expand(
    there: str, told: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def empty(*_: Any, device: str, **__: Any) -> None:
        said.append(device)
        if fails:
            raise torch.OutOfMemoryError

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(VARIABLES[0], there)
    monkeypatch.setenv(VARIABLES[1], "expandable_segments:True,max_split_size_mb:7")  # which torch does not read
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError) if fails else nullcontext():
        device_buffer()
    assert said == told


def test_a_bucket_is_cut_before_the_next_weight_is_made() -> None:
    """No more than a bucket and a weight are there at a time."""
    made = []

    def weights() -> Any:
        for number in range(4):
            made.append(number)
            yield str(number), torch.zeros(4)

    cuts = cut_into_buckets(weights(), 16)
    next(cuts)
    assert made == [0, 1]
    assert BUCKET_BYTES == 64 << 20


class Mapping:
    """Cuts the sum of its sources, as Bridge's mappings cut what they join."""

    def __init__(self, hf_param: str | dict[str, str]) -> None:
        self.hf_param = hf_param

    def hf_to_megatron(self, weights: Any, module: Any) -> Tensor:
        return torch.cat(list(weights.values())) if isinstance(weights, dict) else weights


class Bridge:
    """Maps the parameters of a module as told."""

    def __init__(self, **sources: str | dict[str, str]) -> None:
        self.sources = sources
        self.num_broadcasts = 0
        self.hf_pretrained = None

    @property
    def _model_bridge(self) -> "Bridge":
        return self

    def build_conversion_tasks(self, _: None, modules: list[torch.nn.Module]) -> list[Any]:
        (module,) = modules
        weights = module.state_dict(keep_vars=True)
        return [
            SimpleNamespace(
                param_name=name, mapping=Mapping(source), megatron_module=module, param_weight=weights[name]
            )
            for name, source in self.sources.items()
        ] + [None, SimpleNamespace(param_weight=None, megatron_module=None)]

    def maybe_modify_loaded_hf_weight(self, hf_param: Any, state: dict[str, Tensor]) -> Any:
        return state[hf_param] if isinstance(hf_param, str) else {key: state[name] for key, name in hf_param.items()}

    def _broadcast_shared_embeddings(self, modules: list[torch.nn.Module]) -> None:
        self.num_broadcasts += 1


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(6))
        self.router = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("expert_bias", torch.zeros(2))
        self.register_buffer("counts", torch.zeros(2), persistent=False)
        self.output_layer = torch.nn.Linear(1, 1, bias=False)


def make_model(bridge: Bridge, *, tied: bool = True) -> Any:
    config = SimpleNamespace(share_embeddings_and_output_weights=tied, vocab_size=8)
    return SimpleNamespace(auto_bridge=bridge, modules=[Module()], config=config)


NAMES: dict[str, Any] = {"qkv": {"q": "q", "k": "k", "v": "v"}, "router": "gate", "expert_bias": "bias"}
WEIGHTS = {name: torch.rand(2) for name in ("q", "k", "bias", "v", "of another rank")} | {"gate": torch.rand(3)}


@pytest.mark.parametrize("bucket_bytes", [3, 8, 1000])
def test_a_parameter_is_written_when_all_that_it_is_made_of_is_there(bucket_bytes: int) -> None:
    bridge = Bridge(**NAMES)
    model = make_model(bridge)
    loader = WeightLoader(model)
    for update in (1, 2):
        weights = {name: update * weight for name, weight in WEIGHTS.items()}
        for cut in cut_into_buckets(weights.items(), bucket_bytes):
            loader.load(pack(cut))
        assert not loader._waiting, "nothing is kept"
        loader.finish()
        (module,) = model.modules
        assert torch.equal(module.qkv, torch.cat([weights[name] for name in "qkv"]))
        assert torch.equal(module.router, weights["gate"])
        assert torch.equal(module.expert_bias, weights["bias"])
        assert bridge.num_broadcasts == update


def test_a_weight_that_does_not_come_is_named() -> None:
    loader = WeightLoader(make_model(Bridge(**NAMES)))
    (cut,) = cut_into_buckets([(name, WEIGHTS[name]) for name in "qv"])
    loader.load(pack(cut))
    with pytest.raises(ConfigError, match=r"^policy\.generation\.colocated\.enabled: .*are q, k, v"):
        loader.finish()


@pytest.mark.parametrize("make", [WeightExport, WeightLoader])
@pytest.mark.parametrize(
    ("left_out", "tied", "words"),
    [
        ("expert_bias", True, "1 weights of this model cannot be handed .* the first are expert_bias"),
        ("router", True, "the first are router"),
        (None, False, "the first are output_layer.weight"),
    ],
)
def test_a_weight_without_a_name_is_an_error(make: Any, left_out: str | None, tied: bool, words: str) -> None:
    names = {name: source for name, source in NAMES.items() if name != left_out}
    with pytest.raises(ConfigError, match=words):
        make(make_model(Bridge(**names), tied=tied))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_packs_and_all_stop_together(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "exported_weights", lambda *_, **__: iter(WEIGHTS.items()))
    monkeypatch.setattr(weight_sync.dist, "get_rank", lambda: rank)
    export = WeightExport(make_model(Bridge(**NAMES)))
    bucket = export.next_bucket()
    assert (bucket is None) == (rank == 1)
    if bucket is not None:
        assert {name for name, _ in Assembler().add(bucket)} == set(WEIGHTS)
    assert export.next_bucket() is None
