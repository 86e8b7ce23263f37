"""The seam to Megatron-Bridge, which converts Hugging Face weights into Megatron-Core's and back.

Bridge imports `transformer_engine` at module level for models and features that this project does not use. Where it is
missing, an import finder answers with empty classes while Bridge is imported, and is taken away again afterwards, so
that no other library is led to believe that Transformer Engine is present. Megatron-Core is imported before, and
sees the truth. The alternative, Bridge's conversion tables copied into this project, would be a second home for
every model.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from functools import cache

from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_offload.megatron.build.hf_mappings import extend_mappings
from nemo_rl_offload.megatron.layers.torch_backend import torch_block_spec, torch_mtp_block_spec
from nemo_rl_offload.megatron.runtime.optional_packages import TRANSFORMER_ENGINE_PACKAGES, transformer_engine_problem


def have_transformer_engine() -> bool:
    """Whether Transformer Engine's torch part can be imported here."""
    return not transformer_engine_problem()


class _EmptyClass(type):
    """A class whose every attribute is another empty class, enough for `class X(te.pytorch.Linear)`."""

    def __getattr__(cls, name: str) -> "_EmptyClass":
        if name.startswith("__"):
            raise AttributeError(name)
        value = _EmptyClass(name, (object,), {})
        setattr(cls, name, value)
        return value


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> _EmptyClass:
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyClass(name, (object,), {})


def _is_transformer_engine(module: str) -> bool:
    return module.split(".")[0] in TRANSFORMER_ENGINE_PACKAGES


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _is_transformer_engine(name):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        module.__version__ = "2.20.2"  # type: ignore[attr-defined]  # Bridge compares it at import
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


@contextlib.contextmanager
def _empty_transformer_engine() -> Iterator[None]:
    finder = _Finder()
    before = {name: module for name, module in sys.modules.items() if _is_transformer_engine(name)}  # or None: hidden
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_transformer_engine(name)]:
            del sys.modules[name]
        sys.modules |= before


@cache
def bridge() -> types.ModuleType:
    """The `megatron.bridge` module, imported with or without Transformer Engine, knowing this project's layers."""
    for name in ("models.gpt.gpt_model", "models.gpt.gpt_layer_specs", "transformer.moe.experts"):
        importlib.import_module(f"megatron.core.{name}")
    if have_transformer_engine():
        module = importlib.import_module("megatron.bridge")
    else:
        with _empty_transformer_engine():
            module = importlib.import_module("megatron.bridge")
    from megatron.bridge.models import gpt_provider
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    with_transformer_engine = gpt_provider.mtp_block_spec

    def mtp_block_spec(config: TransformerConfig, vp_stage: int | None = None) -> object:
        """Providers look this function up by name, and theirs takes Transformer Engine's layers always."""
        is_torch = config.transformer_layer_spec is torch_block_spec
        return (torch_mtp_block_spec if is_torch else with_transformer_engine)(config, vp_stage=vp_stage)

    gpt_provider.mtp_block_spec = mtp_block_spec

    # The fused norm+linear needs no entry: Bridge knows it by its name.
    layers = (
        *(("TorchColumnParallelGroupedLinear", "column"), ("TorchRowParallelGroupedLinear", "row")),
        ("TorchDotProductAttention", "column"),
        *(("TorchNorm", "replicated"), ("WholeLinear", "replicated")),
    )
    for layer, parallelism in layers:
        AutoMapping.register_module_type(layer, parallelism)
    extend_mappings()
    return module
