from collections.abc import Callable

import pytest

from nemo_rl_offload.config.validation import CheckedConfig
from nemo_rl_offload.errors import ConfigError

Check = Callable[..., CheckedConfig]
M = "policy.megatron_cfg"


def test_a_cuda_graph_that_is_not_available_is_the_only_thing_said_about_it(check: Check) -> None:
    with pytest.raises(ConfigError) as caught:
        check(f"{M}.cuda_graph_impl=local", f"{M}.cuda_graph_modules=[attn,moe]", f"{M}.cuda_graph_warmup_steps=0")
    (line,) = str(caught.value).splitlines()[1:]
    assert line == f'{M}.cuda_graph_impl: local is not available yet. Set it to "none".'
