"""Builds the Megatron-Core model of a policy from a Hugging Face folder, and writes one back."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import SafetensorError
from safetensors.torch import save_file

from nemo_rl_offload.config.schema import PeftConfig, PolicyConfig
from nemo_rl_offload.errors import ConfigError, NemoRLOffloadError, ResourceError, where_else
from nemo_rl_offload.megatron.build.bridge import bridge
from nemo_rl_offload.megatron.build.export_files import (
    copy_model_files,
    readable,
    write_dtype,
    write_json,
    write_overrides,
)
from nemo_rl_offload.megatron.build.gradient_memory import without_gradients
from nemo_rl_offload.megatron.build.hf_mappings import name_for_peft, tell_names
from nemo_rl_offload.megatron.build.hf_model import class_of, config_of, make_provider
from nemo_rl_offload.megatron.build.hf_weights import check_names, names_read, repeated_names
from nemo_rl_offload.megatron.build.lora import bridge_lora, register_lora
from nemo_rl_offload.megatron.build.optimizer import ddp_config, learning_rate_scheduler, optimizer_config
from nemo_rl_offload.megatron.build.paged_stash import install_paged_stash
from nemo_rl_offload.megatron.build.text_part import TextWeights
from nemo_rl_offload.megatron.build.transformer_config import configure_provider
from nemo_rl_offload.megatron.build.vocabulary import exported_weights, mask_padding, pad_vocabulary
from nemo_rl_offload.megatron.layers.quantization import WeightQuantizer
from nemo_rl_offload.megatron.layers.router_replay import prepare_replay
from nemo_rl_offload.megatron.protocols import ModelChunk, Optimizer, Scheduler
from nemo_rl_offload.megatron.runtime.quiet import quiet
from nemo_rl_offload.megatron.runtime.rendezvous import join
from nemo_rl_offload.megatron.step.cuda_graphs import LayerGraphs
from nemo_rl_offload.observability.start_clock import StartClock
from nemo_rl_offload.paged_stash.rerun import StepGuard
from nemo_rl_offload.runs.output import partial_of
from nemo_rl_offload.specs.catalogue import read_config_file, read_text_part
from nemo_rl_offload.specs.lora import is_adapter
from nemo_rl_offload.specs.model_families import SPLIT_PACKS, TORCH_LAYERS, needs_torch_layers, windows_or_sinks
from nemo_rl_offload.specs.model_keys import Content, overrides_of_run, with_overrides
from nemo_rl_offload.specs.multimodal import module_name
from nemo_rl_offload.specs.out_of_memory import is_out_of_memory
from nemo_rl_offload.specs.quantization import find_quantization
from nemo_rl_offload.specs.weight_files import weight_files

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.models.gpt import GPTModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""By the names that peft looks for."""


def _not_measured(_what: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class MegatronModel:
    """A policy's model with everything that trains it; one object in each worker."""

    chunks: list[ModelChunk]
    """Model chunks of this pipeline stage, wrapped for data parallelism."""
    config: TransformerConfig
    """Megatron-Bridge's provider."""
    auto_bridge: "AutoBridge"
    transformer_impl: str
    optimizer: Optimizer | None
    scheduler: Scheduler | None
    """None, like the optimizer, for a model that is never trained."""
    guard: StepGuard | None = None
    """Runs a step again whose experts' buffers or stash did not suffice; None where they have no limits."""
    graphs: LayerGraphs | None = None
    """CUDA graphs of its layers; None where nothing is captured."""
    measure: Callable[[str], AbstractContextManager[None]] = _not_measured
    """Opens a part of a step whose device memory is counted for itself."""
    overrides: Content = field(default_factory=dict)
    """What the run says in place of the model's `config.json`."""
    text_weights: TextWeights | None = None
    """Of a multimodal model's folder."""
    has_adapters: bool = False
    """Whether adapters are trained, and the model's own weights frozen."""
    quantizer: WeightQuantizer | None = None
    """Of quantization-aware training: quantizes the weights in place, after each step."""
    weights_are_whole: bool = True
    """False after a step with `overlap_param_gather`, which leaves each rank its own part until the next forward."""
    has_stepped: bool = False
    """Whether this process has updated the weights."""

    def gather_weights(self) -> None:
        """Bring the last step's weights to all ranks, which call this together.

        For whoever reads or replaces weights, and for forwards that a rank may leave out, having nothing to do: the
        others would wait for it in the forward's own gather.
        """
        if not self.weights_are_whole:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self.weights_are_whole = True

    def quantize_weights(self) -> None:
        """In quantization-aware training: what all ranks do together after weights have changed."""
        if self.quantizer is not None:
            self.gather_weights()
            self.quantizer.apply()

    @property
    def modules(self) -> list["GPTModel"]:
        """The chunks without their wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]


def unwrap(module: object) -> "GPTModel":
    """The `GPTModel` under Megatron's DDP and mixed-precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def init_process_groups(policy: PolicyConfig, seed: int) -> None:
    """Join the process group of this worker (RANK, WORLD_SIZE, MASTER_* in the environment) and split it for Megatron.

    NCCL where there is a GPU, gloo otherwise. Raises WorkerError where the workers' port is taken.
    """
    cfg = policy["megatron_cfg"]
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # Ray shows each worker its own device only
        if captures_layers(policy):
            prepare_captures()
    if not dist.is_initialized():
        join("nccl" if torch.cuda.is_available() else "gloo")
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cfg["tensor_model_parallel_size"],
            pipeline_model_parallel_size=cfg["pipeline_model_parallel_size"],
            context_parallel_size=cfg["context_parallel_size"],
            expert_model_parallel_size=cfg["expert_model_parallel_size"],
            expert_tensor_parallel_size=cfg["expert_tensor_parallel_size"],
            virtual_pipeline_model_parallel_size=cfg["virtual_pipeline_model_parallel_size"],
        )
    torch.manual_seed(seed)
    is_graph_safe = captures_layers(policy)
    model_parallel_cuda_manual_seed(seed, te_rng_tracker=is_graph_safe, force_reset_rng=is_graph_safe)


def prepare_captures() -> None:
    """Let this thread compute where a capture can follow, before there is a model or a communicator.

    Data parallelism keeps the nodes that add up gradients, and these keep the stream that they were made on. The
    default stream can be no part of a capture. Megatron-Bridge does the same.
    """
    os.environ["NCCL_GRAPH_REGISTER"] = "0"  # which segments that expand ask for, and Megatron for them
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def captures_layers(policy: PolicyConfig) -> bool:
    """Whether layers become CUDA graphs, during whose capture no other tracker of random states can be read than
    Transformer Engine's."""
    return policy["megatron_cfg"]["cuda_graph_impl"] == "transformer_engine"


def check_layers(content: Content, policy: PolicyConfig, model_path: Path, transformer_impl: str) -> None:
    """Raise ConfigError for what Transformer Engine's layers do not do, now that it is known whether they are taken."""
    if transformer_impl != "transformer_engine":
        return
    if (key := needs_torch_layers(content)) is not None:
        raise ConfigError(f"policy.model_name: {model_path}: {TORCH_LAYERS.format(key=key)}")
    num_ranks, what = policy["megatron_cfg"]["context_parallel_size"], windows_or_sinks(content)
    if num_ranks > 1 and policy["sequence_packing"]["enabled"] and what is not None:
        text = SPLIT_PACKS.format(num_ranks=num_ranks, what=what, path=model_path)
        raise ConfigError(f"policy.megatron_cfg.context_parallel_size: {text}")


def build_model(
    policy: PolicyConfig,
    model_path: Path,
    num_steps: int | None,
    *,
    with_adapters: bool | None = None,
    keep_optimizer: Callable[[Optimizer], None] = lambda _: None,
    clock: StartClock | None = None,
) -> MegatronModel:
    """Build the policy's model, load the weights of a Hugging Face folder into it, and give it an optimizer.

    A model that is never trained (`num_steps` is None) has no optimizer, no schedule and no room for gradients, and the
    policy's adapters only where it is said so: others hold them merged, or are another model.

    `keep_optimizer` is called with a new optimizer, to move what need not be on the device: gradients have no memory
    until then, so that they and all main weights need not fit there at once.

    Process groups must be there (`init_process_groups`), and an offload engine installed if one is to be used, since
    layers look it up when they are built. Raises ConfigError when Bridge does not know the model's family, when the
    folder's weights do not fit, or when Megatron refuses the configuration.
    """
    clock = clock or StartClock()
    with quiet():
        folder = _open(policy, model_path, clock)
        provider = folder.provider
        pad_vocabulary(provider, policy["megatron_cfg"]["tensor_model_parallel_size"])
        transformer_impl = configure_provider(provider, policy, needs_torch=bool(needs_torch_layers(folder.content)))
        check_layers(folder.content, policy, model_path, transformer_impl)
        has_adapters = policy["megatron_cfg"]["peft"]["enabled"] and (
            num_steps is not None if with_adapters is None else with_adapters
        )
        if has_adapters:
            register_lora(provider, policy)
        with clock.part("model"):
            chunks = _make_chunks(provider, policy, is_trained=num_steps is not None)
        with clock.part("weights"):
            _load_weights(folder.auto_bridge, chunks, model_path)
        modules = [unwrap(chunk) for chunk in chunks]
        mask_padding(modules, provider.vocab_size)
        for layer in [layer for module in modules for layer in module.modules() if isinstance(layer, MoELayer)]:
            layer.register_forward_hook(forget_probabilities, always_call=True)
        if policy["router_replay"]["enabled"]:
            prepare_replay(modules)
        guard = install_paged_stash(policy, modules)
        model = MegatronModel(
            *(chunks, provider, folder.auto_bridge, transformer_impl, None, None),
            has_adapters=has_adapters,
            overrides=folder.overrides,
            text_weights=folder.text_weights,
        )
        if num_steps is not None:
            model.optimizer = _make_optimizer(policy, chunks, keep_optimizer, clock)
            model.scheduler, model.guard = learning_rate_scheduler(policy, model.optimizer, num_steps), guard
            if captures_layers(policy):
                model.graphs = LayerGraphs(chunks, provider)
        if policy["quant_cfg"] is not None:  # after the optimizer has copied the weights as they are
            model.quantizer = WeightQuantizer(modules, find_quantization(policy["quant_cfg"]))
            model.quantize_weights()
    return model


def _make_chunks(provider: "GPTModelProvider", policy: PolicyConfig, *, is_trained: bool) -> list[ModelChunk]:
    chunks: list[ModelChunk] = provider.provide_distributed_model(
        ddp_config=ddp_config(policy),
        wrap_with_ddp=is_trained,
        use_cpu_initialization=not torch.cuda.is_available(),
        data_parallel_random_init=False,
    )
    return chunks


def _make_optimizer(
    policy: PolicyConfig, chunks: list[ModelChunk], keep: Callable[[Optimizer], None], clock: StartClock
) -> Optimizer:
    with without_gradients(chunks):
        with clock.part("optimizer"):
            try:
                optimizer: Optimizer = get_megatron_optimizer(optimizer_config(policy), chunks)
            except AssertionError as error:
                raise ConfigError(f"policy.megatron_cfg.optimizer: Megatron-Core refuses it: {error}") from error
        with clock.part("optimizer on the host"):
            keep(optimizer)
    return optimizer


@dataclass(frozen=True)
class _OpenFolder:
    """A Hugging Face folder before a model is built of it."""

    content: Content
    """Of `config.json`, with what the run says in its place."""
    overrides: Content
    auto_bridge: "AutoBridge"
    provider: "GPTModelProvider"
    text_weights: TextWeights | None


def _open(policy: PolicyConfig, model_path: Path, clock: StartClock) -> _OpenFolder:
    of_folder = read_config_file(model_path / "config.json")
    overrides = overrides_of_run(of_folder, policy["hf_config_overrides"], policy["megatron_cfg"]["mtp_num_layers"])
    content = with_overrides(of_folder, overrides)
    with clock.part("imports"):
        bridge()
    with _named(model_path), clock.part("model"):
        auto_bridge = bridge().AutoBridge.from_hf_pretrained(str(model_path), **class_of(content))
        part = read_text_part(model_path / "config.json")
        if overrides or part is not None:
            auto_bridge.hf_pretrained.config = config_of(content)
        provider = make_provider(auto_bridge, content, model_path, policy["max_total_sequence_length"])
    files = _files_of_weights(model_path, content)
    state = auto_bridge.hf_pretrained.state
    state.source._key_to_filename_map_cache = files
    text_weights = None if part is None else TextWeights(state.source, part, model_path)
    if text_weights is not None:
        state.source = text_weights.source()
    tell_names(auto_bridge.hf_pretrained.config, files)
    return _OpenFolder(content, overrides, auto_bridge, provider, text_weights)


def _files_of_weights(model_path: Path, content: Content) -> dict[str, str]:
    try:
        return weight_files(model_path, is_quantized=bool(content.get("quantization_config")))
    except ConfigError as error:
        raise ConfigError(f"policy.model_name: {error}") from error


def forget_probabilities(layer: MoELayer, *_: object) -> None:
    """Megatron's dispatchers keep the router's probabilities, and by them the graph of a forward without a backward."""
    dispatcher = layer.token_dispatcher
    dispatcher.probs = dispatcher.local_probs = None
    if isinstance(dispatcher, MoEFlexTokenDispatcher):
        dispatcher._comm_manager.token_probs = None


def _load_weights(auto_bridge: "AutoBridge", chunks: list[ModelChunk], model_path: Path) -> None:
    """Read the folder's weights, whose names are those of the model. NaN shows what holds none."""
    with _named(model_path):
        check_names(auto_bridge, [unwrap(chunk) for chunk in chunks], model_path)
    weights = [named for chunk in chunks for named in unwrap(chunk).named_parameters() if not is_adapter(named[0])]
    for _, weight in weights:
        weight.data.fill_(torch.nan)
    with _named(model_path):
        auto_bridge.load_hf_weights(chunks)
    missing = [name for name, weight in weights if weight.isnan().any()]
    if missing:
        raise ConfigError(
            f"policy.model_name: {model_path}: {len(missing)} of {len(weights)} weights hold what is no number (NaN); "
            f"the first is {missing[0]} (Megatron's name). Is the download complete?"
        )


_CANNOT = "Megatron-Bridge cannot take it"


@contextmanager
def _named(model_path: Path) -> Iterator[None]:
    """Whatever transformers or Bridge raises becomes a message about the model: they read what the user brought.

    The first paragraph says it; what Bridge writes below is for those who extend Bridge.
    """
    try:
        yield
    except (NemoRLOffloadError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__
        cannot = "its weights have other shapes than its config.json says" if "Shape mismatch" in reason else _CANNOT
        raise ConfigError(f"policy.model_name: {model_path}: {cannot}: {reason}") from error


def export_hf(
    model: MegatronModel,
    source: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    complete: Callable[[Path], None] = lambda _folder: None,
) -> None:
    """Write the weights as a Hugging Face folder, with the configuration and tokenizer of `source`.

    Every rank takes part; rank 0 gathers the whole model in host memory and writes it. The folder appears whole or
    not at all, after `complete` has added to it.

    Args:
        dtype: of the weights; None: as they were trained.

    Raises:
        ResourceError: a file cannot be written, as on a full disk.
        ConfigError: a weight is too large for `dtype`.
    """
    partial = partial_of(destination)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        with _absent_on_failure(partial, destination):
            partial.mkdir(parents=True)
            copy_model_files(source, partial)
            write_overrides(partial, model.overrides)
    dist.barrier()
    with quiet():
        weights = {
            name: weight.clone(memory_format=torch.contiguous_format)
            for name, weight in exported_weights(model.auto_bridge, model.modules, model.config.vocab_size, cpu=True)
            if dist.get_rank() == 0
        }
    expected, whole = names_read(model.auto_bridge, model.modules), model.text_weights
    if dist.get_rank() == 0:
        assert weights.keys() == expected, f"an export without {expected ^ weights.keys()}"
        weights |= {name: weights[other].clone() for name, other in repeated_names(model.auto_bridge).items()}
        with _absent_on_failure(partial, destination):
            if dtype is not None:
                convert(weights, dtype)
            write_dtype(partial, dtype_name(most_common_dtype(weights)))
            save_torch_state_dict(weights if whole is None else whole.whole(weights), partial)
            readable(partial)
            complete(partial)
            shutil.rmtree(destination, ignore_errors=True)
            partial.rename(destination)
    dist.barrier()


def export_adapter(
    model: MegatronModel,
    peft: PeftConfig,
    base: str,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    complete: Callable[[Path], None] = lambda _folder: None,
) -> None:
    """Write the adapters as a folder that peft reads: `adapter_config.json` and `adapter_model.safetensors`.

    Every rank takes part, rank 0 writes; the folder appears whole or not at all. The parts of a fused linear get a copy
    of their A each, and so do experts of the adapter that they share: peft has one for each module.

    Args:
        base: the model's folder or name, of which `adapter_config.json` tells peft.

    Raises:
        ResourceError: a file cannot be written, as on a full disk.
        ConfigError: a weight is too large for `dtype`, or peft has no name for an adapter.
    """
    from megatron.bridge.models.conversion import peft_bridge

    with quiet():
        found = list(model.auto_bridge.export_adapter_weights(model.modules, cpu=True, show_progress=False))
    config = model.auto_bridge.hf_pretrained.config
    found = [pair._replace(param_name=name_for_peft(config, pair.param_name)) for pair in found]
    if model.text_weights is not None:
        found = [pair._replace(param_name=module_name(pair.param_name)) for pair in found]
    if dist.get_rank() == 0:
        is_zero = {name: not weight.any() for name, weight in found}  # both of an adapter: of a part without a target
        found = [pair for pair in found if not all(is_zero[each] for each in _both_of(pair.param_name))]
        state, names, parameters = peft_bridge.convert_adapter_weights_to_peft_state(found)
        weights = {name: weight.detach().clone(memory_format=torch.contiguous_format) for name, weight in state.items()}
        settings = peft_bridge.build_adapter_config_dict(
            bridge_lora(peft),
            _modules_for_peft(names, peft["target_modules"], is_part=model.text_weights is not None),
            parameters,
            base_model_name_or_path=base,
        )
        partial = partial_of(destination)
        shutil.rmtree(partial, ignore_errors=True)
        with _absent_on_failure(partial, destination):
            if dtype is not None:
                convert(weights, dtype)
            partial.mkdir(parents=True)
            save_file(weights, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            readable(partial)
            write_json(partial / ADAPTER_CONFIG, settings)
            complete(partial)
            shutil.rmtree(destination, ignore_errors=True)
            partial.rename(destination)
    dist.barrier()


def _both_of(name: str) -> tuple[str, str]:
    module = name.removesuffix(".weight").rpartition(".lora_")[0]
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _modules_for_peft(names: Sequence[str], targets: Sequence[str], *, is_part: bool) -> list[str]:
    """Of adapters' weights by Hugging Face's names; whole paths where patterns may have left layers out, or the model
    has towers with modules of the same names."""
    modules = {name.removesuffix(".weight").rpartition(".lora_")[0] for name in names}
    is_part = is_part or any("*" in target for target in targets)
    return sorted(modules if is_part else {module.rpartition(".")[2] for module in modules})


def most_common_dtype(weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type that most elements have, of those with a fraction."""
    sizes = Counter[torch.dtype]()
    for weight in weights.values():
        if weight.is_floating_point():
            sizes[weight.dtype] += weight.numel()
    return sizes.most_common(1)[0][0]


def convert(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give weights another type. What was kept more exactly than most, such as a router's correction in float32, stays.

    Raises:
        ConfigError: a number becomes infinite.
    """
    trained = most_common_dtype(weights)
    for name, weight in weights.items():
        is_kept_exact = weight.dtype != trained and weight.dtype.itemsize > dtype.itemsize
        if weight.is_floating_point() and not is_kept_exact:
            weights[name] = weight.to(dtype)
            if weights[name].isinf().any() and not weight.isinf().any():
                largest = f"{float(weight.abs().max()):.3g} in {name}"
                raise ConfigError(f"--dtype {dtype_name(dtype)}: {largest} is too large for it. Take bfloat16.")


def dtype_name(dtype: torch.dtype) -> str:
    """As configurations write it."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _absent_on_failure(partial: Path, destination: Path) -> Iterator[None]:
    try:
        yield
    except NemoRLOffloadError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ResourceError(
            f"{destination}: cannot be written: {error}. {where_else(error, 'name another folder')}"
        ) from error
