"""What this project adds to vLLM's worker: weights replaced in place, log-probabilities, a place in an engine.

vLLM mixes `WeightsInPlace` into its worker (`worker_extension_cls`) and imports this module before it loads a model.

On a CPU, vLLM packs weights for oneDNN, for its own kernels of experts and, where there is AMX, for convolutions as it
builds, and drops or overwrites the originals. Its `load_weights` then fails or, worse, writes plain weights where
packed ones are read. `keep_weights_plain` turns all three off, and linear layers are torch's own. Rejected: vLLM's
layerwise reload, which packs anew: it needs the originals of a whole layer beside it.

Parameters are written in place on a GPU as well, where its graphs have their addresses. What vLLM's loaders say that
they have loaded is not asked: a name is in it once one of many experts has come. All is filled with NaN instead.

Linears and experts in 8 bits take vLLM's layerwise reload, each layer for itself: what comes for one is kept until it
is whole (each weight of a bucket has memory of its own), then quantized as when the engine was built, and copied to
where the old weights are. NaN stands for what does not come there, too: a block with one has NaN for its scale.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from nemo_rl_offload.specs.multimodal import TEXT_PARTS, module_name


def keep_weights_plain() -> None:
    """Let CPU layers compute with the parameters as they are. To be called before a model is loaded."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    ops._supports_onednn = False
    torch.cpu._is_amx_tile_supported = lambda: False  # what packs and what computes ask the same function
    CPUFusedMOE.check_grouped_gemm = lambda *_: (False, "none")
    make_own = CPUFusedMOE.init_moe_torch

    def make_experts(self: Any, layer: Any) -> None:
        """Let experts of other ranks add nothing: routers choose among all, which vLLM overlooks on a CPU."""
        make_own(self, layer)
        if layer.expert_map is None:
            return
        for name, weight in (("gate_up_linear", layer.w13_weight), ("down_linear", layer.w2_weight)):
            own, nothing = getattr(layer, name), partial(_zeros, weight.shape[1])  # of [local experts, out, in]
            setattr(layer, name, [nothing if place < 0 else own[place] for place in layer.expert_map.tolist()])

    CPUFusedMOE.init_moe_torch = make_experts


def rotate_heads_apart() -> None:
    """Let positions reach the right tokens on a CPU: its kernel takes the heads of [tokens, heads, size] for tokens.

    Latent attention passes queries so; to be called before a model is loaded.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    by_kernel = RotaryEmbedding.forward_cpu

    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (self.forward_native if query.ndim == 3 else partial(by_kernel, self))(positions, query, key)

    RotaryEmbedding.forward_cpu = forward


def expand_to_drafts() -> None:
    """Give each draft its request's temperature, top-k and top-p on a CPU: its kernel writes them into a copy.

    To be called before an engine is built.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(x: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        """Of `x`, [B], where each row has tokens up to `ends`, [B]; returns [num_tokens]."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        return x.where(x != replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def find_lacking_parts() -> None:
    """Let what a layer in 8 bits is quantized from be NaN until it comes. To be called before a model is loaded."""
    from vllm.model_executor.model_loader.reload import meta

    make = meta.materialize_meta_tensor

    def make_of_nan(description: Tensor) -> Tensor:
        tensor: Tensor = make(description)
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
        return tensor

    meta.materialize_meta_tensor = make_of_nan


def take_place(rank: int) -> None:
    """Let vLLM be this rank of an engine, whose process group is there. To be called before an engine is built.

    vLLM would ask the environment, where the rank among all engines is. It would also give each engine sockets and
    shared memory for messages from the first rank to the others, to whom nothing is sent here: each knows all requests.
    On a CPU, sums would go through shared memory with a name that all engines have, and a rank that waits there for one
    that has died waits for ever. gloo ends; it is taken where the ranks' names of that memory differ.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    own = f"process:{os.getpid()}"
    ExecutorWithExternalLauncher._distributed_args = lambda _: (own, rank, 0)
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)


def _tell_and_compute(
    tell: Callable[[Tensor], None],
    compute: Callable[..., Tensor],
    layer: Any,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    *further: Any,
) -> Tensor:
    tell(experts)
    return compute(layer, x, weights, experts, *further)


def _zeros(size: int, tokens: Tensor) -> Tensor:
    return tokens.new_zeros(len(tokens), size)


class WeightsInPlace:
    """Methods of vLLM's worker that the engine's process calls by `collective_rpc`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _kept: dict[str, Tensor]

    def _draft_model(self) -> Any:
        """What drafts; None without speculative decoding."""
        drafter = getattr(self.model_runner, "drafter", None)
        return None if drafter is None else drafter.model

    def _trains_drafts(self) -> bool:
        """Whether an update brings weights of what drafts."""
        return self._draft_model() is not None and self.model_runner.speculative_config.method == "mtp"

    def _own_parameters_of_drafts(self) -> dict[str, Tensor]:
        """Without what the drafting layer shares with the model."""
        if (model := self._draft_model()) is None:
            return {}
        shared = {id(parameter) for parameter in self.model_runner.model.parameters()}
        return {name: each for name, each in model.named_parameters() if id(each) not in shared}

    def keep_drafts(self) -> None:
        """Copy what drafts to the host, before sleep gives it up: of what is not trained, an update brings nothing."""
        own = self._own_parameters_of_drafts()
        if not hasattr(self, "_kept"):
            self._kept = {
                name: torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda) for name, each in own.items()
            }
        with torch.no_grad():
            for name, each in own.items():
                self._kept[name].copy_(each)

    def give_drafts_back(self) -> None:
        """Write it into the memory that it has again."""
        with torch.no_grad():
            for name, each in self._own_parameters_of_drafts().items():
                each.copy_(self._kept[name])

    def _layers_in_eight_bits(self) -> list[torch.nn.Module]:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase

        drafts = self._draft_model() if self._trains_drafts() else None
        modules = (module for model in filter(None, (self.model_runner.model, drafts)) for module in model.modules())
        layers = (module for module in modules if isinstance(module, (LinearBase, RoutedExperts)))
        return [layer for layer in layers if getattr(layer.quant_method, "uses_meta_device", False)]

    def begin_update(self) -> None:
        """Leave no old weight in place: what an update does not bring is found by `finish_update`."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with torch.no_grad():
            for parameter in self.model_runner.model.parameters():
                if parameter.itemsize > 1:  # those in 8 bits have scales
                    parameter.fill_(torch.nan)
        for layer in self._layers_in_eight_bits():
            initialize_layerwise_reload(layer)

    def load_named_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write weights by Hugging Face's names, of a multimodal model by those of its text part alone."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name as drafting_layer

        named = list(weights)
        if self.model_config.hf_config.model_type in TEXT_PARTS:
            named = [(module_name(name), weight) for name, weight in named]
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            self.model_runner.model.load_weights(iter(named))
            if self._trains_drafts():
                config = self.model_config.hf_config
                of_layer = [
                    each for each in named if each[0].startswith("mtp.") or drafting_layer(config, each[0]) is not None
                ]
                if of_layer:
                    self._draft_model().load_weights(iter(of_layer))

    def finish_update(self) -> list[str]:
        """The names of vLLM's parameters of which a part has not come.

        Latent attention decodes with parts of `kv_b_proj` in another order, which may be copies: made again here, as by
        vLLM after it has loaded weights, where they were.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import MLAAttention
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            for layer in self._layers_in_eight_bits():
                finalize_layerwise_reload(layer, self.model_config)
        with torch.no_grad():
            for model in filter(None, (self.model_runner.model, self._draft_model())):
                for module in model.modules():
                    if isinstance(module, MLAAttention):
                        module.process_weights_after_loading(self.model_config.dtype)
        named = self.model_runner.model.named_parameters()
        return [name for name, each in named if each.itemsize > 1 and each.sum(dtype=torch.float32).isnan()]

    def return_routed_experts(self) -> list[str]:
        """Let each layer tell vLLM which experts it chooses; the names of layers that cannot.

        A router tells by itself where its choice is made apart from the experts' product. On a CPU vLLM makes both at
        once, and would return zeros: there the layer tells before its product.
        """
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        silent = []
        for name, layer in self.model_runner.model.named_modules():
            if not isinstance(layer, MoERunner):
                continue
            method = layer.routed_experts.quant_method
            experts = getattr(method, "cpu_fused_moe", None)
            if getattr(layer.router, "capture_fn", None) is None:
                silent.append(name)
            elif isinstance(experts, CPUFusedMOE):
                experts.forward_method = partial(_tell_and_compute, layer.router.capture_fn, experts.forward_method)
            elif method.is_monolithic:
                silent.append(name)
        return silent

    def return_whole_logprobs(self) -> None:
        """Let the sampler return log-probabilities at the temperature before top-k and top-p, as training has them.

        Processed ones are of the distribution that is left after both.
        """
        sampler = self.model_runner.sampler.topk_topp_sampler
        draw = sampler.forward

        def forward(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            logprobs_BV = logits.log_softmax(dim=-1, dtype=torch.float32)  # before `draw` masks the logits in place
            return draw(logits, *others)[0], logprobs_BV

        sampler.forward = forward
        if self._draft_model() is not None:
            self._return_whole_logprobs_of_drafts()

    def _return_whole_logprobs_of_drafts(self) -> None:
        """The same of tokens that a draft proposed, whose logits vLLM masks elsewhere."""
        from vllm.v1.sample import rejection_sampler as module

        mask, sampler = module.apply_sampling_constraints, self.model_runner.rejection_sampler
        gather, whole = sampler._get_logprobs_tensors, list[Tensor]()

        def masked(logits: Tensor, ends: Tensor, metadata: Any) -> Tensor:
            whole[:] = [mask(logits.clone(), ends, replace(metadata, top_k=None, top_p=None))]
            return cast("Tensor", mask(logits, ends, metadata))

        def gathered(number: int, metadata: Any, logits: Tensor, _: Tensor, *others: Tensor) -> Any:
            return gather(number, metadata, logits, whole.pop(), *others)

        module.apply_sampling_constraints, sampler._get_logprobs_tensors = masked, gathered
