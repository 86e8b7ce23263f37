"""Rules about recomputing parts of dense MLPs, which this project does itself."""

from collections.abc import Iterator

from nemo_rl_offload.config.rules.rule import MEGATRON, Get, Rule, is_native, megatron, recompute, recomputed
from nemo_rl_offload.specs.offload_modules import COUNTED_RECOMPUTE, DENSE_MLP_RECOMPUTE

PATH = f"{MEGATRON}.recompute_modules"


def _elsewhere(get: Get) -> Iterator[str]:
    names = [name for name in recomputed(get) if name in DENSE_MLP_RECOMPUTE]
    if not names:
        return
    if megatron(get, "fine_grained_activation_offloading") and not is_native(get):
        yield f"{PATH}: '{names[0]}' needs activation_offload.engine native. Set that, or remove it."
    if megatron(get, "use_transformer_engine_op_fuser"):
        yield f"{PATH}: '{names[0]}' cannot be recomputed with use_transformer_engine_op_fuser. Change one of the two."
    if megatron(get, "model_overrides").get("fp8"):
        yield f"{PATH}: '{names[0]}' cannot be recomputed with fp8 in model_overrides. Remove one of the two."


def _same_twice(get: Get) -> Iterator[str]:
    if set(COUNTED_RECOMPUTE) <= set(recomputed(get)):
        yield f"{PATH}: 'mlp' contains 'mlp_fc1'. Remove one of the two."


MLP_RECOMPUTE_RULES: tuple[Rule, ...] = (_elsewhere, _same_twice)


def _covered(get: Get) -> Iterator[str]:
    names = recomputed(get)
    whole = next((name for name in COUNTED_RECOMPUTE if name in names), None)
    if whole and "mlp_act" in names and recompute(get)["recompute_num_layers"] is None:
        yield (
            f"{PATH}: 'mlp_act' changes nothing: '{whole}' contains it and covers all layers. Set recompute_num_layers "
            f"to the number of layers that '{whole}' is for, or remove one of the two."
        )


MLP_RECOMPUTE_WARNINGS: tuple[Rule, ...] = (_covered,)
