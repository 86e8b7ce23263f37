"""What generates responses: the values of `policy.generation.backend`."""

from typing import Literal

GenerationBackend = Literal["megatron"]
