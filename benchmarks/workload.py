"""Training steps of layers of Qwen2.5-7B, or other models, with Megatron's optimizer: what E2 to E4 and the profile do.

The weights, gradients and optimizer state are there once. A *tree* is the model's modules built for one configuration
(which regions are open, what is recomputed), with those same parameters inside; a variant is a tree, and perhaps an
engine, so variants can take turns in one process on the same weights and the same inputs. The learning rate is 0, which
costs what any other does and leaves the weights as they are.

The vocabulary is small, so that layers rather than logits make the peak, or the model's own, without logits.

`constants.OPTIMIZERS` says where main weights and Adam's state are.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from common import HAS_GPU, medians, timed
from constants import LOGPROB_CHUNK_SIZE, MODEL, OPTIMIZERS, SMALL_VOCABULARY
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.installation import make_backend
from nemo_rl_offload.adapters.megatron_core.interface import use_engine
from nemo_rl_offload.batching.batch import Batch
from nemo_rl_offload.batching.plan import MicrobatchSplit
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.losses.reduction import normalizers
from nemo_rl_offload.losses.registry import build_loss
from nemo_rl_offload.megatron.build.config_check import provider_for
from nemo_rl_offload.megatron.build.gradient_memory import without_gradients
from nemo_rl_offload.megatron.build.model import MegatronModel, init_process_groups, unwrap
from nemo_rl_offload.megatron.build.optimizer import ddp_config, learning_rate_scheduler, optimizer_config
from nemo_rl_offload.megatron.build.transformer_config import configure_provider
from nemo_rl_offload.megatron.runtime.quiet import quiet
from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
from nemo_rl_offload.megatron.step.head import HeadFactory, LogitsHeadFactory
from nemo_rl_offload.megatron.step.log_probabilities import compute_logprobs
from nemo_rl_offload.megatron.step.train_step import train_step
from nemo_rl_offload.offload.arena import HostArena
from nemo_rl_offload.policy.residency.megatron_optimizer import keep_on_host
from nemo_rl_offload.specs.catalogue import find_config

LOSSES = {"sft": "nll", "grpo": "clipped_pg"}
MEGATRONS_ON_HOST: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,  # without it main weights stay on the device as well
}
OPTIMIZER_BYTES = 12
"""For each parameter: a float32 main weight and Adam's two moments."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
HEADS: HeadFactory = LogitsHeadFactory(temperature=1.0, chunk_size=LOGPROB_CHUNK_SIZE)


@dataclass(frozen=True)
class Shape:
    """A step: `num_microbatches` of one sequence each."""

    num_layers: int
    sequence: int
    num_microbatches: int
    algorithm: str = "grpo"
    transformer_impl: str = "torch"
    vocabulary_size: int = SMALL_VOCABULARY
    model: str = MODEL
    optimizer: str = OPTIMIZERS[0]
    overrides: tuple[str, ...] = ()
    """Of `policy.megatron_cfg`."""


def model_config(shape: Shape) -> dict[str, Any]:
    """Contents of `config.json`: the model's but for the layers and the vocabulary; on a CPU all is small."""
    return {
        **(find_config(shape.model) or {}),
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocabulary_size,
        "max_position_embeddings": shape.sequence,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        **({} if HAS_GPU else SMALL),
    }


def load_settings(shape: Shape, overrides: Sequence[str] = ()) -> Any:
    """The configuration; `overrides` are relative to `policy.megatron_cfg`, and come after the shape's own."""
    policy = {
        "precision": "bfloat16",
        "max_total_sequence_length": shape.sequence,
        "train_global_batch_size": shape.num_microbatches,
        "train_micro_batch_size": 1,
        "logprob_chunk_size": LOGPROB_CHUNK_SIZE,
    }
    megatron = [
        f"transformer_impl={shape.transformer_impl}",
        "fine_grained_activation_offloading=false",
        f"min_offloaded_tensor_size={1 << 20 if HAS_GPU else 0}",
        "activation_offload.host_memory_budget=100GiB",
        "optimizer.lr=0.0",
        "optimizer.use_distributed_optimizer=true",
        *shape.overrides,
        *overrides,
    ]
    changes = [f"policy.{key}={value}" for key, value in policy.items()]
    changes += [f"policy.megatron_cfg.{text}" for text in megatron]
    return load_config(
        PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", [*changes, "loss_fn.reference_policy_kl_penalty=0.01"]
    )


def random_batch(lengths: Sequence[int], vocabulary_size: int, seed: int) -> Batch:
    """Rows of random tokens of these lengths, padded on the right, each with one advantage for all its tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = len(lengths), max(lengths)
    input_lengths = torch.tensor(lengths)
    return {
        "input_ids": torch.randint(0, vocabulary_size, size, generator=generator),
        "input_lengths": input_lengths,
        "token_mask": (torch.arange(size[1]) < input_lengths[:, None]).long(),
        "sample_mask": torch.ones(size[0]),
        "advantages": torch.randn(size[0], 1, generator=generator).expand(size).contiguous(),
    }


class Workload:
    """A model with its optimizer, and steps of it in whichever tree is in use."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.heads = HEADS
        if shape.vocabulary_size > SMALL_VOCABULARY:
            self.heads = FusedHeadFactory(1.0, shape.vocabulary_size)
        settings = load_settings(shape)
        init_process_groups(settings["policy"], seed=1)
        use_engine(None)
        self.loss = build_loss(LOSSES[shape.algorithm], settings["loss_fn"])
        self._trees: dict[tuple[str, ...], Any] = {}
        self.model = self._build(settings["policy"])
        self.vocabulary_size = int(model_config(shape)["vocab_size"])

    def _build(self, policy: Any) -> MegatronModel:
        provider, chunks = _build_modules(self.shape, policy, with_ddp=True)
        generator = torch.Generator(torch.cuda.current_device()).manual_seed(0)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.normal_(0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1)
        config = optimizer_config(policy)
        if self.shape.optimizer == OPTIMIZERS[2]:
            config = replace(config, **MEGATRONS_ON_HOST)
        with quiet(), without_gradients(chunks):
            optimizer = get_megatron_optimizer(config, chunks)
            if self.shape.optimizer == OPTIMIZERS[1]:
                parameter_bytes = sum(each.numel() for each in chunks[0].parameters()) * OPTIMIZER_BYTES
                share = policy["megatron_cfg"]["optimizer"]["optimizer_offload_fraction"]
                keep_on_host(optimizer, HostArena(make_backend(), parameter_bytes + (8 << 30)), share)
        _without_temporaries(optimizer)
        scheduler = learning_rate_scheduler(policy, optimizer, num_steps=1)
        self._trees[()] = chunks[0].module, provider
        return MegatronModel(chunks, provider, None, self.shape.transformer_impl, optimizer, scheduler)

    def complete(self, batch: Batch, how: int | MicrobatchSplit = 1) -> Batch:
        """Add the log-probabilities that a policy-gradient loss compares with: the policy's own, by forward passes."""
        logprobs = compute_logprobs(self.model, batch, how, self.heads)
        assert logprobs is not None
        return {**batch, "prev_logprobs": logprobs, "reference_policy_logprobs": logprobs}

    @cached_property
    def batch(self) -> Batch:
        """Sequences of full length."""
        return self.complete(random_batch([self.shape.sequence] * self.shape.num_microbatches, self.vocabulary_size, 1))

    def policy(self, *overrides: str) -> Any:
        """The workload's `policy` section with further settings of `megatron_cfg`."""
        return load_settings(self.shape, overrides)["policy"]

    def use_tree(self, *overrides: str) -> None:
        """Run the next steps in the modules that these settings ask for, which are built the first time."""
        if overrides not in self._trees:
            provider, chunks = _build_modules(self.shape, self.policy(*overrides), with_ddp=False)
            _share_parameters(chunks[0], self._trees[()][0])
            if HAS_GPU:
                chunks[0].cuda()
            self._trees[overrides] = chunks[0], provider
        tree, provider = self._trees[overrides]
        wrapper = self.model.chunks[0]
        wrapper.module, wrapper.config, self.model.config = tree, provider, provider

    def forget_trees(self) -> None:
        """Build trees anew from here on, but for the first."""
        self._trees = {(): self._trees[()]}

    def step(self, batch: Batch | None = None, how: int | MicrobatchSplit = 1) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        batch = self.batch if batch is None else batch
        return train_step(self.model, batch, self.loss, normalizers(batch), how, self.heads)

    def outcome(self, batch: Batch | None = None, how: int | MicrobatchSplit = 1) -> list[Tensor]:
        """The loss and every gradient of a step."""
        loss = torch.tensor(self.step(batch, how)["loss"], dtype=torch.float64)
        return [loss, *(each.main_grad.clone() for each in unwrap(self.model.chunks[0]).parameters())]

    def optimizer_ms(self) -> float:
        """The part of a step that no variant changes, and that the planner leaves out."""
        return medians([timed(self.model.optimizer.step) for _ in range(3)])["ms"]

    def describe(self) -> dict[str, Any]:
        """What a result says about it."""
        fused = bool(self.model.config.bias_activation_fusion)
        return {"shape": asdict(self.shape), "model": model_config(self.shape), "swiglu_is_fused": fused}


def same(outcome: Sequence[Tensor], reference: Sequence[Tensor]) -> bool:
    """Whether two outcomes are equal bit for bit."""
    return all(map(torch.equal, outcome, reference))


def _build_modules(shape: Shape, policy: Any, *, with_ddp: bool) -> tuple[Any, list[Any]]:
    with quiet():
        provider = provider_for(model_config(shape))
        configure_provider(provider, policy)
        provider.perform_initialization = with_ddp  # others get the first one's parameters, and have no room for theirs
        chunks = provider.provide_distributed_model(
            ddp_config=ddp_config(policy),
            wrap_with_ddp=with_ddp,
            use_cpu_initialization=not (HAS_GPU and with_ddp),
            data_parallel_random_init=False,
        )
    return provider, [chunk.train() for chunk in chunks]


def _share_parameters(tree: torch.nn.Module, owner: torch.nn.Module) -> None:
    parameters = dict(owner.named_parameters())
    for path, module in tree.named_modules():
        for name in [name for name, own in module._parameters.items() if own is not None]:
            module._parameters[name] = parameters[f"{path}.{name}"]


def _without_temporaries(optimizer: Any) -> None:
    """Torch's Adam, which stands in where Transformer Engine's is missing, copies all weights unless it is fused."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(each.optimizer, torch.optim.Adam):
            for group in each.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
