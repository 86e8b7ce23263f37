"""Ways to spend less device memory on one workload: this project's, and what else one would use.

A variant is entered for some steps and left again. Megatron-Core's own engine and this project's take turns in one
process by being bound, one at a time, where Megatron's modules look their offload interface up.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import HAS_GPU, Sample, pinned_bytes, settled_stats
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatrons_engine import bind_megatrons_engine, forget_megatrons_steps
from torch.autograd.graph import save_on_cpu
from workload import Workload

from nemo_rl_offload.adapters.megatron_core.interface import exclude_parameters, use_engine
from nemo_rl_offload.bench.variants import MODULE_SETS as TORCH_MODULE_SETS
from nemo_rl_offload.megatron.build.model import unwrap
from nemo_rl_offload.megatron.build.offload import install_offloading
from nemo_rl_offload.megatron.step.cuda_graphs import LayerGraphs
from nemo_rl_offload.offload.memory_budget import PLAN_EVERY
from nemo_rl_offload.specs.recompute import RECOMPUTE_KEYS

AUTO_SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Of the device memory that a step without offloading takes beside weights and optimizer state."""
RECOMPUTED_SHARES = (
    (0.0, 0.55),
    (0.0, 0.52),
    (0.33, 0.34),
    (0.42, 0.34),
    (0.5, 0.34),
    (0.67, 0.165),
    (0.75, 0.165),
    (0.83, 0.165),
    (0.9, 0.165),
    (1.0, 0.1),
)
"""Of the layers whose first linear is recomputed, beside the activation of all; and of the memory, as above."""
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
MODULE_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": TORCH_MODULE_SETS,
    "transformer_engine": {
        "core_attn": ("core_attn",),
        "attention": ATTENTION,
        "mlp": ("mlp_fc1", "mlp_act"),
        "all": (*ATTENTION, "mlp_fc1", "mlp_act"),
    },
}
SELECTIVE = "recompute_granularity=selective"
FULL = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
NUM_STEPS = 3
"""Steps timed in a row, in each round."""

Probe = Callable[[], Sample]
"""Totals so far of whatever is in force; empty where nothing counts."""


@dataclass(frozen=True)
class Variant:
    """`enter` puts it in force for a workload until the context is left."""

    name: str
    kind: str
    """nothing | ours | graphs | recompute | hooks (every saved tensor moves) | megatron | transformer_engine."""
    enter: Callable[[Workload], AbstractContextManager[Probe]]
    offload_modules: tuple[str, ...] | str = ()
    recompute: str | None = None
    """full, or the entry of `recompute_modules`."""
    keys: Mapping[str, Any] | None = None
    """Of `policy.megatron_cfg`, where `plan` chose them."""
    num_warmup: int = 3
    num_steps: int = NUM_STEPS

    def entry(self) -> dict[str, Any]:
        """What a result says of it, before anything is measured."""
        about = {key: getattr(self, key) for key in ("name", "kind", "offload_modules", "recompute", "keys")}
        return {**about, "bit_identical": None, "check_error": None, "error": None, "samples": []}


@contextmanager
def _tree(workload: Workload, overrides: Sequence[str]) -> Iterator[Probe]:
    workload.use_tree(*overrides)
    yield dict


@contextmanager
def _graphs(workload: Workload, parts: Sequence[str]) -> Iterator[Probe]:
    overrides = ("cuda_graph_impl=transformer_engine", "cuda_graph_warmup_steps=1")
    listed = f"cuda_graph_modules={_listed(parts) if parts else 'null'}"
    model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    workload.use_tree(*overrides, listed)
    graphs = LayerGraphs(workload.model.chunks, workload.model.config)
    workload.model.graphs = graphs
    try:
        yield dict
        assert graphs.metrics()["cuda_graph_microbatches"] > 0, "nothing was replayed"
    finally:
        workload.model.graphs = None
        graphs.clear()


def _listed(value: Any) -> str:
    """A value as an override says it."""
    return str(value) if isinstance(value, str | int) else f"[{','.join(value)}]"


@contextmanager
def _ours(
    workload: Workload, modules: Sequence[str] | str, budget: str | None = None, recompute: Sequence[str] = ()
) -> Iterator[Probe]:
    overrides = ("fine_grained_activation_offloading=true", f"offload_modules={_listed(modules)}", *recompute)
    budgets = () if budget is None else (f"activation_offload.gpu_memory_budget={budget}",)
    engine = install_offloading(workload.policy(*overrides, *budgets))
    assert engine is not None
    try:
        workload.use_tree(*overrides)
        exclude_parameters(engine, workload.model.modules)

        def probe() -> Sample:
            stats = settled_stats(engine)
            return {
                "bytes_out": stats.bytes_out,
                "bytes_in": stats.bytes_in,
                "kept": stats.kept_bytes,
                "denied": stats.denied_bytes,
                "ineffective": stats.ineffective_bytes,
                "copy_ms": stats.copy_ms,
                "stall_in_ms": stats.stall_in_ms,
                "stall_out_ms": stats.stall_out_ms,
                "peak_host_bytes": stats.peak_host_bytes,
                "host_capacity_bytes": stats.host_capacity_bytes,
            }

        yield probe
    finally:
        use_engine(None)
        engine.close()


@contextmanager
def _hooks(
    workload: Workload, make: Callable[[Any], AbstractContextManager[Any]], step_bytes: int, host_bytes: int
) -> Iterator[Probe]:
    """Everything saved moves to pinned blocks, which torch rounds up to powers of two."""
    if 2 * step_bytes > host_bytes:
        raise RuntimeError(f"up to {2 * step_bytes >> 30} GiB of host memory for {host_bytes >> 30} GiB")
    workload.use_tree("recompute_granularity=null")
    with make(unwrap(workload.model.chunks[0])):
        yield dict


def _save_on_cpu(model: Any) -> AbstractContextManager[Any]:
    return save_on_cpu(pin_memory=HAS_GPU)


@contextmanager
def _trl(model: Any) -> Iterator[None]:
    """As `get_act_offloading_ctx_manager` does for heads that it knows: the output layer's tensors stay."""
    trl = importlib.import_module("trl.models.activation_offloading")
    context, head = trl.OffloadActivations(), trl.NoOpManager()
    context.update_model_params(model)
    hooks = [
        model.output_layer.register_forward_pre_hook(lambda *_: head.__enter__()),
        model.output_layer.register_forward_hook(lambda *_: head.__exit__(), always_call=True),
    ]
    try:
        with context:
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _megatron(workload: Workload, modules: Sequence[str]) -> Iterator[Probe]:
    bind_megatrons_engine()
    try:
        forget_megatrons_steps()
        listed = f"offload_modules=[{','.join(modules)}]"
        workload.use_tree("fine_grained_activation_offloading=true", listed, "activation_offload.engine=megatron")
        before = pinned_bytes()
        yield lambda: {"host_capacity_bytes": pinned_bytes() - before}
    finally:
        forget_megatrons_steps()
        use_engine(None)


def nothing() -> Variant:
    """Neither offloading nor recomputation."""
    return Variant("nothing", "nothing", partial(_tree, overrides=("recompute_granularity=null",)))


def plain_rotation() -> Variant:
    """`nothing`, with positions rotated by torch's operations instead of Transformer Engine's kernel."""
    overrides = ("recompute_granularity=null", "apply_rope_fusion=false")
    return Variant("nothing: rotation by torch", "nothing", partial(_tree, overrides=overrides))


def ours(name: str, modules: Sequence[str]) -> Variant:
    """This project's engine with listed modules."""
    return Variant(f"ours: {name}", "ours", partial(_ours, modules=modules), tuple(modules))


def ours_auto(share: float, budget_bytes: int, num_recomputed: int | None = None) -> Variant:
    """This project's engine, which chooses for a budget. With `num_recomputed`, MLPs recompute their activation, and
    those of so many layers what comes before it."""
    name, recompute = f"ours: auto {share:.0%}", None
    overrides: tuple[str, ...] = ()
    if num_recomputed is not None:
        recompute = "mlp_fc1" if num_recomputed else "mlp_act"
        counted = ("recompute_modules=[mlp_act,mlp_fc1]", f"recompute_num_layers={num_recomputed}")
        overrides = (SELECTIVE, *(counted if num_recomputed else ("recompute_modules=[mlp_act]",)))
        name += f", fc1 of {num_recomputed} recomputed" if num_recomputed else ", activation recomputed"
    budget = f"{budget_bytes / 2**20:.3f}MiB"
    enter = partial(_ours, modules="auto", budget=budget, recompute=overrides)
    return Variant(name, "ours", enter, "auto", recompute, num_warmup=PLAN_EVERY)


def ours_with_recompute() -> Variant:
    """Whole layers are recomputed, and their inputs wait on the host."""
    modules = ("attn_norm",)
    return Variant("ours: full recompute", "ours", partial(_ours, modules=modules, recompute=FULL), modules, "full")


def ours_beside_recomputed_fc1(impl: str) -> Variant:
    """MLPs are recomputed but for their last linear; their inputs and attention's tensors wait on the host."""
    modules = (*ATTENTION, "mlp_norm" if impl == "torch" else "mlp_fc1")
    enter = partial(_ours, modules=modules, recompute=(SELECTIVE, "recompute_modules=[mlp_fc1]"))
    return Variant("ours: attention, recomputed fc1", "ours", enter, modules, "mlp_fc1")


def ours_planned(name: str, keys: Mapping[str, Any]) -> Variant:
    """What `plan` chose, as its keys of `policy.megatron_cfg` say it."""
    modules = keys["offload_modules"]
    recompute = [
        f"{key}={_listed(value)}" for key, value in keys.items() if key in RECOMPUTE_KEYS and value is not None
    ]
    budget = keys.get("activation_offload", {}).get("gpu_memory_budget")
    enter = partial(_ours, modules=modules, budget=budget, recompute=recompute)
    num_warmup = PLAN_EVERY if modules == "auto" else 3
    return Variant(name, "ours", enter, modules, keys=keys, num_warmup=num_warmup)


def graphs(parts: Sequence[str] = ()) -> Variant:
    """CUDA graphs of whole layers, or of parts of them, which Transformer Engine's layers alone have."""
    name = f"graphs: {', '.join(parts)}" if parts else "graphs"
    return Variant(name, "graphs", partial(_graphs, parts=parts))


def full_recompute() -> Variant:
    """Each layer saves its input alone."""
    return Variant("recompute: full", "recompute", partial(_tree, overrides=FULL), recompute="full")


def megatron(name: str, modules: Sequence[str]) -> Variant:
    """Megatron-Core's own engine."""
    return Variant(f"megatron: {name}", "megatron", partial(_megatron, modules=modules), tuple(modules))


def every_variant(workload: Workload, static_bytes: int, peak_bytes: int, host_bytes: int) -> list[Variant]:
    """What this workload can be compared with. `peak_bytes` is without anything, `static_bytes` between steps;
    `host_bytes` is what saved tensors may take on the host."""
    shape, step_bytes = workload.shape, peak_bytes - static_bytes
    sets = MODULE_SETS[shape.transformer_impl]
    found = [nothing(), *(ours(name, modules) for name, modules in sets.items())]
    found += [ours_auto(share, static_bytes + round(step_bytes * share)) for share in AUTO_SHARES]
    mixtures = dict.fromkeys((share, round(shape.num_layers * layers)) for layers, share in RECOMPUTED_SHARES)
    found += [ours_auto(share, static_bytes + round(step_bytes * share), number) for share, number in mixtures]
    found += [ours_with_recompute(), ours_beside_recomputed_fc1(shape.transformer_impl), full_recompute()]
    for name in ("core_attn", "mlp"):
        overrides = (SELECTIVE, f"recompute_modules=[{name}]")
        found.append(Variant(f"recompute: {name}", "recompute", partial(_tree, overrides=overrides), recompute=name))
    for name, make in (("save_on_cpu", _save_on_cpu), ("TRL OffloadActivations", _trl)):
        enter = partial(_hooks, make=make, step_bytes=step_bytes, host_bytes=host_bytes)
        found.append(Variant(name, "hooks", enter, num_warmup=1, num_steps=2))
    if shape.transformer_impl == "transformer_engine":
        found += [megatron(name, sets[name]) for name in ("core_attn", "attention")]
        for number in sorted({max(1, shape.num_layers // 2), shape.num_layers - 1}):
            overrides = ("cpu_offloading=true", f"cpu_offloading_num_layers={number}")
            enter = partial(_tree, overrides=overrides)
            found.append(Variant(f"Transformer Engine: {number} layers", "transformer_engine", enter))
    return found


def attempt(run: Callable[[], None]) -> str | None:
    """Run others' code, which may fail, or run out of memory: a result too. Returns the error's first line."""
    try:
        run()
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None
