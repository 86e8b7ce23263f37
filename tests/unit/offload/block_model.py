"""A plain torch model with a block of many kinds of modules, and ways to train and offload it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemo_rl_offload import offload_activations
from nemo_rl_offload.adapters.torch_modules import ActivationOffload

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.7))
        self.use_reentrant: bool | None = None

    def inner(self, x: Tensor) -> dict[str, Any]:
        return {"note": "a dict", "x": x.sigmoid() + self.mlp(self.norm(x) * self.scale)}

    def forward(self, x: Tensor) -> dict[str, Any]:
        if self.use_reentrant is None:
            return self.inner(x)
        return {"x": checkpoint(lambda x: self.inner(x)["x"], x, use_reentrant=self.use_reentrant)}


class Model(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)["x"]
        return x


ALL = ["embed", "blocks.*", "blocks.*.norm", "blocks.*.mlp", "blocks.*.mlp.1"]


def batch(num_rows: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def identical(got: list[Tensor], expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def offload(model: nn.Module, modules: list[str] = ALL, **changes: Any) -> ActivationOffload:
    settings = {"host_memory_budget": "16MiB", "min_tensor_bytes": 0, **changes}
    return offload_activations(model, modules, **settings)
