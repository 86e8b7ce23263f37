"""A program of Megatron-Core's own: it builds a GPT by Megatron's specs, and trains it by Megatron's schedules."""

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import fine_grained_activation_offload, get_forward_backward_func
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from nemo_rl_offload import OffloadOptions
from nemo_rl_offload.adapters import megatron_core
from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

VOCABULARY_SIZE, SEQUENCE, MICRO_BATCH_SIZE = 64, 16, 2

SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "gradient_accumulation_fusion": False,
    "pipeline_dtype": torch.float32,
    "calculate_per_token_loss": False,
}
MOE = {
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
}
ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


class LatentAttention(torch.nn.Module):
    """Attention whose values are narrower than its keys, which Megatron has in Transformer Engine alone."""

    def __init__(self, *_: Any, softmax_scale: float, **_kwargs: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any) -> Tensor:
        """Query and key (sequence, batch, heads, width), value likewise; (sequence, batch, heads * its width)."""
        scores_BNQK = torch.einsum("qbnd,kbnd->bnqk", query, key) * self.softmax_scale
        weights_BNQK = scores_BNQK.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,kbnd->qbnd", weights_BNQK, value).flatten(2)


class Trained(NamedTuple):
    """What a few steps leave on one rank."""

    losses: list[float]
    digest: str
    """Of gradients and weights, bit for bit."""
    bytes_out: dict[str, int]
    host_bytes: int
    ineffective_bytes: int
    """Copied, and kept on the device by somebody else."""


def train(changes: dict[str, Any], modules: tuple[str, ...], microbatches: tuple[int, ...] = (4, 3, 2)) -> Trained:
    """Train with `modules` offloaded by this project's engine; none: without it. One step for each number."""
    torch.set_num_threads(1)
    install_cpu_support()
    _init_groups(changes)
    if not modules:
        return _train(changes, microbatches, None)
    offload = megatron_core.installed() or megatron_core.install(OffloadOptions(host_memory_budget_bytes=64 << 20))
    try:
        return _train(_offloading(changes, modules), microbatches, offload)
    finally:
        megatron_core.uninstall()


def train_one_after_another(*modules: tuple[str, ...]) -> list[tuple[Trained, dict[str, int]]]:
    """Train models of other settings in one process, with what Megatron says of the last step of each."""
    torch.set_num_threads(1)
    install_cpu_support()
    _init_groups({})
    offload = megatron_core.install(OffloadOptions(host_memory_budget_bytes=64 << 20))
    found = []
    try:
        for names in modules:
            trained = _train(_offloading({}, names), (4, 2), offload)
            told: Any = PipelineOffloadManager.offload_summary_bytes
            found.append((trained, told.fget(None)))  # an object of it needs a GPU
            fine_grained_activation_offload.FineGrainedActivationOffloadingInterface.reset_instance()
    finally:
        megatron_core.uninstall()
    return found


def _offloading(changes: dict[str, Any], modules: tuple[str, ...]) -> dict[str, Any]:
    return changes | {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
        "min_offloaded_tensor_size": changes.get("min_offloaded_tensor_size", 1),
    }


def _train(changes: dict[str, Any], microbatches: tuple[int, ...], offload: megatron_core.Installed | None) -> Trained:
    config, chunks = _build(changes)
    optimizer = torch.optim.SGD([weight for chunk in chunks for weight in chunk.parameters()], lr=0.1)
    schedule = get_forward_backward_func()
    losses, digest = [], hashlib.sha256()
    for step, number in enumerate(microbatches):
        number *= config.pipeline_model_parallel_size if len(chunks) > 1 else 1
        outputs = schedule(
            forward_step_func=_forward_step,
            data_iterator=[_batches(step, number) for _ in chunks],
            model=chunks,
            num_microbatches=number,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        losses += [float(output["loss"]) for output in outputs]
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            if weight.grad is not None:
                digest.update(weight.grad.contiguous().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    for weight in (weight for chunk in chunks for weight in chunk.parameters()):
        digest.update(weight.detach().contiguous().numpy().tobytes())
    if offload is None:
        return Trained(losses, digest.hexdigest(), {}, 0, 0)
    stats = offload.stats()
    assert stats.bytes_out == stats.bytes_in
    assert stats.denied_bytes == 0
    bytes_out = {name: each.bytes_out for name, each in stats.per_module.items() if each.bytes_out}
    return Trained(losses, digest.hexdigest(), bytes_out, stats.host_bytes, stats.ineffective_bytes)


def _init_groups(changes: dict[str, Any]) -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=changes.get("tensor_model_parallel_size", 1),
        pipeline_model_parallel_size=changes.get("pipeline_model_parallel_size", 1),
        virtual_pipeline_model_parallel_size=changes.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=changes.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def _build(changes: dict[str, Any]) -> tuple[TransformerConfig, list[GPTModel]]:
    changes = SHAPE | changes
    mtp_layers = changes.get("mtp_num_layers")
    config = (MLATransformerConfig if "q_lora_rank" in changes else TransformerConfig)(**changes)
    chunks = []
    stages = config.virtual_pipeline_model_parallel_size or 1
    torch.manual_seed(1)
    for stage in range(stages):
        vp_stage = stage if stages > 1 else None
        if config.num_moe_experts is None:
            spec = get_gpt_layer_local_spec(
                multi_latent_attention=config.multi_latent_attention, normalization=config.normalization
            )
        else:
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
            )
        if config.multi_latent_attention:
            spec.submodules.self_attention.submodules.core_attention = LatentAttention
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp_layers else None
        chunks.append(
            GPTModel(
                config,
                spec,
                VOCABULARY_SIZE,
                SEQUENCE,
                pre_process=is_first,
                post_process=is_last,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                mtp_block_spec=mtp,
                vp_stage=vp_stage,
            )
        )
    return config, chunks


def _batches(step: int, number: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(number):
        yield torch.randint(0, VOCABULARY_SIZE, (MICRO_BATCH_SIZE, SEQUENCE + 1), generator=generator)


def _forward_step(data: Iterator[Tensor], model: GPTModel) -> tuple[Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(MICRO_BATCH_SIZE, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(_loss)


def _loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach()}
