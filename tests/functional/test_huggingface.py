"""Offloading changes no bit of transformers' models: every family, every name, however they are run."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from huggingface_models import (
    DEVICE,
    FAMILIES,
    all_came_back,
    gradients,
    identical,
    make_batch,
    make_model,
    names_of,
    offload,
)
from patience import PATIENCE_S
from torch import nn

from nemo_rl_offload.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GPU kernels, and CPU threads, that sum in any order would differ from run to run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(DEVICE == "cuda")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(False)


def assert_identical(model: Any, names: list[str], batches: list[dict[str, torch.Tensor]]) -> None:
    """With and without, and each listed name moved something there and back, to good effect."""
    expected = gradients(model, batches)
    with offload(model, names) as active:
        assert identical(gradients(model, batches), expected)
    stats = active.stats()
    assert {name: each.bytes_out for name, each in stats.per_module.items() if each.bytes_out}.keys() == set(names)
    assert all_came_back(stats)
    assert stats.host_bytes == stats.demand_reloads == stats.denied_bytes == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_name_alone_and_all_together(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    for number, name in enumerate(names_of(family)):
        assert_identical(model, [name], [make_batch(9 + number)])
    assert_identical(model, names_of(family), [make_batch(11), make_batch(17), make_batch(5)])


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_any_number_of_microbatches_of_any_length(family: str) -> None:
    model = make_model(family)
    counts = [2, 4, 1, 9]
    steps = [[make_batch(3 + (7 * i + 5 * count) % 20, seed=i) for i in range(count)] for count in counts]
    expected = [gradients(model, batches) for batches in steps]
    num_groups = 0
    with offload(model, names_of(family)) as active:
        for count, batches, want in zip(counts, steps, expected, strict=True):
            assert identical(gradients(model, batches), want)
            groups = active.stats().per_module["core_attn"].num_groups
            assert groups - num_groups == 2 * count
            num_groups = groups


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_name_with_every_number_of_microbatches(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)
    for number, names in enumerate([*([name] for name in names_of(family)), names_of(family)]):
        for count in range(1, 10):
            assert_identical(model, names, [make_batch(3 + (11 * i + number + count) % 23, i) for i in range(count)])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    model, batches = make_model("llama"), [make_batch(11), make_batch(6)]
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_identical(model, ["model.layers.*"], batches)
    if not use_reentrant:
        assert_identical(model, ["core_attn", "mlp_norm", "mlp_act"], batches)
        return
    expected = gradients(model, batches)
    warned = pytest.warns(
        UserWarning, match=r"'mlp_act' offloaded nothing: gradient checkpointing .* use_reentrant=True"
    )
    with warned, offload(model, ["mlp_act", "model.layers.*"]) as active:
        assert identical(gradients(model, batches), expected)
    assert active.stats().per_module.keys() == {"model.layers.*"}


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    model, batch = make_model("llama"), make_batch(11)
    model.gradient_checkpointing_enable()
    with offload(model, ["model.layers.*"]) as active:
        gradients(model, [batch])
    assert active.stats().bytes_out == 2 * batch["input_ids"].numel() * 64 * 4
    assert active.stats().ineffective_bytes == 0


def test_what_attention_hands_to_its_projection_is_left_to_it() -> None:
    model, batches = make_model("llama"), [make_batch(11)]
    for names in (["core_attn"], ["core_attn", "attn_proj"]):
        with offload(model, names) as active:
            gradients(model, batches)
        assert active.stats().ineffective_bytes == 0
        assert active.stats().bytes_out > 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_autocast(family: str) -> None:
    model = make_model(family)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert_identical(model, names_of(family), [make_batch(11), make_batch(6)])


def test_other_implementations_of_attention_and_experts() -> None:
    assert_identical(make_model("llama", attn_implementation="eager"), ["core_attn"], [make_batch(11)])
    model = make_model("qwen3_moe", experts_implementation="batched_mm")
    assert_identical(model, ["expert_fc1", "moe_act"], [make_batch(11)])
    model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match=r"list 'model.layers.1.mlp.experts' as a whole"):
        offload(model, ["moe_act"])
    assert_identical(model, ["model.layers.*.mlp.experts"], [make_batch(11)])


def test_adapters_on_a_frozen_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    names = ["attn_norm", "qkv_linear", "core_attn", "mlp_norm", "mlp_act", "**.down_proj"]
    assert_identical(model, names, [make_batch(11), make_batch(6)])


def test_eval_between_steps_and_generation() -> None:
    model, batch = make_model("qwen2"), make_batch(11)
    expected = gradients(model, [batch])
    model.eval()
    with torch.no_grad():
        logits = model(**batch).logits
    tokens = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    model.train()
    with offload(model, names_of("qwen2")) as active:
        assert identical(gradients(model, [batch]), expected)
        bytes_out = active.stats().bytes_out
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, logits)
        assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), tokens)
        model.train()
        assert active.stats().bytes_out == bytes_out
        assert identical(gradients(model, [batch]), expected)


def test_one_model_in_two_threads() -> None:
    model = make_model("llama")
    batches = [make_batch(length) for length in (9, 14)]

    def derivatives(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [*torch.autograd.grad(model(**batch, use_cache=False).loss, [*model.parameters()])]

    expected = [derivatives(batch) for batch in batches]
    same: list[bool] = []

    def train(index: int) -> None:
        same.extend(identical(derivatives(batches[index]), expected[index]) for _ in range(10))

    with offload(model, ["core_attn", "mlp_act"]) as active:
        threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
    assert same == [True] * 20
    assert all_came_back(active.stats())
    # Forwards of both threads can be taken for one, and a copy in it for a useless one: a few groups then stay.
    # A GPU's clock shows others that have no time to leave.
    least = 20 if DEVICE == "cpu" else 0
    assert least < active.stats().per_module["core_attn"].num_groups <= 20 * 2


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_layers(in_place: bool) -> None:
    torch._dynamo.reset()
    model = make_model("llama")
    layers: nn.ModuleList = model.model.layers
    for number, layer in enumerate(layers):
        if in_place:
            layer.mlp.compile(backend="aot_eager")
        else:
            layers[number] = torch.compile(layer, backend="aot_eager")
    names = ["core_attn", "model.layers.*.mlp"] if in_place else ["model.layers.*"]
    assert_identical(model, names, [make_batch(11), make_batch(6)])
    with pytest.raises(ConfigError, match="inside of compiled code"):
        offload(model, ["mlp_act"])
