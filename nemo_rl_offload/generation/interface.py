"""What a policy asks of whatever generates its responses.

The driver of a policy holds one generator and knows no backend. It says when the weights have changed and where they
are, and whose turn on the devices it is: `wake` before generating, `sleep` before it trains or scores again, which a
backend that has the same devices needs in order to give up its weights and cache, and others ignore.

A backend answers a batch of prompts (`generate`). One whose engines work continuously also takes requests one by one,
from several threads, and gives each response as it ends (`open_stream`); its weights can change in between.

A backend gets the slots of its workers and starts them itself. Megatron's workers alone are made by the policy:
colocated they are the training workers, and apart they are such workers without an optimizer. Their class stands above
this layer (it trains), so the policy hands in a function that starts them, and `GenerationWorkers` says what is asked
of them. Rejected: a worker class for generation alone, which would repeat how a model is built; and a backend that
names the policy's class as text, an upward import in disguise. An engine of its own needs neither: it starts its
workers on `slots`, or beside the training workers where there are none.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.virtual_cluster import ClusterPart, VirtualCluster
from nemo_rl_offload.cluster.worker_group import Stored
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.weight_sync import WeightBucket, WeightSource


@dataclass(frozen=True)
class Generated:
    """How far a call for responses is."""

    num_responses: int
    """That have ended."""
    num_tokens: int
    """Sampled so far, also of responses that have not ended where the backend knows of those."""

    @classmethod
    def total(cls, parts: Collection["Generated"]) -> "Generated":
        """Of all parts of a call."""
        return cls(sum(part.num_responses for part in parts), sum(part.num_tokens for part in parts))


Told = Callable[[Generated], None]
"""Is told now and then how far a call is."""


Give = Callable[[Response], None]
"""Gets a response."""


class ResponseStream(Protocol):
    """Requests that are under way, and their responses as they end. For one thread."""

    def submit(self, places: Sequence[int], prompts: Sequence[list[int]], seed: int) -> None:
        """Ask for one response to each prompt (token ids).

        A response is a function of weights, prompt, `seed`, its place, and the stream's sampling.
        """

    def take(self) -> list[tuple[int, Response]]:
        """Wait until a response has ended; those that have, with their places. Nothing where none is under way."""

    def ask(self, prompt: list[int], seed: int, place: int, max_new_tokens: int, give: Give) -> None:
        """Ask for one response, which `give` gets in a thread of the engines'; `take` never has it.

        For any thread. The response is as one that was submitted, and shorter than the sampling's too.
        """

    def check(self) -> None:
        """Raise what the engines have failed with. For any thread."""


class Responds(Protocol):
    """What samples responses: a policy, or a generator alone."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        sampling: Sampling,
        told: Told | None = None,
        places: Sequence[int] | None = None,
    ) -> list[Response]:
        """Sample one response for each prompt (token ids); a function of weights, prompts, `seed` and `sampling`.

        `told` hears of the progress; a backend that knows of none need not call it. `places` are the prompts' numbers
        among all that `seed` is for, without which they are counted; a backend that draws by batch need not read them.
        """

    def open_stream(self, sampling: Sampling) -> ResponseStream | None:
        """A stream of requests and responses; None where batches are answered as a whole."""


class GenerationWorkers(Protocol):
    """Workers with a model that they sample from."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        seed: int,
        end_ids: Sequence[int],
        sampling: Sampling,
        told: Told | None = None,
    ) -> list[Response]:
        """Sample one response for each prompt."""

    def prepare_weight_update(self) -> None:
        """Find where each weight goes. Raises ConfigError when one has no name."""

    def open_weight_channel(self, num_receivers: int) -> tuple[str, int]:
        """Open a channel from the first rank to as many receivers; the address where they find it."""

    def make_room_for_share(self, share: float) -> None:
        """Let what training alone needs leave the devices, as far as an engine with this share of them needs it."""

    def load_weights(self, buckets: Iterable[Stored[WeightBucket]]) -> None:
        """Replace all weights."""

    def notices(self) -> list[list[str]]:
        """What the workers have warned of since the last call, by rank."""

    def shutdown(self) -> None:
        """Kill the workers. May be called twice."""


class Generator(Responds, Protocol):
    """Samples responses, with workers of its own or on the training workers."""

    has_weights: bool
    """Whether it holds weights; none that were given up in sleep. Without any, an update comes before prompts."""

    def prepare(self) -> None:
        """Begin what takes long and needs no training workers; goes on while they are built."""

    def start(self, training_workers: GenerationWorkers | None) -> None:
        """Start what runs beside the training workers, with the start model's weights.

        `training_workers` are None where nothing trains, and the setup's `slots` are all that there are.

        Raises:
            ConfigError: the model's weights cannot be handed over to it.
        """

    def update_weights(self, source: WeightSource) -> None:
        """Take over the weights; new requests use nothing that was computed with the old ones."""

    def sleep(self) -> None:
        """Free the devices that training shares. May be called twice."""

    def wake(self) -> None:
        """Take them again. May be called twice."""

    def lacking_bytes(self) -> Sequence[int]:
        """By rank that trains, what the next prompts take of its device beside what is taken; none of other devices."""

    def start_seconds(self) -> dict[str, float]:
        """What building workers of its own took, by part; each part is that of the slowest."""

    def notices(self) -> list[list[str]]:
        """What the workers of its own have warned of since the last call, by rank; none without any."""

    def stop(self) -> None:
        """End the workers of its own. May be called twice."""


@dataclass(frozen=True)
class GeneratorSetup:
    """What a backend is made of."""

    config: PolicyConfig
    """Of the generating workers. Apart, their layout in `megatron_cfg` need not be that of training."""
    end_ids: tuple[int, ...]
    """The tokens of which any ends a response."""
    model_path: Path
    """The start model's folder."""
    training_slots: VirtualCluster | ClusterPart
    """Of the training workers, for workers beside them."""
    slots: ClusterPart | None
    """For workers of its own; None where generation has the devices of the training workers."""
    start_workers: Callable[[ClusterPart, PolicyConfig], GenerationWorkers]
    """Starts workers with a Megatron model that is never trained."""
    recomputes_cache: bool = False
    """Whether responses that are under way at an update go on from keys and values of the new weights."""
