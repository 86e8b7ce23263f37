import re
from importlib.util import find_spec
from pathlib import Path

from nemo_rl_offload.specs import offload_modules as modules


def test_native_names_extend_megatrons_but_for_the_op_fuser() -> None:
    assert set(modules.MEGATRON_MODULES) - set(modules.NATIVE_MODULES) == {"fused_group_mlp"}
    assert len(set(modules.NATIVE_MODULES)) == len(modules.NATIVE_MODULES)


def test_expert_and_dense_names_are_disjoint_and_known() -> None:
    known = {*modules.MEGATRON_MODULES, *modules.NATIVE_MODULES}
    assert {*modules.MOE_MODULES, *modules.DENSE_MLP_MODULES} <= known
    assert not set(modules.MOE_MODULES) & set(modules.DENSE_MLP_MODULES)


def test_megatron_names_are_those_it_documents() -> None:
    """Read from the source of Megatron-Core, because importing it takes seconds."""
    package = find_spec("megatron.core")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0], "transformer/transformer_config.py").read_text("utf-8")
    documented = re.search(r'offload_modules: Optional.*?choices:(.*?)"attn_norm": offload', source, re.DOTALL)
    assert documented is not None
    assert tuple(re.findall(r'"(\w+)"', documented[1])) == modules.MEGATRON_MODULES
