"""The engine in a program that drives Megatron-Core itself: Megatron-LM, Megatron-Bridge, NeMo-RL.

Megatron's configuration says all that it can say of offloading, and is read where Megatron reads it, when a model
chunk's forward begins: `GPTModel.preprocess_for_fine_grained_offloading`, and the same of `HybridModel`. The engine is
built there, at the first forward, since a program installs it before it knows its device (a hook of Ray's workers runs
before everything else). What Megatron accepts and this engine does not do is refused at the same place.

Rejected: to build the engine in `install`. It would open a CUDA context on device 0 of every process of a node.

Limit: one engine, and so one set of Megatron's knobs, for all models in a process that train.
"""

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar
from weakref import WeakSet

import megatron.core
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_offload.adapters.megatron_core.installation import make_backend, reduce_max_over_stage
from nemo_rl_offload.adapters.megatron_core.interface import OffloadInterface, restore_megatrons, use_engine
from nemo_rl_offload.errors import ConfigError
from nemo_rl_offload.offload.engine import OffloadEngine
from nemo_rl_offload.offload.host_memory import host_memory_budget_bytes
from nemo_rl_offload.offload.options import OffloadOptions, build_engine
from nemo_rl_offload.offload.stats import OffloadStats
from nemo_rl_offload.specs.offload_modules import NATIVE_MODULES, discarded_by_recompute

KNOWN_VERSIONS = ("0.19.2",)
"""Of Megatron-Core, whose layers this engine was tested in."""

_MEGATRON_SAYS = {
    "min_tensor_bytes": "min_offloaded_tensor_size",
    "min_tensor_elements": "min_offloaded_tensor_size",
    "fraction": "activation_offload_fraction",
    "kept_bytes_per_step": "delta_offload_bytes_across_pp_ranks",
    "max_inflight_groups": "fine_grained_offloading_max_inflight_offloads",
}
"""Options that have a field of TransformerConfig."""
_MODELS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel"),
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
)
_IDLE = (
    "no layer of this rank has such a module that Megatron-Core can offload. Layers that are recomputed whole have "
    "attn_norm alone; experts have expert_fc1 and moe_act where they are one grouped matrix product (moe_grouped_gemm)."
)
_PREPROCESS = "preprocess_for_fine_grained_offloading"


@dataclass(frozen=True, kw_only=True)
class _Knobs:
    """TransformerConfig's fields that say what is offloaded."""

    offload_modules: tuple[str, ...]
    min_offloaded_tensor_size: int
    activation_offload_fraction: float
    delta_offload_bytes_across_pp_ranks: int
    fine_grained_offloading_max_inflight_offloads: int | None

    @classmethod
    def of(cls, config: TransformerConfig) -> "_Knobs":
        values = {field.name: getattr(config, field.name) for field in fields(cls)}
        return cls(**values | {"offload_modules": tuple(config.offload_modules)})


class Installed:
    """This engine in the place of Megatron-Core's, from `install` until `uninstall`."""

    def __init__(self, options: OffloadOptions | None) -> None:
        self._options = options
        self._engine: OffloadEngine | None = None
        self._former: list[OffloadEngine] = []
        """Of models before `reset_instance`, whose backward was still to come."""
        self._knobs: _Knobs | None = None
        self._totals: dict[str, int] = {}
        self._has_warned = False
        self.bytes_of_step: dict[str, int] = {}
        """Offloaded in the last step, by module."""

    def stats(self) -> OffloadStats:
        """Totals since the first forward, or the first after `reset_instance`, in bytes and counts; also after
        `uninstall`."""
        return OffloadStats() if self._engine is None else self._engine.stats()

    def begin(self, config: TransformerConfig, pipeline_rank: int, weights: Iterable[Tensor] = ()) -> None:
        """A forward of a model with this TransformerConfig and these weights begins, on this pipeline rank.

        Raises:
            ConfigError: the configuration asks for what this engine does not do, or for something else than that of
                another model in this process.
        """
        knobs = _Knobs.of(config)
        if knobs == self._knobs:
            return
        if self._knobs is not None:
            mine, theirs = asdict(self._knobs), asdict(knobs)
            changed = [f"{name}: {mine[name]!r} and {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
            raise ConfigError("models of one process must offload alike. " + "; ".join(changed))
        if problems := [*_problems(config)]:
            raise ConfigError("\n".join(problems))
        options = self._options or OffloadOptions(host_memory_budget_bytes=host_memory_budget_bytes(0.5))
        options = replace(
            options,
            modules=options.modules or knobs.offload_modules,
            min_tensor_bytes=0,
            min_tensor_elements=knobs.min_offloaded_tensor_size,
            fraction=knobs.activation_offload_fraction,
            kept_bytes_per_step=knobs.delta_offload_bytes_across_pp_ranks * pipeline_rank,
            max_inflight_groups=knobs.fine_grained_offloading_max_inflight_offloads,
        )
        self._engine = build_engine(
            options, make_backend(), reduce_max_over_ranks=reduce_max_over_stage, steps_are_told=True
        )
        self._engine.exclude([*weights])  # which Megatron tells of once, in a model's first forward
        use_engine(self._engine, knobs.offload_modules)
        OffloadInterface.on_reset, OffloadInterface.on_reset_instance = self._end_step, self._begin_anew
        self._knobs = knobs
        self._totals, self.bytes_of_step, self._has_warned = {}, {}, False

    def _begin_anew(self) -> None:
        """The next model may offload otherwise."""
        if self._engine is not None:
            self._former.append(self._engine)
        self._close(self._former)
        self._knobs, self.bytes_of_step = None, {}
        use_engine(None)

    def _end_step(self) -> None:
        before, self._totals = self._totals, {name: each.bytes_out for name, each in self.stats().per_module.items()}
        self.bytes_of_step = {name: total - before.get(name, 0) for name, total in self._totals.items()}
        self._close(self._former)
        self._warn_of_idle()

    def _warn_of_idle(self) -> None:
        """After the first step with gradients: a listed module that these layers never told us of."""
        if self._has_warned or not OffloadInterface.opened:
            return
        self._has_warned = True
        for name in sorted(OffloadInterface.modules - OffloadInterface.opened):
            warnings.warn(f"offload_modules: '{name}' offloads nothing: {_IDLE}", stacklevel=2)

    def close(self) -> None:
        """Give the host memory back, unless a graph is alive whose backward may come; then the next call does."""
        self._close([*self._former, *([] if self._engine is None else [self._engine])])

    def _close(self, engines: Iterable[OffloadEngine]) -> None:
        for engine in engines:
            engine.stats()
            if not engine._slots:
                engine.close()
                self._former = [each for each in self._former if each is not engine]


class _State:
    installed: ClassVar[Installed | None] = None
    originals: ClassVar[dict[tuple[type, str], Any]] = {}


def install(options: OffloadOptions | None = None) -> Installed:
    """Put this engine in the place of Megatron-Core's, behind Megatron's own flags, in this process.

    Call it before the model is built. `fine_grained_activation_offloading` turns offloading on, `offload_modules` lists
    what is offloaded, and Megatron's other knobs of offloading are followed.

    Args:
        options: the budgets: `host_memory_budget_bytes`, `max_inflight_bytes`, and `gpu_memory_budget_bytes` with
            `modules="auto"`, which chooses among `offload_modules`. None: half of the node's free memory, divided by
            its ranks (`LOCAL_WORLD_SIZE`).

    Raises:
        ConfigError: this version of Megatron-Core is not known; an engine is installed already; an option that
            Megatron's configuration has is given here.
    """
    version = megatron.core.__version__.partition("+")[0]
    if version not in KNOWN_VERSIONS:
        raise ConfigError(
            f"megatron-core {version}: this engine was not tried in its layers. Known: {', '.join(KNOWN_VERSIONS)}."
        )
    if _State.installed is not None or OffloadInterface.engine is not None:
        raise ConfigError("an engine is installed in this process already. Call megatron_core.uninstall() first.")
    _check(options)
    _State.installed = Installed(options)
    use_engine(None)
    for module, name in _MODELS:
        model = getattr(importlib.import_module(module), name)
        _replace(model, _PREPROCESS, _telling(_State.installed, vars(model)[_PREPROCESS]))
    _replace(PipelineOffloadManager, "offload_summary_bytes", property(lambda _: dict(_bytes_of_step())))
    _replace(PipelineOffloadManager, "offload_summary_total_bytes", property(lambda _: sum(_bytes_of_step().values())))
    return _State.installed


def _replace(owner: type, name: str, value: Any) -> None:
    _State.originals[owner, name] = vars(owner)[name]
    setattr(owner, name, value)


def _bytes_of_step() -> dict[str, int]:
    assert _State.installed is not None
    return _State.installed.bytes_of_step


def installed() -> Installed | None:
    """What `install` returned, where somebody else has called it (a hook); None where nobody has."""
    return _State.installed


def uninstall() -> None:
    """Put Megatron-Core's own engine back, wherever it was bound; nothing where `install` was not called.

    A model that was built meanwhile offloads nothing afterwards: build it anew for Megatron's engine.
    """
    if _State.installed is None:
        return
    for (owner, name), original in _State.originals.items():
        setattr(owner, name, original)
    _State.originals.clear()
    restore_megatrons()
    _State.installed.close()
    _State.installed = None


def _telling(installed: Installed, original: Callable[[Any], None]) -> Callable[[Any], None]:
    examined: WeakSet[nn.Module] = WeakSet()

    @functools.wraps(original)
    def preprocess(model: GPTModel) -> None:
        if model not in examined:
            _check_layers(model)
            examined.add(model)
        installed.begin(model.config, model.pg_collection.pp.rank(), model.parameters())
        original(model)

    return preprocess


def _check(options: OffloadOptions | None) -> None:
    if options is None:
        return
    own = [
        f"{field.name}: Megatron's configuration says this. Set its {_MEGATRON_SAYS[field.name]} instead."
        for field in fields(options)
        if field.name in _MEGATRON_SAYS and getattr(options, field.name) != field.default
    ]
    if options.modules not in ("auto", ()):
        own.insert(0, "modules: Megatron's configuration says this. Set its offload_modules instead.")
    if own:
        raise ConfigError("\n".join(own))


def _problems(config: TransformerConfig) -> Iterator[str]:
    for name in config.offload_modules:
        if name not in NATIVE_MODULES:
            yield f"offload_modules: '{name}' is known to Megatron-Core's own engine alone. Remove it."
    if config.cuda_graph_impl == "full_iteration":
        yield "cuda_graph_impl: full_iteration cannot be captured with this engine. Set none."
    if config.recompute_granularity == "selective":
        for entry, names in discarded_by_recompute(config.multi_latent_attention).items():
            for name in names:
                if entry in config.recompute_modules and name in config.offload_modules:
                    yield f"recompute_modules: '{entry}' frees what '{name}' offloads. Remove one of the two."


def _check_layers(model: nn.Module) -> None:
    """A layer's recomputed MLP saves its norm's output, which is the norm's to free where it is a module of its own."""
    flags = ("recompute_pre_mlp_layernorm", "recompute_mlp", "offload_mlp_norm")
    if any(all(getattr(module, flag, False) for flag in flags) for module in model.modules()):
        raise ConfigError(
            "recompute_modules: 'layernorm' frees what 'mlp' saves and 'mlp_norm' offloads. Remove one of the three."
        )
