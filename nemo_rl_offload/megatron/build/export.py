"""A run's checkpoint as a Hugging Face folder: `nemo-rl-offload export RUN_DIR/step_N OUT`.

The checkpoint is read as one rank would have written it, in this process and on the CPU, whatever layout wrote it: an
export needs neither Ray nor the GPUs of the run, but host memory for the whole model, twice.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl_offload.config.loader import resolve_model_path, resolve_tokenizer_path
from nemo_rl_offload.config.schema import MasterConfig, PolicyConfig
from nemo_rl_offload.config.validation import completed, schema_problems
from nemo_rl_offload.data.inputs import changed_beside_weights, changed_frozen_weights
from nemo_rl_offload.data.policy_tokenizer import load_policy_tokenizer
from nemo_rl_offload.data.tokenizer import Tokenizer, load_tokenizer
from nemo_rl_offload.errors import CheckpointError, ConfigError
from nemo_rl_offload.megatron.build.export_files import (
    TOKENIZER_CONFIG,
    difference,
    replace_tokenizer,
    write_chat_template,
    write_generation_config,
)
from nemo_rl_offload.runs.begin import find_checkpoint
from nemo_rl_offload.runs.inputs import read_inputs
from nemo_rl_offload.runs.manifest import Manifest
from nemo_rl_offload.runs.output import make_writable, partial_of
from nemo_rl_offload.runs.run_directory import CONFIG_FILE, POLICY, read_checkpoint
from nemo_rl_offload.specs.documents import DocumentError, kind_of, read_yaml
from nemo_rl_offload.specs.hub_cache import downloaded

if TYPE_CHECKING:
    from nemo_rl_offload.megatron.build.model import MegatronModel

Dtype = Literal["float32", "bfloat16", "float16"]
ONE_RANK: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")),
    "pipeline_model_parallel_layout": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": None,
    "transformer_impl": "torch",  # the same names and shapes of weights as Transformer Engine's
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
}


def export_checkpoint(
    checkpoint: Path, destination: Path, dtype: Dtype | None = None, *, adapter_alone: bool = False
) -> list[str]:
    """Write the checkpoint's weights to a new folder, with the start model's configuration and the run's tokenizer.

    Adapters are merged into the weights.

    Args:
        dtype: type of the weights; None: as they were trained.
        adapter_alone: write the adapter in peft's format, beside the run's tokenizer.

    Returns:
        What the user should know of the folder.

    Raises:
        CheckpointError: it is not there, damaged, or of another model, or has adapters of weights that changed since.
        ConfigError: the run has no adapter, the destination exists or cannot be written, the start model or the
            tokenizer is not where the run found it, or a weight is too large for `dtype`.
        DataError: the tokenizer does not load.
        ResourceError: the disk is full.
    """
    run_dir, folder = find_checkpoint(checkpoint)
    if os.path.lexists(destination):  # also a link to nowhere, over which no folder can be moved
        raise ConfigError(f"{destination}: exists already. Name a new folder.")
    _, _, files = read_checkpoint(folder)
    config = _config_of(run_dir)
    policy = config["policy"]
    has_adapters = policy["megatron_cfg"]["peft"]["enabled"]
    if adapter_alone and not has_adapters:
        raise ConfigError(f"--adapter: {run_dir} trained whole weights, without an adapter. Leave it out.")
    inputs = read_inputs(run_dir) or {}
    if changed := changed_frozen_weights(config, inputs):
        raise CheckpointError(changed)
    model_path = resolve_model_path(policy["model_name"])
    tokenizer_path = _tokenizer_path(policy["tokenizer"]["name"])
    _check_destination(destination)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices: the whole model may be larger than one
    tokenizer, end_ids = load_policy_tokenizer(policy, config["data"]["prompt_template"])
    model = _load(config, model_path, folder, files)
    import torch

    from nemo_rl_offload.megatron.build.model import export_adapter, export_hf

    notes = [*changed_beside_weights(config, inputs), *_beside_the_folder(policy, adapter_alone=adapter_alone)]

    def complete(partial: Path) -> None:
        replace_tokenizer(partial, tokenizer_path)
        if not adapter_alone:
            notes.extend(_as_the_run_had_it(partial, tokenizer, end_ids))
        elif isinstance(template := tokenizer.chat_template, str) and (partial / TOKENIZER_CONFIG).exists():
            write_chat_template(partial, template)

    torch_dtype = dtype and getattr(torch, dtype)
    if adapter_alone:
        base = base_of_adapter(policy["model_name"], model_path)
        export_adapter(model, policy["megatron_cfg"]["peft"], base, destination, dtype=torch_dtype, complete=complete)
    else:
        export_hf(model, model_path, destination, dtype=torch_dtype, complete=complete)
    return [f"{destination}: {note}" for note in notes]


def base_of_adapter(name: str, folder: Path) -> str:
    """What peft is told to load an adapter's start model from: its name on the hub where it was downloaded from there,
    or else the folder. A run also finds a relative name in the project's own folder, where peft does not look."""
    return name if downloaded(name, "model") == folder else str(folder.resolve())


def _load(config: MasterConfig, model_path: Path, folder: Path, files: Manifest) -> "MegatronModel":
    """The checkpoint's model, in this process on the CPU."""
    import torch.distributed as dist

    from nemo_rl_offload.megatron.runtime.cpu import install_cpu_support

    install_cpu_support()
    from nemo_rl_offload.megatron.build.model import build_model, init_process_groups
    from nemo_rl_offload.megatron.checkpoint.distributed import load, verify
    from nemo_rl_offload.megatron.runtime.rendezvous import join_alone

    policy = config["policy"]
    if not dist.is_initialized():
        join_alone("gloo")
    init_process_groups(policy, seed=0)
    verify(folder / POLICY, files)
    with_adapters = policy["megatron_cfg"]["peft"]["enabled"]
    model = build_model(policy, model_path, num_steps=None, with_adapters=with_adapters)
    load(model, folder / POLICY)
    return model


def _check_destination(destination: Path) -> None:
    """Raise where nothing can be written to it, and leave nothing there: what is found damaged later writes nothing."""
    partial = partial_of(destination)
    if os.path.islink(partial):  # False of a name that is too long, which is said below
        raise ConfigError(f"{destination}: cannot write to {partial}: it is a link. Name another folder.")
    make_writable(partial, str(destination))
    shutil.rmtree(partial)


def _beside_the_folder(policy: PolicyConfig, *, adapter_alone: bool) -> Iterator[str]:
    """What the exported folder needs and does not hold."""
    if adapter_alone and (overrides := policy["hf_config_overrides"]):
        yield (
            f"the adapter was trained with policy.hf_config_overrides, {overrides}, which its base model's config.json "
            "needs. Without --adapter they are written there."
        )
    if arguments := policy["tokenizer"]["chat_template_kwargs"]:
        yield f"apply_chat_template needs the run's policy.tokenizer.chat_template_kwargs: {arguments}."


def _tokenizer_path(name: str) -> Path:
    try:
        return resolve_tokenizer_path(name)
    except ConfigError as error:
        raise ConfigError(f"policy.tokenizer.name: {error} An export has the tokenizer of the run.") from error


def _as_the_run_had_it(folder: Path, tokenizer: Tokenizer, end_ids: Sequence[int]) -> Iterator[str]:
    """Bring what stands beside the weights to what the run had; says where it is read as something else."""
    write_generation_config(folder, end_ids, tokenizer.pad_token_id)
    exported = load_tokenizer(folder)
    if isinstance(tokenizer.chat_template, str) and exported.chat_template != tokenizer.chat_template:
        write_chat_template(folder, tokenizer.chat_template)
        exported = load_tokenizer(folder)
    if other := difference(exported, tokenizer):
        yield f"the tokenizer is another one beside this model's config.json: {other}."


def _config_of(run_dir: Path) -> MasterConfig:
    """The run's configuration, for one rank. That of an earlier version gets what this one's has besides."""
    path = run_dir / CONFIG_FILE
    try:
        saved = read_yaml(path, follows_links=False)
    except (OSError, DocumentError) as error:
        raise _no_configuration(path, str(error)) from error
    if not isinstance(saved, dict):
        raise _no_configuration(path, f"it holds {kind_of(saved)}")
    config: Any = completed(saved)
    wrong = [f"{key}: {text}" for key, text in schema_problems(config).items() if _is_read(key)]
    if wrong:
        raise _no_configuration(path, "; ".join(text.removesuffix(".") for text in wrong))
    policy = config["policy"]
    config["policy"] = {**policy, "megatron_cfg": {**policy["megatron_cfg"], **ONE_RANK}}
    return config  # type: ignore[no-any-return]


def _is_read(key: str) -> bool:
    """Whether an export reads it: what else a run of an earlier version had may be another thing by now."""
    return key.split(".")[0] == "policy" or key in ("data", "data.prompt_template")


def _no_configuration(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: is not the configuration of a run: {reason}. Restore it from a copy.")
