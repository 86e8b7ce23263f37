"""Names and paths become calls of modules, or one error that says what to write."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_rl_offload.adapters.module_resolver import NAMES, _why_none, resolve
from nemo_rl_offload.errors import ConfigError


def tree(*paths: str) -> nn.Module:
    """A module with submodules at these paths."""
    root = nn.Module()
    for path in paths:
        module = root
        for step in path.split("."):
            if step not in dict(module.named_children()):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
    return root


ATTENTION = ("input_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo"), "post_attention_layernorm")
DENSE = (*ATTENTION, "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj")


class Experts(nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation=implementation)

    def _apply_gate(self) -> None: ...


def moe_layer(implementation: str = "grouped_mm") -> nn.Module:
    layer = tree(*ATTENTION, "mlp")
    layer.mlp.add_module("experts", Experts(implementation))
    return layer


def model_of(*layers: nn.Module) -> nn.Module:
    model = tree("model.embed_tokens", "model.norm", "lm_head")
    model.model.add_module("layers", nn.ModuleList(layers))
    return model


def shown(model: nn.Module, entry: str) -> list[str]:
    """Targets as "path.method without a, b until c", without the layer."""
    result = []
    for target in resolve(model, [entry]):
        assert target.entry == entry
        assert model.get_submodule(target.site.path) is target.site.module
        text = target.site.path + ("" if target.site.method == "__call__" else f".{target.site.method}")
        if target.without:
            text += " without " + ", ".join(site.path.split(".")[-1] for site in target.without)
        if target.end:
            text += f" until {target.end.path.split('.')[-1]}"
            text += "" if target.end.method == "__call__" else f".{target.end.method}"
        result.append(text.removeprefix("model.layers.0."))
    return result


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("attn_norm", ["input_layernorm"]),
        ("qkv_linear", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("core_attn", ["self_attn without q_proj, k_proj, v_proj until o_proj"]),
        ("attn_proj", ["self_attn.o_proj"]),
        ("mlp_norm", ["post_attention_layernorm"]),
        ("mlp_fc1", ["mlp.gate_proj", "mlp.up_proj"]),
        ("mlp_act", ["mlp without gate_proj, up_proj until down_proj"]),
    ],
)
def test_names_in_a_dense_layer(entry: str, expected: list[str]) -> None:
    assert shown(model_of(tree(*DENSE)), entry) == expected


def test_the_norm_before_the_mlp_where_there_is_one_on_each_side() -> None:
    layer = tree(*DENSE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    assert shown(model_of(layer), "mlp_norm") == ["pre_feedforward_layernorm"]


def test_names_in_a_layer_with_experts() -> None:
    assert shown(model_of(moe_layer()), "expert_fc1") == ["mlp.experts until experts._apply_gate"]
    assert shown(model_of(moe_layer()), "moe_act") == ["mlp.experts._apply_gate"]


def test_each_layer_gives_what_it_has() -> None:
    model = model_of(tree(*DENSE), moe_layer(), tree(*DENSE))
    paths = {entry: [target.site.path for target in resolve(model, [entry])] for entry in NAMES}
    assert paths["mlp_fc1"] == [f"model.layers.{i}.mlp.{name}_proj" for i in (0, 2) for name in ("gate", "up")]
    assert paths["moe_act"] == ["model.layers.1.mlp.experts"]
    assert paths["core_attn"] == [f"model.layers.{i}.self_attn" for i in range(3)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers.*", ["model.layers.0", "model.layers.1"]),
        ("model.layers.1*", ["model.layers.1"]),
        ("model.*.*.mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("**.down_proj", ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
        ("model.layers.*.self_attn.q*", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
    ],
)
def test_paths(pattern: str, expected: list[str]) -> None:
    model = model_of(tree(*DENSE), tree(*DENSE))
    assert [target.site.path for target in resolve(model, [pattern])] == expected


def test_all_problems_come_at_once_with_what_is_nearest() -> None:
    model = model_of(tree(*DENSE))
    with pytest.raises(ConfigError) as error:
        resolve(model, ["core_atn", "model.layer.*.mlp", "expert_fc1", "lm_head", "attn_norm"])
    lines = str(error.value).splitlines()
    assert lines[0].startswith("'core_atn': neither a module of this model nor one of attn_norm, qkv_linear, core_attn")
    assert lines[0].endswith("Did you mean 'core_attn'?")
    assert lines[1].startswith("'model.layer.*.mlp': matches no module of this model. Nearest: model.layers.*.mlp, ")
    assert lines[2].startswith("'expert_fc1': no layer has experts in one module (mlp.experts); name mlp_fc1 for dense")
    assert len(lines) == 3


def test_an_empty_name_is_not_the_model_itself() -> None:
    with pytest.raises(ConfigError, match=r"^'': neither a module of this model nor one of attn_norm"):
        resolve(model_of(tree(*DENSE)), [""])


@pytest.mark.parametrize("entry", ["mlp_fc1", "mlp_act"])
def test_a_dense_name_in_a_model_of_experts(entry: str) -> None:
    with pytest.raises(ConfigError, match=f"'{entry}': no layer has a dense MLP"):
        resolve(model_of(moe_layer()), [entry])


@pytest.mark.parametrize("entry", ["expert_fc1", "moe_act"])
def test_experts_in_a_loop_have_no_seam(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"set_experts_implementation\('grouped_mm'\), or list 'model.layers.0.mlp.e"):
        resolve(model_of(moe_layer("eager")), [entry])


def test_names_that_no_layer_has_in_a_known_form_say_so() -> None:
    """As core_attn of latent attention, or mlp_norm of Nemotron-H."""
    bare = nn.ModuleDict({"layers": nn.ModuleList([tree("mixer.in_proj")])})
    for entry in NAMES:
        assert re.search("no layer (has|of this model has)", _why_none(entry, dict(bare.named_modules()), ["layers.0"]))


def test_names_need_decoder_layers() -> None:
    with pytest.raises(ConfigError, match=r"no decoder layers .* Give paths of modules instead"):
        resolve(nn.Sequential(nn.Linear(2, 2)), ["core_attn"])


@pytest.mark.parametrize("entries", ["core_attn", [], ()])
def test_modules_is_a_list_of_something(entries: list[str] | str) -> None:
    with pytest.raises(ConfigError, match=r"give a list with at least one name, like \['core_attn', 'mlp_norm'\]"):
        resolve(model_of(tree(*DENSE)), entries)


def test_a_module_is_listed_once() -> None:
    model = model_of(tree(*DENSE))
    with pytest.raises(
        ConfigError, match=r"'\*\*.o_proj': model.layers.0.self_attn.o_proj is listed as 'attn_proj' too"
    ):
        resolve(model, ["attn_proj", "**.o_proj"])
    assert len(resolve(model, ["core_attn", "model.layers.*.self_attn", "core_attn"])) == 2


def compiled_in_place(model: nn.Module) -> None:
    model.model.layers[0].compile(backend="eager")


def compiled_wrapper(model: nn.Module) -> None:
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")


@pytest.mark.parametrize("compile_layer", [compiled_in_place, compiled_wrapper])
def test_what_is_inside_of_compiled_code_is_refused(compile_layer) -> None:
    model = model_of(tree(*DENSE))
    compile_layer(model)
    for entry in ("core_attn", "attn_norm", "model.layers.*.**.up_proj"):
        with pytest.raises(ConfigError, match=r"inside of compiled code.*List what is compiled as a whole \('model.l"):
            resolve(model, [entry])
    assert [target.site.path for target in resolve(model, ["model.layers.*"])] == ["model.layers.0"]


def test_a_compiled_part_of_a_name_is_refused_only_where_its_seams_are_inside() -> None:
    model = model_of(tree(*DENSE))
    model.model.layers[0].self_attn.compile(backend="eager")
    model.model.layers[0].mlp.up_proj.compile(backend="eager")
    with pytest.raises(ConfigError, match="'core_attn'"):
        resolve(model, ["core_attn"])
    assert len(resolve(model, ["mlp_act", "mlp_fc1", "attn_norm"])) == 4


def test_a_whole_model_that_is_compiled_is_refused() -> None:
    model = torch.compile(model_of(tree(*DENSE)), backend="eager")
    with pytest.raises(ConfigError, match="Compile single layers instead"):
        resolve(model, ["core_attn"])
