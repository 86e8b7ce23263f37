from dataclasses import replace

import pytest
from jobs import make_job
from torch_activations import torch_layer

from nemo_rl_offload.planner.cost.activations import fused_layer, with_recomputation
from nemo_rl_offload.planner.cost.storages import LayerContext, Numbers, Storage
from nemo_rl_offload.specs.catalogue import load_model_shape
from nemo_rl_offload.specs.model_shape import DENSE_LAYER, MOE_LAYER
from nemo_rl_offload.specs.offload_modules import SUPPORTED_MODULES
from nemo_rl_offload.specs.parallel_layout import ParallelLayout

MIB = 1 << 20


def charged(storages: list[Storage], modules: tuple[str, ...] = SUPPORTED_MODULES, least: int = 0) -> dict[str, int]:
    found: dict[str, int] = {}
    for storage in storages:
        module = storage.charged_to(modules, least) or "stays"
        found[module] = found.get(module, 0) + storage.num_bytes
    return found


def context_of(name: str, **layout: int | bool) -> LayerContext:
    return replace(make_job(name).context, layout=ParallelLayout(**layout))  # type: ignore[arg-type]


def test_deepseek_layer_of_the_published_run() -> None:
    """4096 tokens, hidden 7168, 8 experts of 2048 per token, 128 heads of 192 and 128; bfloat16."""
    saved = charged(fused_layer(context_of("deepseek-ai/DeepSeek-V3", world=16, expert=16), MOE_LAYER))
    assert saved["attn_norm"] == saved["mlp_norm"] == 4096 * 7168 * 2
    assert saved["expert_fc1"] == 4096 * 8 * 7168 * 2
    assert saved["moe_act"] == 4096 * 8 * 2 * 2048 * 2
    assert saved["core_attn"] == 4096 * 128 * ((192 + 192 + 128) * 2 + 4)
    assert saved["attn_proj"] == 4096 * 128 * 128 * 2
    assert saved["qkv_linear"] == 4096 * (7168 + 1536 + 1536 + 512 + 64 + 512) * 2
    router, norm = 2 * 4096 * 256 * 4, 4096 * 7168 * 2
    assert saved["expert_fc2"] == 4096 * 8 * 2048 * 2
    assert saved["shared_experts"] == 4096 * 3 * 2048 * 2
    assert saved["stays"] == router + norm


def test_dense_layer_with_grouped_queries() -> None:
    """Qwen2.5-7B: hidden 3584, 28 query and 4 key heads of 128, MLP 18944. Values hold the whole projection."""
    saved = charged(fused_layer(context_of("Qwen/Qwen2.5-7B", world=1), DENSE_LAYER))
    tokens = 4096
    assert saved == {
        "attn_norm": tokens * 3584 * 2,
        "qkv_linear": tokens * 3584 * 2,
        "core_attn": tokens * ((28 + 8) * 128 * 2 + (28 + 4) * 128 * 2 + 28 * 4),
        "attn_proj": tokens * 28 * 128 * 2,
        "mlp_norm": tokens * 3584 * 2,
        "mlp_fc1": tokens * 3584 * 2,
        "mlp_act": tokens * 2 * 18944 * 2,
        "stays": tokens * 18944 * 2,
    }


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_what_is_not_listed_stays_and_nothing_is_lost(name: str) -> None:
    context, kind = context_of(name, world=1), load_model_shape(name, None).layer_kinds[-1]
    storages = fused_layer(context, kind)
    total = sum(storage.num_bytes for storage in storages)
    for modules in ((), ("core_attn",), ("qkv_linear", "mlp_norm"), SUPPORTED_MODULES):
        assert sum(charged(storages, modules).values()) == total
    assert charged(storages, ("core_attn",))["core_attn"] == charged(storages)["core_attn"]
    outputs = [storage.name for storage in storages if not storage.leaves(("core_attn",))]
    assert outputs == ([] if context.shape.latent_attention else ["projected queries, keys, values"])


def test_of_one_group_queries_are_a_view_of_the_projection() -> None:
    context = context_of("Qwen/Qwen3-8B", world=1)
    one = replace(context, shape=replace(context.shape, num_key_value_heads=1))
    copied = "queries before their norm"
    assert copied in [storage.name for storage in fused_layer(context, DENSE_LAYER)]
    assert copied not in [storage.name for storage in fused_layer(one, DENSE_LAYER)]


def test_the_region_of_the_projection_is_around_the_norm() -> None:
    storages = fused_layer(context_of("Qwen/Qwen2.5-7B", world=1), DENSE_LAYER)
    assert charged(storages, ("qkv_linear",))["qkv_linear"] == 2 * 4096 * 3584 * 2


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3"])
def test_tensor_and_sequence_parallelism_divide_a_layer(name: str) -> None:
    kind = load_model_shape(name, None).layer_kinds[-1]
    whole = fused_layer(context_of(name, world=4), kind)
    parts = fused_layer(context_of(name, world=4, tensor=4, sequence_parallel=True), kind)
    assert [storage.num_bytes for storage in parts] == [storage.num_bytes / 4 for storage in whole]


def test_without_sequence_parallelism_norms_stay_whole() -> None:
    saved = charged(fused_layer(context_of("Qwen/Qwen2.5-7B", world=2, tensor=2), DENSE_LAYER))
    whole = charged(fused_layer(context_of("Qwen/Qwen2.5-7B", world=1), DENSE_LAYER))
    assert saved["attn_norm"] == whole["attn_norm"]
    assert saved["mlp_fc1"] == whole["mlp_fc1"]
    assert saved["mlp_act"] == whole["mlp_act"] // 2
    assert saved["attn_proj"] == whole["attn_proj"] // 2


def test_context_parallelism_divides_tokens_and_experts_do_not_matter() -> None:
    job = make_job("Qwen/Qwen3-30B-A3B", layout=ParallelLayout(8, context=2))
    assert job.context.tokens.count == 2048
    one = fused_layer(context_of("Qwen/Qwen3-30B-A3B", world=8), MOE_LAYER)
    assert fused_layer(context_of("Qwen/Qwen3-30B-A3B", world=8, expert=8), MOE_LAYER) == one


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-8B"])
def test_plain_torch_keeps_the_keys_of_all_context_parallel_ranks(model: str) -> None:
    """As the engine counts them on two ranks, but for a mask of each chunk."""
    whole = context_of(model, world=1)
    split = replace(
        whole, layout=ParallelLayout(2, context=2), tokens=replace(whole.tokens, count=whole.tokens.count // 2)
    )
    shape, count, size = whole.shape, split.tokens.count, whole.numbers.element_bytes
    queries, keys = (
        num * shape.head_dim * size
        for num in (count * shape.num_attention_heads, 2 * count * shape.num_key_value_heads)
    )
    in_torch = charged(fused_layer(split, DENSE_LAYER))
    assert in_torch["core_attn"] == 2 * queries + 2 * keys + 4 * count * shape.num_attention_heads
    of_engine = charged(fused_layer(replace(split, fused_norm_linear=True), DENSE_LAYER))
    alone = charged(fused_layer(replace(whole, fused_norm_linear=True), DENSE_LAYER))
    assert {name: 2 * size for name, size in of_engine.items()} == alone


@pytest.mark.parametrize(("fp8", "size"), [("tensorwise", 1.0), ("mxfp8", 33 / 32), ("blockwise", 132 / 128)])
def test_eight_bit_linears_keep_eight_bit_inputs(fp8: str, size: float) -> None:
    context = context_of("Qwen/Qwen3-30B-A3B", world=8)
    wide = charged(fused_layer(context, MOE_LAYER))
    narrow = charged(fused_layer(replace(context, numbers=Numbers(2, fp8)), MOE_LAYER))
    assert narrow["expert_fc1"] == wide["expert_fc1"] / 2 * size
    assert narrow["moe_act"] == wide["moe_act"]
    assert narrow["attn_norm"] == wide["attn_norm"]
    assert narrow["attn_proj"] == wide["attn_proj"] * (1 + size / 2)


def test_transformer_engines_dense_norms_belong_to_the_linears_that_they_are_fused_with() -> None:
    context = replace(context_of("Qwen/Qwen2.5-7B", world=1), fused_norm_linear=True)
    saved = charged(with_recomputation(fused_layer(context, DENSE_LAYER), set()))
    assert set(saved) == {"qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "stays"}
    assert saved["qkv_linear"] == saved["mlp_fc1"] == 2 * 4096 * 3584 * 2
    assert saved["mlp_act"] == 2 * 4096 * 18944 * 2


def test_transformer_engine_copies_values_unless_attention_is_recomputed() -> None:
    """Qwen2.5-7B, 28 query and 4 key heads of 128: 75.5 MB for 8192 tokens but for statistics, as E2 measured."""
    context = replace(context_of("Qwen/Qwen2.5-7B", world=1), fused_norm_linear=True)
    storages = fused_layer(context, DENSE_LAYER)
    statistics, size = 4096 * 28 * 4, 4096 * 128 * 2
    assert charged(with_recomputation(storages, set()))["core_attn"] == (28 + 4 + 4) * size + statistics
    checkpoint = charged(with_recomputation(storages, {"core_attn"}))["core_attn"]
    assert checkpoint == (28 + 4 + 28 + 2 * 4) * size + statistics, "its input is a view of the projection's output"


def test_transformer_engine_copies_queries_and_keys_for_their_norms() -> None:
    context = replace(context_of("Qwen/Qwen3-8B", world=1), fused_norm_linear=True)
    saved = charged(with_recomputation(fused_layer(context, DENSE_LAYER), set()))
    assert saved["qkv_linear"] == 4096 * (2 * 4096 + (32 + 8) * 128) * 2
    assert saved["core_attn"] == 4096 * ((32 + 8 + 8) * 128 * 2 + 32 * 4)


def test_small_tensors_stay() -> None:
    storages = fused_layer(context_of("deepseek-ai/DeepSeek-V3", world=1), MOE_LAYER)
    statistics = 4096 * 128 * 4
    change = charged(storages)["core_attn"] - charged(storages, least=1 << 20)["core_attn"]
    assert change == statistics


def test_selective_recomputation_gives_up_what_it_computes_again() -> None:
    storages = fused_layer(context_of("deepseek-ai/DeepSeek-V3", world=1), MOE_LAYER)

    def waits(*modules: str) -> int:
        return sum(storage.num_bytes for storage in with_recomputation(storages, set(modules)) if storage.live)

    everything = waits()
    assert everything - waits("moe_act") == 4096 * 8 * 2048 * 2
    assert everything - waits("layernorm") == 2 * 4096 * 7168 * 2
    assert everything - waits("mla_up_proj") == 4096 * 128 * (192 + 192 + 128) * 2
    assert waits("core_attn") == everything
    shared = 3 * 4096 * 2048 * 2
    assert everything - waits("shared_experts") == shared
    experts = 4096 * 8 * (7168 + 3 * 2048) * 2
    assert everything - waits("moe") == experts + shared + 2 * 4096 * 256 * 4


def test_plain_operators_save_more_than_fused_ones() -> None:
    context = context_of("Qwen/Qwen3-8B", world=1)
    fused, plain = charged(fused_layer(context, DENSE_LAYER)), charged(torch_layer(context, DENSE_LAYER))
    assert all(plain[module] >= fused[module] for module in fused)
    assert plain["mlp_norm"] == 4096 * (2 * 4096 + 1) * 4
