"""What this project adds to vLLM's worker: weights that are replaced where they stand, and log-probabilities.

vLLM mixes `WeightsInPlace` into its worker (`worker_extension_cls`) and imports this module before it loads a model.

On a CPU, vLLM packs weights for oneDNN and for its own kernels of experts as it builds, and drops or overwrites the
originals. Its `load_weights` then fails or, worse, writes plain weights where packed ones are read.
`keep_weights_plain` turns both off, and linear layers are torch's own. Rejected: vLLM's layerwise reload, which packs
anew: it needs the originals of a whole layer beside it.

Parameters are written in place on a GPU as well, where its graphs have their addresses. What vLLM's loaders say that
they have loaded is not asked: a name is in it once one of many experts has come. All is filled with NaN instead.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def keep_weights_plain() -> None:
    """Let CPU layers compute with the parameters as they are. To be called before a model is loaded."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    ops._supports_onednn = False
    CPUFusedMOE.check_grouped_gemm = lambda *_: (False, "none")


class WeightsInPlace:
    """Methods of vLLM's worker that the engine's process calls by `collective_rpc`."""

    model_runner: Any

    def begin_update(self) -> None:
        """Leave no old weight in place: what an update does not bring is found by `finish_update`."""
        with torch.no_grad():
            for parameter in self.model_runner.model.parameters():
                parameter.fill_(torch.nan)

    def load_named_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write weights by Hugging Face's names."""
        with torch.no_grad():
            self.model_runner.model.load_weights(weights)

    def finish_update(self) -> list[str]:
        """The names of vLLM's parameters of which a part has not come."""
        named = self.model_runner.model.named_parameters()
        return [name for name, parameter in named if parameter.sum(dtype=torch.float32).isnan()]

    def return_whole_logprobs(self) -> None:
        """Let the sampler return log-probabilities at the temperature before top-k and top-p, as training has them.

        Processed ones are of the distribution that is left after both.
        """
        sampler = self.model_runner.sampler.topk_topp_sampler
        draw = sampler.forward

        def forward(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            logprobs_BV = logits.log_softmax(dim=-1, dtype=torch.float32)  # before `draw` masks the logits in place
            return draw(logits, *others)[0], logprobs_BV

        sampler.forward = forward
