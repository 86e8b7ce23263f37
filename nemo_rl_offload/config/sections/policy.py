"""Keys of `policy` and `teacher`: the models, how they generate, and how samples are put together."""

from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Gt

from nemo_rl_offload.config.sections.megatron import MegatronConfig
from nemo_rl_offload.config.types import Count, Default, NonNegative, Positive, Share, closed
from nemo_rl_offload.specs.generation import GenerationBackend


@closed
class TokenizerConfig(TypedDict):
    name: Annotated[str, Default("${policy.model_name}")]
    """Local folder with a Hugging Face tokenizer."""
    chat_template: Annotated[str | None, Default("default")]
    """Jinja text, a file's path, or the name of one of the tokenizer's; default: its own; null: texts alone."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, Default(None)]
    """Further arguments of the chat template, such as {enable_thinking: false}."""


@closed
class GenerationResources(TypedDict):
    gpus_per_node: Annotated[Positive | None, Default(None)]
    """On one machine: how many of its workers only generate."""
    num_nodes: Annotated[Positive | None, Default(None)]
    """On several machines: how many of them only generate."""


@closed
class ColocatedConfig(TypedDict):
    enabled: Annotated[bool, Default(True)]
    """Generate in the training workers; false: in workers of their own, which take the weights over after each step."""
    resources: GenerationResources
    """With false: how many of the cluster's workers generate; the others train."""


@closed
class ChatConfig(TypedDict):
    enable_auto_tools: Annotated[bool, Default(False)]
    """Read calls of tools out of responses, where a request has tools."""
    tool_parser: Annotated[str | None, Default(None)]
    """vLLM's name of what reads them, such as hermes."""
    reasoning_parser: Annotated[str | None, Default(None)]
    """vLLM's name of what takes thinking out of a response's text, such as deepseek_r1; null: it stays there."""
    chat_template: Annotated[str | None, Default(None)]
    """Template of chats, or its file; null: policy.tokenizer's."""
    default_chat_template_kwargs: Annotated[dict[str, Any], Default({})]
    """Arguments of the template, such as {enable_thinking: true}; a request's count before them."""


@closed
class VllmConfig(TypedDict):
    async_engine: Annotated[bool, Default(False)]
    """Responses and episodes go on each by itself (true), or a batch of them in step (false)."""
    precision: Annotated[Literal["float32", "bfloat16", "float16", "fp8"] | None, Default(None)]
    """Type of the engine's weights and activations; null: policy.precision. With fp8, linears multiply in 8 bits."""
    use_deep_gemm: Annotated[bool, Default(False)]
    """With fp8, multiply by DeepGEMM's kernels where vLLM finds them; false: by its own."""
    num_first_layers_in_bf16: Annotated[Count, Default(0)]
    """With fp8, first layers that stay in policy.precision."""
    num_last_layers_in_bf16: Annotated[Count, Default(0)]
    """With fp8, last layers that stay so."""
    quantization_ignored_layer_kws: Annotated[list[str], Default([])]
    """With fp8, linears that stay so: those with any of these words in their path, such as a_proj."""
    is_mx: Annotated[bool, Default(False)]
    """With fp8, scale each 32 elements (MXFP8); needs Blackwell, and is not there so far."""
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"], Default("auto")]
    """Type of the key/value cache; auto: that of activations."""
    tensor_parallel_size: Annotated[Positive, Default(1)]
    """Devices that share each layer of an engine."""
    pipeline_parallel_size: Annotated[Positive, Default(1)]
    """Devices that divide an engine's layers."""
    expert_parallel_size: Annotated[Positive, Default(1)]
    """Devices that divide an engine's experts: tensor_parallel_size, or 1, where they share each expert."""
    gpu_memory_utilization: Annotated[Share, Default(0.6)]
    """The engine's share of a GPU's memory, weights and cache; on a CPU the most of its free memory for the cache."""
    max_model_len: Annotated[Positive | None, Default(None)]
    """Longest prompt and response together, in tokens; null: policy.max_total_sequence_length."""
    enable_prefix_caching: Annotated[bool, Default(True)]
    """Compute what prompts begin with in common once, until the weights change."""
    enforce_eager: Annotated[bool, Default(False)]
    """Decode without CUDA graphs; a CPU always does."""
    load_format: Annotated[Literal["auto", "safetensors"], Default("auto")]
    """How the engine reads the start model's files."""
    env_vars: Annotated[dict[str, str] | None, Default(None)]
    """Environment variables of the engines' processes, {NAME: "value"}; null: none."""
    http_server_serving_chat_kwargs: ChatConfig
    """How chats become prompts, and responses messages, for the environment nemo_gym."""
    tool_parser_plugin: Annotated[str | None, Default(None)]
    """File of Python that registers further tool parsers with vLLM."""
    reasoning_parser_plugin: Annotated[str | None, Default(None)]
    """File of Python that registers further reasoning parsers with vLLM."""
    skip_tokenizer_init: Annotated[bool, Default(True)]
    """Load no tokenizer into the engine, which gets and gives token ids; with `stop_strings` it has one."""


@closed
class GenerationConfig(TypedDict):
    backend: Annotated[GenerationBackend, Default("megatron")]
    """Engine that generates the responses."""
    colocated: ColocatedConfig
    """Which workers generate."""
    max_new_tokens: Annotated[Positive, Default(256)]
    """Longest response, in tokens."""
    temperature: Annotated[float, Gt(0), Default(1.0)]
    """Sampling temperature in training."""
    top_p: Annotated[Share, Default(1.0)]
    """Nucleus sampling: keep the likeliest tokens with this mass; 1: all."""
    top_k: Annotated[Positive | None, Default(None)]
    """Sample among this many most likely tokens; null keeps all."""
    val_temperature: Annotated[NonNegative, Default("${policy.generation.temperature}")]
    """Sampling temperature in validation; 0 takes the likeliest token."""
    val_top_p: Annotated[Share, Default("${policy.generation.top_p}")]
    """`top_p` in validation."""
    quant_cfg: Annotated[str | None, Default("${policy.quant_cfg}")]
    """Weights that generation computes with: those of training, so policy.quant_cfg."""
    val_top_k: Annotated[Positive | None, Default("${policy.generation.top_k}")]
    """`top_k` in validation; null keeps all."""
    stop_token_ids: Annotated[list[Count] | None, Default(None)]
    """Tokens that end a response, besides those that end a turn of the model."""
    stop_strings: Annotated[list[str] | None, Default(None)]
    """Texts that end a response, as its last part."""
    vllm_cfg: VllmConfig
    """With backend vllm: its engines."""
    vllm_kwargs: Annotated[dict[str, Any], Default({})]
    """With backend vllm: further arguments of vllm.LLM, such as {max_num_seqs: 64}."""


@closed
class DynamicBatchingConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Put samples of similar length together, as many as fit."""
    train_mb_tokens: Annotated[
        Positive, Default("${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}")
    ]
    """Tokens of a microbatch in training, padding included."""
    logprob_mb_tokens: Annotated[
        Positive, Default("${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}")
    ]
    """The same when log-probabilities are computed."""
    sequence_length_round: Annotated[Positive | Literal["power_of_two"], Default(64)]
    """Lengths are filled up to a multiple of this, or to the next power of two."""


@closed
class SequencePackingConfig(DynamicBatchingConfig):
    enabled: Annotated[bool, Default(False)]
    """Write samples one after another without padding, as many as fit."""
    algorithm: Annotated[
        Literal["concatenative", "first_fit_decreasing", "modified_first_fit_decreasing"],
        Default("modified_first_fit_decreasing"),
    ]
    """How samples are chosen: in their order (concatenative), or so that microbatches get full."""


@closed
class RouterReplayConfig(TypedDict):
    enabled: Annotated[bool, Default(False)]
    """Training and the policy's log-probabilities take the experts that vLLM's routers chose; in GRPO."""


@closed
class PolicyConfig(TypedDict):
    model_name: Annotated[str, Default("???")]
    """Local folder with the start model in Hugging Face format."""
    hf_config_overrides: Annotated[dict[str, Any], Default({})]
    """What the folder's config.json should say of positions: rope_scaling, rope_theta, max_position_embeddings."""
    tokenizer: TokenizerConfig
    """The tokenizer."""
    precision: Annotated[Literal["float32", "bfloat16"], Default("bfloat16")]
    """Type of weights and activations."""
    quant_cfg: Annotated[str | None, Default(None)]
    """Quantization-aware training: a configuration of ModelOpt by name, or a YAML file's path; null: none."""
    train_global_batch_size: Annotated[Positive, Default(512)]
    """Samples per optimizer step, over all ranks."""
    train_micro_batch_size: Annotated[Positive, Default(4)]
    """Samples per forward and backward pass of a rank."""
    logprob_batch_size: Annotated[Positive, Default(4)]
    """Samples per forward pass of a rank when log-probabilities are computed."""
    logprob_chunk_size: Annotated[Positive | None, Default(None)]
    """Positions of a row that log-probabilities and entropy are computed of at a time; null: all."""
    offload_optimizer_for_logprob: Annotated[bool, Default(False)]
    """The optimizer's state and main weights leave the GPU for log-probabilities, and before, for vLLM beside them."""
    generation_batch_size: Annotated[Positive, Default(32)]
    """Samples that a rank generates at a time."""
    max_total_sequence_length: Annotated[Positive, Default(512)]
    """Longest prompt and response together, in tokens."""

    # Microbatches by a number of tokens instead of samples. Not both.
    dynamic_batching: DynamicBatchingConfig
    """Microbatches by a number of tokens, padded."""
    sequence_packing: SequencePackingConfig
    """Microbatches by a number of tokens, packed."""

    megatron_cfg: MegatronConfig
    """Megatron-Core: parallelism, recomputation, offloading, optimizer."""

    generation: GenerationConfig
    """How responses are sampled."""

    router_replay: RouterReplayConfig
    """Of a model with experts: whether generation's choices of them are replayed."""


@closed
class TeacherConfig(TypedDict):
    model_name: Annotated[str | None, Default(None)]
    """Local folder of the teacher in Hugging Face format, with the student's vocabulary."""
    precision: Annotated[Literal["float32", "bfloat16"] | None, Default(None)]
    """Type of its weights; null: policy.precision."""
    logprob_batch_size: Annotated[Positive | None, Default(None)]
    """Samples per forward pass of a rank; null: policy.logprob_batch_size."""
