"""The output head that a policy's configuration asks for."""

from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.megatron.build.model import MegatronModel
from nemo_rl_offload.megatron.step.fused_head import FusedHeadFactory
from nemo_rl_offload.megatron.step.head import HeadFactory, LogitsHeadFactory


def make_heads(policy: PolicyConfig, model: MegatronModel) -> HeadFactory:
    """Heads for the microbatches of a pass, at the temperature of generation."""
    cfg, temperature, chunk_size = (
        policy["megatron_cfg"],
        policy["generation"]["temperature"],
        policy["logprob_chunk_size"],
    )
    if not cfg["use_fused_linear_logprobs"]:
        return LogitsHeadFactory(temperature, chunk_size)
    vocab_size: int = model.config.vocab_size
    return FusedHeadFactory(temperature, vocab_size, cfg["fused_linear_logprobs_chunk_size"], chunk_size)
