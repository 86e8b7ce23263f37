"""One vLLM engine, or one device of an engine of several, in a process of its own.

vLLM is imported when the worker is built. By then the engine's process group exists: vLLM would open a port for it on
every interface.

Of an engine of several devices each has a worker with an engine's whole scheduler (vLLM's `external_launcher`). All get
the same requests in the same order, schedule alike, draw with the same seeds, and meet in the collectives of the model
alone. Only the first one's responses count; the others' are compared with them. So a device is slept, woken and handed
weights by the process beside its training rank, as where it is an engine of its own. Rejected: a worker that commands
the others (vLLM's own way), which starts processes that would not be where the training ranks' weights are.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nemo_rl_offload.batching.response import Response
from nemo_rl_offload.cluster.worker_group import Stored
from nemo_rl_offload.config.rules.rule import read_shape
from nemo_rl_offload.config.rules.vllm import context_length, devices_of_engine
from nemo_rl_offload.config.schema import PolicyConfig
from nemo_rl_offload.errors import ConfigError, ResourceError, WorkerError
from nemo_rl_offload.generation.interface import Generated
from nemo_rl_offload.generation.sampling import Sampling
from nemo_rl_offload.generation.vllm.routes import RoutesOfModel
from nemo_rl_offload.generation.vllm.settings import (
    CPU_BLOCK_SIZE,
    MAX_NUM_SEQS,
    Request,
    dtype_of_engine,
    engine_arguments,
    is_in_eight_bits,
    is_truncated,
    request_seed,
    sampling_arguments,
    speculates,
)
from nemo_rl_offload.generation.weight_sync import (
    Assembler,
    DeviceBucket,
    Part,
    SentBucket,
    WeightBucket,
    device_buffer,
    num_bytes_of,
)
from nemo_rl_offload.megatron.runtime.rendezvous import join
from nemo_rl_offload.observability.notices import Notices
from nemo_rl_offload.observability.start_clock import StartClock
from nemo_rl_offload.specs.generation import HOW_TO_INSTALL, VLLM_VERSION, is_tested
from nemo_rl_offload.specs.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_rl_offload.generation.weight_channel import WeightChannel

CFG = "policy.generation.vllm_cfg"
TELL_S = 1.0
STEPS_OF_A_CALL = 8
"""Of an engine, between two looks for new requests: a call takes a millisecond or two."""


class VllmWorker:
    """Samples with one engine, or with others of neighbouring ranks; `can_sleep` where training has the same device.

    Raises:
        ConfigError: vLLM is not here, is another version, or refuses the model or its arguments.
        ResourceError: there is no memory for it.
        WorkerError: the workers of an engine cannot meet.
    """

    def __init__(self, config: PolicyConfig, model_path: Path, end_ids: Sequence[int], *, can_sleep: bool) -> None:
        import torch

        self._notices, self._clock = Notices(), StartClock()
        self._config, self._end_ids = config, end_ids
        self._is_cpu = not torch.cuda.is_available()
        self._can_sleep = can_sleep and not self._is_cpu
        self._asleep: set[str] = set()
        self._slept_bytes = 0
        """Device memory that sleep has given up, and waking has not taken again."""
        self._unused_bytes = 0
        """Of the engine's share, what it had not taken when it was built: prompts take it for their activations."""
        self._assembler = Assembler()
        self._is_updating = False
        self._channel: WeightChannel | None = None
        self._buffer: Tensor | None = None
        """Where buckets arrive that are sent over the channel; during an update."""
        self._num_updates = 0
        self._under_way: dict[int, tuple[str, list[int]]] = {}
        """By request: the engine's name for it, how often the weights had been updated when it came, and then, for each
        update since, how many tokens it had."""
        with self._clock.part("import of vLLM"):
            _import_vllm(is_cpu=self._is_cpu)
        self._num_devices = devices_of_engine(config["generation"]["vllm_cfg"])
        self._rank_of_engine = int(os.environ["RANK"]) % self._num_devices
        join("gloo" if self._is_cpu else "nccl", self._num_devices)
        with self._clock.part("import of vLLM"):
            from vllm import SamplingParams
            from vllm.distributed.parallel_state import get_world_group
            from vllm.sampling_params import RequestOutputKind

        self._change_vllm()
        self._llm = self._build_engine(model_path)
        self._sampling_params, self._at_the_end = SamplingParams, RequestOutputKind.FINAL_ONLY
        self._peers = get_world_group().cpu_group
        if is_truncated(config["generation"]):
            self._on_the_model("return_whole_logprobs")
        self._drafts = defaultdict[str, Counter[str]](Counter)
        """By the engine's name of a request: how many tokens were drafted, and how many of them accepted."""
        self._speculates = speculates(config["generation"])
        if self._speculates:
            self._llm.llm_engine.engine_core.engine_core.scheduler.make_spec_decoding_stats = self._count_drafts
        self._routes = RoutesOfModel.of(config) if config["router_replay"]["enabled"] else None
        if self._routes is not None and (silent := self._on_the_model("return_routed_experts")):
            raise ConfigError(
                f"policy.router_replay.enabled: vLLM does not say which experts {len(silent)} of the model's layers "
                f"choose, the first of them {silent[0]}. Set it to false."
            )

    def _change_vllm(self) -> None:
        from nemo_rl_offload.generation.vllm import extension

        if self._is_cpu:
            extension.keep_weights_plain()
            extension.rotate_heads_apart()
            extension.expand_to_drafts()
        if is_in_eight_bits(self._config["generation"]):
            if self._is_cpu:
                raise ConfigError(f"{CFG}.precision: fp8 needs a GPU, and this worker has none. Set it to null.")
            extension.find_lacking_parts()
        if self._num_devices > 1:
            extension.take_place(self._rank_of_engine)

    def _build_engine(self, model_path: Path) -> Any:
        """vLLM's engine; keeps how much of its share it left."""
        import torch
        from vllm import LLM

        arguments = engine_arguments(
            self._config,
            model_path,
            is_cpu=self._is_cpu,
            can_sleep=self._can_sleep,
            cache_bytes=_cpu_cache_bytes(self._config) if self._is_cpu else None,
        )
        free_bytes = self._free_bytes() if self._can_sleep else 0
        with _explained("building the engine"), self._clock.part("vLLM's engine"):
            try:
                llm = LLM(**arguments)
            except (ValueError, TypeError, NotImplementedError) as error:
                raise _refusal(error) from error
        if self._can_sleep:
            share_bytes = arguments["gpu_memory_utilization"] * torch.cuda.mem_get_info()[1]
            self._unused_bytes = max(0, int(share_bytes) - (free_bytes - self._free_bytes()))
        return llm

    def _count_drafts(
        self, _: object, num_draft_tokens: int, num_accepted_tokens: int, *, request_id: str, **__: object
    ) -> None:
        self._drafts[request_id] += Counter(drafted=num_draft_tokens, accepted=num_accepted_tokens)

    def start_seconds(self) -> dict[str, float]:
        """What building this engine took, by part."""
        return self._clock.seconds

    def _on_the_model(self, method: str, *args: object) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def generate(
        self, prompts: Sequence[list[int]], seed: int, places: Sequence[int], sampling: Sampling
    ) -> Generator[Generated, None, list[Response]]:
        """Sample one response for each prompt (token ids), which have these numbers among all; yields how far that is.

        All workers of an engine are called alike; the first returns the responses, the others return none.

        Raises:
            WorkerError: they disagree.
        """
        self._wake("kv_cache")  # also without prompts: an engine that is half asleep does not go to sleep
        if not prompts:
            return []
        engine, ended, told_s = self._llm.llm_engine, dict[int, Response](), time.monotonic()
        with _explained("generating"):
            names = []
            for number, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
                params = self._params(prompt, seed, place, sampling)
                names.append(engine.add_request(str(number), {"prompt_token_ids": prompt}, params))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    number = int(output.request_id)
                    ended[number] = self._response(output, names[number])
                if time.monotonic() - told_s >= TELL_S:
                    yield Generated(len(ended), sum(len(response.tokens) for response in ended.values()))
                    told_s = time.monotonic()
        return self._of_the_engine([ended[number] for number in range(len(prompts))])

    def _of_the_engine(self, responses: list[Response]) -> list[Response]:
        """The responses on the engine's first worker, none on the others; all have the same tokens."""
        if self._num_devices == 1:
            return responses
        import torch.distributed as dist

        own = blake2b(repr([response.tokens for response in responses]).encode()).hexdigest()
        found = [""] * self._num_devices
        dist.all_gather_object(found, own, group=self._peers)
        if len(set(found)) > 1:
            raise WorkerError(
                f"{CFG}.tensor_parallel_size: the devices of one engine have sampled different responses, whose "
                "log-probabilities would be wrong. Set it and pipeline_parallel_size to 1, and report this."
            )
        return responses if self._rank_of_engine == 0 else []

    def advance(self, requests: Sequence[Request]) -> list[tuple[int, Response]]:
        """Add requests to those under way, take some steps; the numbers and responses of those that ended.

        Workers of an engine, and errors, as for `generate`.
        """
        self._wake("kv_cache")
        engine, ended = self._llm.llm_engine, list[tuple[int, Response]]()
        with _explained("generating"):
            for request in requests:
                # What an engine keeps of a prompt is found again by requests of the same weights alone.
                prompt = {"prompt_token_ids": request.prompt, "cache_salt": str(self._num_updates)}
                params = self._params(request.prompt, request.seed, request.place, request.sampling)
                name = engine.add_request(str(request.number), prompt, params)
                self._under_way[request.number] = name, [self._num_updates]
            for _ in range(STEPS_OF_A_CALL):
                if not engine.has_unfinished_requests():
                    break
                for output in engine.step():
                    number = int(output.request_id)
                    name, updates = self._under_way.pop(number)
                    response = self._response(output, name)
                    versions = versions_of(len(response.tokens), updates)
                    ended.append((number, replace(response, versions=versions)))
        responses = self._of_the_engine([response for _, response in ended])
        return [(number, response) for (number, _), response in zip(ended, responses, strict=False)]

    def _params(self, prompt: Sequence[int], seed: int, place: int, sampling: Sampling) -> Any:
        num_left = context_length(self._config) - len(prompt)
        return self._sampling_params(
            **sampling_arguments(sampling, self._end_ids, num_left),
            seed=request_seed(seed, place),
            output_kind=self._at_the_end,
        )

    def _response(self, request: Any, name: str) -> Response:
        """Of vLLM's `RequestOutput` of a request that has ended, and the engine's name for it."""
        output, drafts = request.outputs[0], self._drafts.pop(name, Counter())
        tokens, num_prompt = list(output.token_ids), len(request.prompt_token_ids)
        routes = None
        if self._routes is not None:
            routes = self._routes.of_response(output.routed_experts, num_prompt + len(tokens))
        return Response(
            tokens,
            list(output.logprobs.logprobs),
            output.finish_reason == "stop",
            num_drafted=drafts["drafted"],
            num_accepted=drafts["accepted"],
            routed_experts=routes,
        )

    def _note_update(self) -> None:
        for name, updates in self._under_way.values():
            request = self._llm.llm_engine.engine_core.engine_core.scheduler.requests[name]
            # A step may be under way whose tokens have a place already.
            updates.append(request.num_output_tokens + request.num_output_placeholders)
        self._num_updates += 1

    def load_weight_bucket(self, bucket: Stored[WeightBucket]) -> None:
        """Take over the next weights, one at a time."""
        self._load(bucket.get())

    def join_weight_channel(self, address: tuple[str, int]) -> None:
        """Find the rank that will send weights."""
        from nemo_rl_offload.generation.weight_channel import join_channel

        self._channel = join_channel(address, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def receive_bucket(self, parts: tuple[Part, ...]) -> None:
        """Take over the next weights from the channel."""
        assert self._channel is not None, "join_weight_channel comes first"
        if self._buffer is None:
            self._buffer = device_buffer()
        data = self._buffer[: num_bytes_of(parts)]
        with _explained("handing over weights"):
            self._channel.receive(data)
        self._load(SentBucket(parts, data))

    def load_device_bucket(self, bucket: DeviceBucket) -> None:
        """The same from the GPU that training has as well; the bucket may be written over when this returns."""
        import torch

        self._load(bucket)
        torch.cuda.synchronize()

    def _load(self, bucket: WeightBucket | DeviceBucket | SentBucket) -> None:
        with _explained("handing over weights"):
            if not self._is_updating:
                self._on_the_model("begin_update")
                self._is_updating = True
            self._on_the_model("load_named_weights", self._assembler.add(bucket))

    def finish_weight_update(self, *, recompute: bool = False) -> None:
        """End an update, all of whose buckets have been loaded, and forget what was computed with the old weights.

        Requests under way go on from the keys and values that they have, or with `recompute` from new ones.

        Raises:
            ConfigError: a parameter of vLLM's has not got its weight.
        """
        self._is_updating = False
        self._assembler, self._buffer = Assembler(), None  # they keep the last weights
        if missing := self._on_the_model("finish_update"):
            raise ConfigError(
                f"policy.generation.backend: {len(missing)} of vLLM's parameters do not get their whole weight from "
                f"training, the first of them {', '.join(missing[:3])}. Set megatron."
            )
        self._note_update()
        if not self._under_way:
            assert self._llm.reset_prefix_cache(), "no request is under way"
        elif recompute:
            assert self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True), "they begin anew"

    def sleep(self) -> None:
        """Give up weights and cache, where training has the same device."""
        if self._asleep == {"kv_cache"}:  # of an engine that got no prompts: half asleep, it would not go to sleep
            self._wake("kv_cache")
        if self._can_sleep and not self._asleep:
            if self._speculates:
                self._on_the_model("keep_drafts")
            free_bytes = self._free_bytes()
            with _explained("falling asleep"):
                self._llm.sleep(level=2)
            self._slept_bytes = self._free_bytes() - free_bytes
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take memory for the weights again, which are to be handed over next; for the cache, `generate` does."""
        self._wake("weights")

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            free_bytes = self._free_bytes()
            with _explained("waking up"):
                self._llm.wake_up(tags=[part])
                if part == "weights" and self._speculates:
                    self._on_the_model("give_drafts_back")
            self._slept_bytes -= free_bytes - self._free_bytes()
            self._asleep.discard(part)

    def lacking_bytes(self) -> int:
        """Device memory that the next prompts take, beside what is taken."""
        return max(0, self._slept_bytes) + self._unused_bytes if self._asleep else 0

    @staticmethod
    def _free_bytes() -> int:
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def take_notices(self) -> list[str]:
        """What this process has warned of since the last call."""
        return self._notices.take()


def versions_of(num_tokens: int, updates: Sequence[int]) -> list[int]:
    """By token, how often the weights had been updated: `updates` as in `VllmWorker`."""
    first, ends = updates[0], updates[1:]
    return [first + sum(end <= place for end in ends) for place in range(num_tokens)]


def _import_vllm(*, is_cpu: bool) -> None:
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(f"policy.generation.backend: vllm cannot be imported: {error}. {HOW_TO_INSTALL}") from error
    if not is_tested(vllm.__version__):
        raise ConfigError(
            f"policy.generation.backend: vLLM {vllm.__version__} is installed, and this project is tested with "
            f"{VLLM_VERSION} alone. {HOW_TO_INSTALL}"
        )
    if current_platform.is_cpu() != is_cpu:
        here, other = ("a CPU", "GPUs") if is_cpu else ("a GPU", "CPUs")
        raise ConfigError(
            f"policy.generation.backend: the vLLM that is installed is for {other}, and {here} generates. "
            f"{HOW_TO_INSTALL}"
        )


def _cpu_cache_bytes(config: PolicyConfig) -> int:
    """A cache for as many of the longest sequences as an engine has places, if `gpu_memory_utilization` allows it.

    Of one process; an engine of several takes the least of theirs.
    """
    shape = read_shape(config["model_name"])
    cfg = config["generation"]["vllm_cfg"]
    itemsize = 4 if dtype_of_engine(config) == "float32" else 2
    num_blocks = -(-context_length(config) // CPU_BLOCK_SIZE)
    cached = [(shape, shape.num_layers // cfg["pipeline_parallel_size"])]
    if speculates(config["generation"]):
        model = config["generation"]["vllm_kwargs"]["speculative_config"].get("model")
        cached.append(
            (shape, shape.num_mtp_layers) if model is None else (other := read_shape(model), other.num_layers)
        )
    elements = 0
    for each, num_layers in cached:
        num_heads = max(1, each.num_key_value_heads // cfg["tensor_parallel_size"])
        elements += 2 * num_layers * num_heads * each.query_head_dim
    of_one = num_blocks * CPU_BLOCK_SIZE * elements * itemsize
    return int(min(MAX_NUM_SEQS * of_one, cfg["gpu_memory_utilization"] * psutil.virtual_memory().available))


@contextmanager
def _explained(phase: str) -> Iterator[None]:
    """Raise ResourceError, which says what to change, where this phase finds no memory; WorkerError without peers."""
    try:
        yield
    except AssertionError as error:
        if "Memory usage increased" not in str(error):
            raise
        raise ResourceError(
            f"while {phase}, vLLM found less free memory of the GPU than before: another program took some meanwhile, "
            "which vLLM allows no one. Give this run the GPU alone."
        ) from error
    except (RuntimeError, ValueError) as error:
        if any(words in str(error) for words in ("Timed out waiting", "Connection closed by peer")):  # gloo's
            raise WorkerError(
                f"while {phase} with vLLM, another device of the same engine has ended or does not answer: "
                f"{_first_line(error)}"
            ) from error
        lacks_room = any(words in str(error) for words in ("Free memory on device", "No available memory", "KV cache"))
        if isinstance(error, ConfigError) or not (lacks_room or is_out_of_memory(error)):
            raise
        raise ResourceError(
            f"out of memory while {phase} with vLLM: {_first_line(error)} Of one device, {CFG}.gpu_memory_utilization "
            f"is the engine's share, beside what training holds: change it, or lower {CFG}.max_model_len."
        ) from error


def _refusal(error: Exception) -> Exception:
    if any(words in str(error) for words in ("Free memory on device", "No available memory", "KV cache")):
        return error
    return ConfigError(f"policy.generation: vLLM {VLLM_VERSION} refuses the model or an argument: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What an error says, without pydantic's frame around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next(
        (line for line in lines if "rror" in line and "validation error" not in line), lines[0] if lines else ""
    )
    return said.partition(" [type=")[0].rstrip(".") + "."
