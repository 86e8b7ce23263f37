"""What E1 runs: the first of four pipeline stages of DeepSeek-V3 layers, with an engine, without, or beside copies."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from bare_copies import BareCopies
from common import HAS_GPU, Sample, settled_stats
from constants import NUM_AHEAD
from forward_clock import ForwardClock
from megatrons_engine import bind_megatrons_engine
from pipeline_waits import PipelineWaits, device_time
from torch import Tensor

from nemo_rl_offload.adapters.megatron_core.installation import make_backend
from nemo_rl_offload.adapters.megatron_core.interface import bound_interface, exclude_parameters, use_engine
from nemo_rl_offload.adapters.megatron_core.routing_result import bypass_copy_engine
from nemo_rl_offload.bench.process import deterministic
from nemo_rl_offload.config.loader import PROJECT_ROOT, load_config
from nemo_rl_offload.megatron.build.config_check import provider_for
from nemo_rl_offload.megatron.build.model import unwrap
from nemo_rl_offload.megatron.build.transformer_config import configure_provider
from nemo_rl_offload.megatron.runtime.quiet import quiet
from nemo_rl_offload.offload import OffloadEngine
from nemo_rl_offload.offload.options import OffloadOptions, build_engine
from nemo_rl_offload.specs.catalogue import CATALOGUE
from nemo_rl_offload.units import GIB

MODULES = ("attn_norm", "mlp_norm", "expert_fc1", "moe_act")  # those of the published run


def model_config(num_layers: int, is_small: bool) -> dict[str, Any]:
    """DeepSeek-V3's, but for the number of layers and experts, and a vocabulary that leaves memory to the layers."""
    changes = {
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": 0,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "rope_scaling": None,
    }
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    return {**CATALOGUE["deepseek-ai/DeepSeek-V3"], **changes, **(small if is_small else {})}


def make_policy(modules: Sequence[str], sequence: int, implementation: str, *overrides: str) -> Any:
    cfg = "policy.megatron_cfg"
    settings = [
        "policy.precision=bfloat16",
        f"policy.max_total_sequence_length={sequence}",
        f"{cfg}.transformer_impl={implementation}",
        f"{cfg}.fine_grained_activation_offloading=true",
        f"{cfg}.offload_modules=[{','.join(modules)}]",
        f"{cfg}.min_offloaded_tensor_size=0",
        f"{cfg}.moe_router_load_balancing_type=none",
        *overrides,
    ]
    return load_config(PROJECT_ROOT / "examples/configs/grpo_tiny.yaml", settings)["policy"]


class Stage:
    """Layers on this device, and a step over them. Copies out hold up to `inflight_bytes` of the device's memory."""

    def __init__(
        self, policy: Any, num_layers: int, sequence: int, num_microbatches: int, inflight_bytes: int = GIB
    ) -> None:
        use_engine(None)
        options = OffloadOptions(
            modules=MODULES,
            host_memory_budget_bytes=64 * GIB,
            min_tensor_bytes=0,
            max_inflight_bytes=inflight_bytes,
        )
        self.engine = build_engine(options, make_backend())
        with quiet():
            provider = provider_for(model_config(num_layers, is_small=not HAS_GPU))
            configure_provider(provider, policy)
            chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=not HAS_GPU)
        self.model = unwrap(chunks[0]).train()
        exclude_parameters(self.engine, [self.model])
        generator = torch.Generator(torch.cuda.current_device()).manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02, generator=generator) if parameter.ndim > 1 else parameter.fill_(1)
            for buffer in self.model.buffers():
                if buffer.is_floating_point() and buffer.ndim == 1 and buffer.shape[0] == 16:
                    buffer.zero_()  # the router's bias
        self.tokens = torch.randint(
            0, 1024, (num_microbatches, 1, sequence), generator=generator, device=generator.device
        )
        self.positions = torch.arange(sequence, device=generator.device)[None]
        self.waits = PipelineWaits(NUM_AHEAD, 0.0, 0.0)
        self.activation_bytes = 0
        """Device memory that a microbatch's forward leaves taken without offloading; 0 where none was timed."""
        self.bare_copies: BareCopies | None = None
        self.clock = ForwardClock()

    def use(self, engine: OffloadEngine | None, bare_copies: BareCopies | None = None) -> None:
        """Take the next steps with an engine of this project, or with none and copies instead, or with neither."""
        use_engine(engine, MODULES)
        self._bind_layers()
        self.bare_copies = bare_copies
        if bare_copies is not None:
            bypass_copy_engine(True)  # as with an engine: as copies, the router's answers would wait behind these

    def use_megatrons(self) -> None:
        """Take the next steps with Megatron-Core's engine."""
        self.use(None)
        bind_megatrons_engine()
        self._bind_layers()

    def _bind_layers(self) -> None:
        """Layers keep the class that they were built with, and open some of their regions with that."""
        for module in self.model.modules():
            if hasattr(module, "off_interface"):
                module.off_interface = bound_interface()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.bare_copies is not None:
            self.bare_copies.out()
        with self.clock.forward():
            return self.model(tokens, self.positions, None, labels=tokens).mean()  # type: ignore[no-any-return]

    def step(self) -> Tensor:
        """1F1B of the first of four stages; gradients add up. Returns the losses."""
        alive: deque[Tensor] = deque()
        losses = []
        began = device_time()

        def backward() -> Any:
            began = device_time()
            losses.append(alive[0].detach())
            if self.bare_copies is not None:
                self.bare_copies.back()
            alive.popleft().backward()
            return began

        for number, tokens in enumerate(self.tokens):
            alive.append(self.forward(tokens))
            if len(alive) == NUM_AHEAD:
                if number == NUM_AHEAD - 1:
                    self.waits.for_first_gradient(began)
                began = backward()
        while alive:
            self.waits.for_next_gradient(began)
            began = backward()
        bound_interface().reset()
        return torch.stack(losses)

    def time_passes(self) -> None:
        """Let the waits be those beside stages that take as long as this one without offloading."""
        self.use(None)
        if not HAS_GPU:
            return
        times: list[tuple[float, float]] = []
        for tokens in self.tokens[:NUM_AHEAD]:
            start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            before = torch.cuda.memory_allocated()
            start.record()
            loss = self.forward(tokens)
            middle.record()
            self.activation_bytes = torch.cuda.memory_allocated() - before
            loss.backward()
            end.record()
            torch.cuda.synchronize()
            times.append((start.elapsed_time(middle), middle.elapsed_time(end)))
        forward_ms, backward_ms = (min(column) for column in zip(*times, strict=True))
        self.waits = PipelineWaits(NUM_AHEAD, forward_ms, backward_ms)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def close(self) -> None:
        use_engine(None)
        self.engine.close()


def is_bit_identical(implementation: str, sequence: int) -> bool:
    """Whether two layers give the same losses and gradients with offloading, twice, as without."""
    with deterministic():
        stage = Stage(make_policy(MODULES, sequence, implementation), 2, sequence, NUM_AHEAD + 2)
        outcomes = []
        for engine in (None, None, stage.engine, stage.engine):
            stage.use(engine)
            stage.model.zero_grad(set_to_none=True)
            outcomes.append([stage.step(), *(gradient.clone() for gradient in stage.gradients())])
    assert stage.engine.stats().bytes_out > 0
    stage.close()
    plain, again, *offloaded = outcomes
    assert all(map(torch.equal, plain, again)), "the model itself does not repeat itself"
    return all(all(map(torch.equal, plain, other)) for other in offloaded)


def counters(engine: OffloadEngine) -> Sample:
    stats = settled_stats(engine)
    return {
        "bytes_out": stats.bytes_out,
        "stall_in_ms": stats.stall_in_ms,
        "stall_out_ms": stats.stall_out_ms,
        "demand_reloads": stats.demand_reloads,
    }
