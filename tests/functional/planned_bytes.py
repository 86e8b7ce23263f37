"""Random small configurations, and the bytes per module that the planner's table of plain operators gives for them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from torch_activations import (
    torch_layer,
    torch_mtp_layer,
    torch_recomputed_layers,
    with_received_input,
)

from nemo_rl_offload.planner.cost.storages import LayerContext, Numbers, Storage, Tokens
from nemo_rl_offload.planner.job import Recompute
from nemo_rl_offload.planner.simulate.pipeline_schedule import pipeline_schedule
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.model_shape import ModelShape
from nemo_rl_offload.specs.offload_modules import (
    DENSE_MLP_MODULES,
    DISCARDED_BY_RECOMPUTE,
    MOE_MODULES,
    SUPPORTED_MODULES,
)
from nemo_rl_offload.specs.parallel_layout import ParallelLayout, stage_layers

MICRO_BATCH_SIZE = 2
_DENSE = ("core_attn", "mlp", "mlp_fc1", "mlp_act", "layernorm")
_LATENT = ("core_attn", "mlp", "mlp_fc1", "mlp_act", "layernorm", "moe_act", "moe", "mla_up_proj", "shared_experts")
_EXPERTS = ("core_attn", "layernorm", "moe_act", "moe", "shared_experts")
_HYBRID = ("core_attn", "mlp", "mlp_fc1", "mlp_act", "layernorm", "moe_act", "moe", "shared_experts")
SELECTIVE = {
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "llama": _DENSE,
    "gemma3_text": _DENSE,
    "qwen3_moe": ("core_attn", "layernorm", "moe_act", "moe"),
    "deepseek_v3": _LATENT,
    "deepseek_v3_mtp": _LATENT,
    "nemotron_h": _HYBRID,
    "nemotron_h_mtp": _HYBRID,
    "qwen3_5_text": _DENSE[:-1],
    "qwen3_5_moe_text": _EXPERTS,
}
_WITH_EXPERTS = ("qwen3_moe", "deepseek_v3", "deepseek_v3_mtp", "nemotron_h_mtp", "qwen3_5_moe_text")
LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(2, tensor=2),
    "tp2-sp": ParallelLayout(2, tensor=2, sequence_parallel=True),
    "tp2-sp-etp2": ParallelLayout(2, tensor=2, expert_tensor=2, sequence_parallel=True),
    "pp2": ParallelLayout(2, pipeline=2),
    "pp2-vpp2": ParallelLayout(2, pipeline=2, virtual=2),
    "pp2-vpp2-tp2-sp": ParallelLayout(4, pipeline=2, virtual=2, tensor=2, sequence_parallel=True),
}


@dataclass
class Case:
    """A random small configuration."""

    family: str
    shape: dict[str, Any]
    modules: tuple[str, ...]
    recompute: tuple[str, ...] | str | None
    """Modules of selective recomputation, or the method of full recomputation."""
    element_bytes: int
    router_bytes: int
    min_elements: int
    num_microbatches: int
    sequence: int
    num_counted_layers: int | None = None
    """Dense layers of each chunk that recompute mlp or mlp_fc1."""
    layout: ParallelLayout = field(default_factory=ParallelLayout)

    def overrides(self) -> Iterator[str]:
        """For `make_policy`."""
        yield "fine_grained_activation_offloading=true"
        yield f"offload_modules=[{','.join(self.modules)}]"
        yield f".precision={'float32' if self.element_bytes == 4 else 'bfloat16'}"
        yield f"min_offloaded_tensor_size={self.min_elements}"
        if self.router_bytes == 4:
            yield "moe_router_dtype=fp32"
        if isinstance(self.recompute, tuple):
            yield "recompute_granularity=selective"
            yield f"recompute_modules=[{','.join(self.recompute)}]"
            yield f"recompute_num_layers={self.num_counted_layers or 'null'}"
        elif self.recompute is not None:
            yield "recompute_granularity=full"
            yield f"recompute_method={self.recompute}"
            yield "recompute_num_layers=1"
        layout = self.layout
        yield f"tensor_model_parallel_size={layout.tensor}"
        yield f"expert_tensor_parallel_size={layout.expert_tensor}"
        yield f"sequence_parallel={str(layout.sequence_parallel).lower()}"
        yield f"pipeline_model_parallel_size={layout.pipeline}"
        if layout.virtual > 1:
            yield f"virtual_pipeline_model_parallel_size={layout.virtual}"
            yield "overlap_p2p_comm=true"
            yield "batch_p2p_comm=false"


def random_case(seed: int, layout: str = "one") -> Case:
    """Every family is among the first seeds."""
    random, ranks = Random(f"{layout} {seed}"), LAYOUTS[layout]
    families = list(SELECTIVE)
    family = families[seed % len(families)]
    if ranks.expert_tensor > 1:
        family = _WITH_EXPERTS[seed % len(_WITH_EXPERTS)]
    if ranks.tensor > 1 and not ranks.sequence_parallel:
        # Megatron's experts need sequence parallelism beside tensor parallelism.
        family = ("qwen2", "qwen3", "llama", "qwen3_5_text")[seed % 4]
    recompute = _random_recompute(random, family)
    is_counted = isinstance(recompute, tuple) and not {"mlp", "mlp_fc1"}.isdisjoint(recompute)
    element_bytes = random.choice([2, 4])
    return Case(
        family,
        _random_shape(random, family, ranks),
        _random_modules(random, family, recompute if isinstance(recompute, tuple) else ()),
        recompute,
        element_bytes,
        router_bytes=4 if family.startswith(("deepseek", "nemotron")) else random.choice([element_bytes, 4]),
        min_elements=random.choice([0, 0, 700]),
        num_microbatches=random.choice([2, 4, 6]) if ranks.pipeline > 1 else random.randint(1, 3),
        sequence=_random_sequence(random, family, is_even=ranks.tensor > 1),
        num_counted_layers=random.choice([None, 1, 2]) if is_counted else None,
        layout=ranks,
    )


def _random_sequence(random: Random, family: str, is_even: bool) -> int:
    """Of delta nets sometimes several chunks."""
    if family.startswith("qwen3_5") and random.random() < 0.5:
        return 2 * random.randint(35, 75)
    return 2 * random.randint(3, 12) if is_even else random.randint(5, 24)


def _random_shape(random: Random, family: str, layout: ParallelLayout) -> dict[str, Any]:
    groups = random.choice([1, 2, 4]) * layout.tensor
    shape: dict[str, Any] = {
        "hidden_size": 16 * random.randint(2, 5),
        "intermediate_size": 8 * random.randint(4, 15),
        "num_hidden_layers": random.randint(1, 3) if layout.pipeline == 1 else random.choice([4, 8]),
        "num_attention_heads": groups * random.choice([1, 2, 3]),
        "num_key_value_heads": groups,
        "head_dim": 8 * random.randint(1, 4),
    }
    if family in ("qwen2", "llama"):
        shape["hidden_size"] = shape.pop("head_dim") * shape["num_attention_heads"]
    if family == "gemma3_text":  # without masks of windows, which plain operators save
        shape |= {"hidden_size": 16 * shape["num_attention_heads"], "sliding_window_pattern": 1}
    experts = {
        "num_experts": random.choice([3, 4, 6]),
        "num_experts_per_tok": random.choice([2, 3]),
        "moe_intermediate_size": 8 * layout.expert_tensor * random.randint(2, 8),
    }
    if family == "qwen3_moe":
        shape |= experts
    if family.startswith("nemotron_h"):
        shape |= _random_hybrid(random, layout, shape["num_hidden_layers"]) | experts
        shape["n_routed_experts"] = shape.pop("num_experts")
    if family.startswith("qwen3_5"):
        shape |= _random_delta_net(random, layout)
    if family == "qwen3_5_moe_text":
        shape |= experts | {"shared_expert_intermediate_size": 8 * random.randint(2, 6)}
    if family.startswith("deepseek"):
        del shape["head_dim"]
        nope, rope = random.choice([(16, 8), (8, 8), (24, 16)])
        shape |= experts | {
            "n_routed_experts": experts.pop("num_experts"),
            "num_key_value_heads": shape["num_attention_heads"],
            "q_lora_rank": random.choice([None, 24, 40]),
            "kv_lora_rank": random.choice([12, 32]),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": random.choice([12, nope + rope]),
            "first_k_dense_replace": random.randint(0, 1),
            "n_shared_experts": random.choice([1, 2]),
        }
    return shape


def _random_hybrid(random: Random, layout: ParallelLayout, num_layers: int) -> dict[str, Any]:
    """Every kind of layer is there, which a layer for further tokens copies. A rank has several heads: of one alone
    less is copied than the planner says."""
    num_layers = max(4, num_layers)
    letters = [*"M*E-", *random.choices("MMM*E-", k=num_layers - 4)]
    random.shuffle(letters)
    groups = layout.tensor * random.choice([1, 2])
    return {
        "num_hidden_layers": num_layers,
        "hybrid_override_pattern": "".join(letters),
        "mamba_num_heads": groups * random.choice([2, 3]),
        "mamba_head_dim": random.choice([5, 8]),
        "n_groups": groups,
        "ssm_state_size": random.choice([7, 16]),
        "chunk_size": random.choice([4, 8, 32]),
        "conv_kernel": random.choice([2, 4]),
        "moe_shared_expert_intermediate_size": 8 * random.randint(2, 6),
    }


def _random_delta_net(random: Random, layout: ParallelLayout) -> dict[str, Any]:
    key_heads = layout.tensor * random.choice([1, 2])
    return {
        "full_attention_interval": random.choice([2, 3]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * random.choice([2, 3]),
        "linear_key_head_dim": random.choice([6, 8]),
        "linear_value_head_dim": random.choice([5, 8]),
        "linear_conv_kernel_dim": random.choice([2, 4]),
    }


def _random_recompute(random: Random, family: str) -> tuple[str, ...] | str | None:
    chosen = tuple(name for name in SELECTIVE[family] if random.random() < 0.4) or None
    if chosen and "mla_up_proj" in chosen:
        chosen = tuple(name for name in chosen if name != "layernorm")  # with both, qkv_linear cannot be listed
    if chosen and "mlp" in chosen:
        chosen = tuple(name for name in chosen if name != "mlp_fc1")
    if chosen and "moe" in chosen:
        chosen = tuple(name for name in chosen if name not in ("moe_act", "shared_experts"))
    return random.choices([None, chosen, "uniform", "block"], [3, 7, 1, 1])[0]


def _random_modules(random: Random, family: str, recompute: tuple[str, ...]) -> tuple[str, ...]:
    is_latent = family.startswith("deepseek")
    absent = {
        "qwen3_moe": (*DENSE_MLP_MODULES, "shared_experts"),
        "qwen3_5_moe_text": DENSE_MLP_MODULES,
        "nemotron_h": (),
        "nemotron_h_mtp": (),
    }.get(family, () if is_latent else MOE_MODULES)
    modules = {name for name in SUPPORTED_MODULES if name not in absent and random.random() < 0.8}
    modules -= {
        name
        for part in recompute
        for name in DISCARDED_BY_RECOMPUTE.get(part, ())
        if is_latent or name not in ("qkv_linear", "core_attn")
    }
    if "moe" in recompute:
        modules -= set(MOE_MODULES)
    if "core_attn" not in modules:
        modules -= {"attn_proj"}
    return tuple(name for name in SUPPORTED_MODULES if name in modules) or ("attn_norm",)


def predict(case: Case, folder: Path, rank: int = 0) -> dict[str, int]:
    """Bytes per module over all microbatches of a step, on one pipeline rank."""
    shape = load_model_shape(str(folder), folder)
    tokens = Tokens(MICRO_BATCH_SIZE * case.sequence, case.sequence)
    numbers = Numbers(case.element_bytes, router_bytes=case.router_bytes)
    context = LayerContext(shape, case.layout, tokens, numbers)
    passes = pipeline_schedule(case.layout.pipeline, case.num_microbatches, case.layout.virtual)[rank]
    found: Counter[str] = Counter()
    for number, layers in enumerate(stage_layers(case.layout, shape.num_layers)[rank]):
        # What a copy did not free is known, and left alone, when backward first comes to a pass of this chunk.
        num_tries = [each.forward for each in passes if each.chunk == number].index(False)
        for storage in _chunk(case, context, shape, layers, is_received=rank > 0 or number > 0):
            module = storage.charged_to(case.modules, case.min_elements)
            if module is not None and storage.num_bytes:
                num_useless = 1 if storage.constant else num_tries
                num_copies = case.num_microbatches if storage.leaves(case.modules) else num_useless
                found[module] += storage.num_bytes * num_copies
    return dict(found)


def _chunk(case: Case, context: LayerContext, shape: ModelShape, layers: range, is_received: bool) -> Iterator[Storage]:
    selective = frozenset(case.recompute if isinstance(case.recompute, tuple) else ())
    recompute = Recompute(selective, num_counted_layers=case.num_counted_layers)
    kinds = shape.all_kinds
    end = len(kinds) if layers.stop == shape.num_layers else layers.stop
    dense = [layer for layer in range(layers.start, end) if kinds[layer].mlp == "dense"]
    counted = dense
    if case.num_counted_layers is not None:
        num_spared = max(0, len(dense) - case.num_counted_layers)
        if num_spared and layers.stop == shape.num_layers and kinds[-1].mlp == "dense":
            counted = dense[num_spared - 1 : -1]
        else:
            counted = dense[num_spared:]
    for number, layer in enumerate(layers):
        if case.recompute == "uniform" or (case.recompute == "block" and number == 0):
            storages = torch_recomputed_layers(context)
        else:
            storages = torch_layer(context, kinds[layer], recompute.of_layer(layer in counted))
        if number == 0 and is_received:
            storages = [with_received_input(storages[0], context), *storages[1:]]
        yield from storages
    if layers.stop == shape.num_layers:
        for layer in range(shape.num_layers, len(kinds)):
            is_first = (layer - shape.num_layers) % len(shape.mtp_kinds) == 0
            if case.recompute != "uniform":
                modules = recompute.of_layer(layer in counted)
                yield from torch_mtp_layer(context, kinds[layer], modules, is_first=is_first)
            elif is_first:
                yield from torch_recomputed_layers(context, is_mtp=True)
