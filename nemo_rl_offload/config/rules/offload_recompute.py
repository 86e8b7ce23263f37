"""Rules about offloading beside recomputation: what a recomputed module saves, and whether that stays where it is."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import (
    MEGATRON,
    Get,
    Rule,
    is_native,
    megatron,
    model_shape,
    offloaded,
    recompute,
    recomputed,
)
from nemo_rl_offload.specs.offload_modules import (
    COUNTED_RECOMPUTE,
    DENSE_MLP_MODULES,
    MOE_MODULES,
    discarded_by_recompute,
)

PATH = f"{MEGATRON}.offload_modules"


def _experts(get: Get) -> Iterator[str]:
    if "moe" not in recomputed(get):
        return
    for name in offloaded(get):
        if name in MOE_MODULES:
            yield f"{PATH}: '{name}' saves nothing while recompute_modules has 'moe'. Remove one of the two."


def _discarded(get: Get) -> Iterator[str]:
    names, covered = offloaded(get), recomputed(get)
    for part, modules in discarded_by_recompute(model_shape(get).has_latent_attention).items():
        for name in modules:
            if part in covered and name in names:
                yield f"{PATH}: '{name}' saves what recompute_modules '{part}' discards. Remove one of the two."


OFFLOAD_RECOMPUTE_RULES: tuple[Rule, ...] = (_experts, _discarded)


def _in_whole_layers(get: Get) -> Iterator[str]:
    settings = recompute(get)
    if settings["recompute_granularity"] != "full" or not is_native(get):
        return
    if settings["recompute_method"] == "block":
        ranks = megatron(get, "pipeline_model_parallel_size")
        layers = len(model_shape(get).layers_with_experts)
        num_layers = settings["recompute_num_layers"]
        if num_layers is None or num_layers * ranks < layers:
            return  # the other layers save as usual
    for name in offloaded(get):
        if name != "attn_norm":
            yield (
                f"{PATH}: '{name}' saves nothing: with recompute_granularity full, a layer saves its input alone, "
                "which is offloaded as attn_norm."
            )


def _in_modules(get: Get) -> Iterator[str]:
    names, covered = offloaded(get), recomputed(get)
    is_torch = megatron(get, "transformer_impl") == "torch"
    nothing_from: dict[str, tuple[str, ...]] = {
        "core_attn": ("core_attn",),
        "shared_experts": ("shared_experts",),
    }
    if recompute(get)["recompute_num_layers"] is None:
        of_mlp = DENSE_MLP_MODULES if is_torch else ("mlp_act",)  # the input is mlp_norm's, or mlp_fc1's
        nothing_from.update(dict.fromkeys(COUNTED_RECOMPUTE, of_mlp))
    for part, silent in nothing_from.items():
        for name in names:
            if part in covered and name in silent:
                yield f"{PATH}: '{name}' saves nothing while recompute_modules has '{part}'."


OFFLOAD_RECOMPUTE_WARNINGS: tuple[Rule, ...] = (_in_whole_layers, _in_modules)
