"""Gemma 3 trains as transformers does: losses and gradients, embeddings in bfloat16, forwards without a graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from models import MICRO_BATCH_SIZE, make_batch, make_policy, read_model

from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.model import build_model
from nemo_rl_offload.megatron.build.transformer_config import resolve_transformer_impl
from nemo_rl_offload.megatron.step.head import LogitsHeadFactory
from nemo_rl_offload.megatron.step.train_step import train_step

pytestmark = pytest.mark.usefixtures("megatron_process_group")

FAMILY = "gemma3_text"
Folder = Callable[[str], Path]


def test_loss_and_gradients_are_those_of_transformers(model_folder: Folder) -> None:
    folder, batch = model_folder(FAMILY), make_batch(0)
    model = build_model(make_policy("optimizer.clip_grad=0"), folder, num_steps=10)
    head = LogitsHeadFactory(1.0)
    metrics = train_step(model, batch, build_loss("nll", {}), normalizers(batch), MICRO_BATCH_SIZE, head)
    reference = read_model(folder, FAMILY)
    logprobs = reference(batch["input_ids"]).logits.log_softmax(-1)[:, :-1]
    chosen = logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    mask = batch["token_mask"][:, 1:]
    loss = -(chosen * mask).sum() / mask.sum()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-6)
    gradients = rank_work._exported(model, gradients=True)
    expected = {name: weight.grad for name, weight in reference.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # Sums in another order.
        torch.testing.assert_close(torch.from_numpy(gradient), expected[name], rtol=1e-4, atol=1e-5)
        assert expected[name].abs().max() > 1e-4, name


def test_embeddings_are_those_of_transformers_in_bfloat16(model_folder: Folder) -> None:
    """The square root of 32 is rounded before it multiplies."""
    folder = model_folder(FAMILY)
    ids = torch.arange(50).view(1, -1)
    embedding = build_model(make_policy(".precision=bfloat16"), folder, num_steps=None).modules[0].embedding
    expected = read_model(folder, FAMILY).bfloat16().model.embed_tokens(ids)
    assert torch.equal(embedding(ids, torch.arange(50).view(1, -1)), expected.transpose(0, 1))


def test_forwards_without_gradients_keep_no_graph(model_folder: Folder) -> None:
    model = build_model(make_policy(), model_folder(FAMILY), num_steps=10).modules[0]
    outputs: list[Any] = []
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.register_forward_hook(lambda layer, args, output: outputs.append(output[0]))
    ids = torch.arange(12).view(1, -1)
    with torch.no_grad():
        model(ids, ids, None)
    assert [output.requires_grad for output in outputs] == [False, False]


def test_transformer_engine_is_not_taken_for_it(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_offload.megatron.build.transformer_config._transformer_engine_problem", lambda: "")
    assert build_model(make_policy(), model_folder(FAMILY), num_steps=None).transformer_impl == "torch"
    assert resolve_transformer_impl("auto") == "transformer_engine"
    with pytest.raises(ConfigError, match=r"model_type gemma3_text of config.json needs .*transformer_impl: torch"):
        build_model(make_policy("transformer_impl=transformer_engine"), model_folder(FAMILY), num_steps=None)
