"""NeMo-RL's keys that the schema does not have: what each becomes here, and why.

Each row of `_ROWS` is a key below a section, its types, a verdict and a reason:

- `honoured`: code of `translation.py` or `dtensor.py` makes this project's keys of it; the reason says which.
- `only V|W`: these values are what happens here anyway; any other is refused, since leaving it out would train
  something else. A name in brackets at the beginning of the reason is the feature that is missing.
- `none`: without effect here, whatever its value.
- `refused`: whatever its value, but null.

A section whose own row ends with `.*` holds anything. A line that begins with blanks goes on with the one before. A
key that is in the schema needs no row: it means there what it means here. Names and types are those of NeMo-RL's typed
configuration at `COMMIT`, and of its exemplars; a test compares them. Rejected: a schema that takes these keys and
ignores them, which would hide from a user that a setting has no effect.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from nemo_rl_offload.config.full_schema import section_at
from nemo_rl_offload.config.types import keys_of

REPOSITORY, COMMIT = "https://github.com/NVIDIA-NeMo/RL", "7ea279ab (2026-08-22)"
Verdict = Literal["honoured", "only", "none", "refused"]

_ROWS = r"""
[]
reward_penalties                map?  honoured its keys say
data_plane                      map?  honoured its keys say
on_policy_distillation          map?  refused [on-policy distillation within GRPO] distillation has an algorithm of
    its own
async_rl                        map?  honoured its keys say
teachers                        list? refused [cross-tokenizer distillation] there is one teacher, with the student's
    vocabulary
rm.*                            map?  refused [reward models] none is trained here
ppo.*                           map?  refused [PPO] there is no value model
value.*                         map?  refused [PPO] there is no value model
value_loss_fn.*                 map?  refused [PPO] there is no value model
rollout_checkpointing.*         map?  refused [the single controller] what was generated ahead is not saved
rollout_recovery.*              map?  refused [the single controller] what was generated ahead is not saved
token_capture.*                 map?  none how responses are recorded for another program

[async_rl]
sampler.*                       map   honoured the bound on versions becomes grpo.async_grpo; 0 generates and trains
    by turns
recompute_kv_cache_after_weight_updates bool honoured becomes grpo.async_grpo's key of this name
min_groups_for_streaming_train  int   none a step trains once all of its responses are there; the sum is the same
max_inflight_prompts            int   none the sampler's bound says what is under way
max_buffered_rollouts           int   none the sampler's bound says what waits
diagnostics                     bool  none figures for developers
rollout_failure.*               map   none an engine that fails ends the run, or starts it again:
    fault_tolerance.max_restarts
stall_watchdog.*                map   none an engine that fails ends the run, or starts it again:
    fault_tolerance.max_restarts
generation_fleet_health.*       map   none an engine that fails ends the run, or starts it again:
    fault_tolerance.max_restarts
generation_router.enabled       bool  none one server has all engines
generation_router.port_range_low int  none read by a server for other programs
generation_router.port_range_high int none read by a server for other programs
generation_router.backend_timeout_s num none read by a server for other programs
generation_router.connect_timeout_s num none read by a server for other programs
generation_router.no_healthy_backend_status int none read by a server for other programs

[reward_penalties]
penalize_duplicated_reasoning   bool  only false [other penalties of turns] rewards are the environment's
penalize_empty_final_answer     bool  only false [other penalties of turns] rewards are the environment's
penalize_malformed_think_tag    bool  only false [other penalties of turns] rewards are the environment's
penalize_unwanted_tokens        bool  only false [other penalties of turns] rewards are the environment's
token_ids.*                     map?  none read by the penalties alone

[data_plane]
enabled                         bool  none batches go from process to process by Ray, with the same content
impl                            text  none names another way for batches to travel
backend                         text  none names another way for batches to travel
storage_capacity                int   none of another way for batches to travel
num_storage_units               int   none of another way for batches to travel
claim_meta_poll_interval_s      num   none of another way for batches to travel
global_segment_size             int   none of another way for batches to travel
local_buffer_size               int   none of another way for batches to travel
controller_address              text  none of another way for batches to travel
ack_timeout_ms                  int   none of another way for batches to travel
observability.*                 map   none of another way for batches to travel

[policy]
reward_model_cfg.enabled        bool  only false [reward models] none is trained here
reward_model_cfg.reward_model_type text  none read with reward models alone
pretrained_checkpoint.*         map?  refused [checkpoints of other programs] runs start from a Hugging Face folder
optimizer.*                     map?  honoured becomes megatron_cfg.optimizer where DTensor trains; Megatron-Core's
    own section counts otherwise
scheduler.*                     seq?  honoured becomes megatron_cfg.scheduler where DTensor trains; Megatron-Core's
    own section counts otherwise
max_grad_norm                   num?  honoured becomes megatron_cfg.optimizer.clip_grad where DTensor trains
make_sequence_length_divisible_by int   none rows, and sequences of packs that ranks share, are padded to what the
    layout needs, and padding is not learned
refit_buffer_size_gb            num   none weights go over in buckets of a size of their own
is_vlm                          bool  only false [images and audio] models read text alone
activation_checkpointing_enabled bool  none NeMo-RL does not read it either
dequantize_base_checkpoint      bool  none quantized weights become those of policy.precision as they are read
quant_calib_data                text? none weights are quantized by their own magnitudes
quant_calib_size                int?  none weights are quantized by their own magnitudes
quant_batch_size                int?  none weights are quantized by their own magnitudes
quant_sequence_length           int?  none weights are quantized by their own magnitudes
disable_modelopt_layer_spec     bool  none layers stay those that they are without quant_cfg

[policy.draft]
enabled                         bool  only false [draft models] none is trained beside the policy
model_name                      text? none read by the draft model alone
loss_weight                     num   none read by the draft model alone
num_layers                      int?  none read by the draft model alone
aux_layer_indices               list? none read by the draft model alone

[policy.tokenizer]
use_fastokens                   bool  none another implementation of the same tokenizer
use_processor                   bool  only false [images and audio] models read text alone
audio.*                         map   none models read text alone
video.*                         map   none models read text alone

[policy.sequence_packing]
microbatch_order                text  none the sum over a step's microbatches is the same in any order
fuse_loss                       bool  none how the loss of a pack is computed; the sum is the same

[policy.dtensor_cfg]
enabled                         bool  honoured true: Megatron-Core trains what these keys and policy.optimizer
    describe
_v2                             bool  none names an implementation
tensor_parallel_size            int   honoured becomes megatron_cfg.tensor_model_parallel_size
context_parallel_size           int   honoured becomes megatron_cfg.context_parallel_size
expert_parallel_size            int   honoured becomes megatron_cfg.expert_model_parallel_size
sequence_parallel               bool  honoured becomes megatron_cfg.sequence_parallel; also on where experts need it
activation_checkpointing        bool  honoured becomes megatron_cfg.activation_checkpointing
env_vars                        map?  honoured becomes megatron_cfg.env_vars, without the empty ones
cpu_offload                     bool  none weights stay on the device; megatron_cfg.offload_modules saves memory here
custom_parallel_plan            text? none the layout follows the parallel sizes
dp_replicate_size               int   none all data-parallel ranks are alike
defer_fsdp_grad_sync            bool  none when gradients travel
clear_cache_every_n_steps       int?  none megatron_cfg.empty_unused_memory_level hands memory back
moe_parallelizer.*              map   none how DTensor wraps experts
automodel_kwargs.*              map   none kernels and wrappers of DTensor's models
automodel_kwargs.force_hf       bool  honoured says whose modules lora_cfg's adapters stand beside in a hybrid model
automodel_kwargs.freeze_config.* map   none towers for images and audio
automodel_kwargs.freeze_config.freeze_language_model bool only false [frozen parts of a model] all weights are trained
automodel_kwargs.freeze_config.freeze_embeddings     bool only false [frozen parts of a model] all weights are trained

[policy.dtensor_cfg.lora_cfg]
enabled                         bool  honoured becomes megatron_cfg.peft.enabled
target_modules                  list  honoured becomes megatron_cfg.peft.target_modules, in Megatron's names
exclude_modules                 list  honoured the modules that are left become megatron_cfg.peft.target_modules
match_all_linear                bool  honoured the projections and output_layer become megatron_cfg.peft.target_modules
dim                             int   honoured becomes megatron_cfg.peft.dim
alpha                           int   honoured becomes megatron_cfg.peft.alpha
dropout                         num   honoured becomes megatron_cfg.peft.dropout
dropout_position                text  honoured becomes megatron_cfg.peft.dropout_position
lora_A_init                     text  honoured becomes megatron_cfg.peft.lora_A_init_method, kaiming for uniform
use_triton                      bool  none a way to compute the same

[policy.megatron_cfg]
converter_type                  text  none the model's folder names its family
pipeline_dtype                  text  none it follows policy.precision
defer_fp32_logits               bool  none logits become float32 piece by piece, or are never made
    (use_fused_linear_logprobs)
force_reconvert_from_hf         bool  none weights are read from the model's folder each time
force_overwrite_initial_ckpt    bool  none weights are read from the model's folder each time
moe_enable_deepep               bool  honoured becomes moe_flex_dispatcher_backend: deepep
moe_grouped_gemm                bool  none a way to compute the experts; the result is the same
moe_hybridep_num_sms            int   honoured becomes model_overrides.moe_flex_dispatcher_num_sms with hybridep
hybridep_num_ranks_per_nvlink_domain int   honoured becomes env_vars.NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN
    with hybridep
hybridep_use_mnnvl              bool  honoured becomes env_vars.USE_MNNVL with hybridep
moe_router_enable_expert_bias   bool  honoured becomes model_overrides.moe_router_enable_expert_bias
moe_router_num_groups           int?  honoured becomes model_overrides.moe_router_num_groups, unless null
moe_router_group_topk           int?  honoured becomes model_overrides.moe_router_group_topk, unless null
moe_pad_experts_for_cuda_graph_inference bool  none read by another engine for generation
inference_moe_token_dispatcher_type text  none read by another engine for generation
inference_grouped_gemm_backend  text  none read by another engine for generation
use_fused_weighted_squared_relu bool  none a kernel; the result is the same
use_gloo_process_groups         bool  none which library sends small messages
clear_memory_caches_before_refit bool  none caches are kept by length and layout
track_moe_metrics               bool  none moe_per_layer_logging asks for them
train_iters                     int   none the algorithm's section says how many steps there are
freeze_vision_model             bool  none models read text alone
freeze_vision_projection        bool  none models read text alone
freeze_sound_encoder            bool  none models read text alone
freeze_sound_projection         bool  none models read text alone
radio_force_cpe_eval_mode       bool  none models read text alone
freeze_config.*                 map   refused [frozen parts of a model] all weights are trained, but
    freeze_moe_router's
use_linear_ce_fusion_loss       bool  none use_fused_linear_logprobs is this switch now
linear_ce_fusion_chunk_size     int   none fused_linear_logprobs_chunk_size is this number now
calculate_per_token_loss        bool  none how a loss is divided is said by loss_fn
do_not_average_loss             bool  none how a loss is divided is said by loss_fn
cp_normalize                    bool  none how a loss is divided is said by loss_fn
scale_loss_by_dp_cp_size        bool  none how a loss is divided is said by loss_fn

[policy.megatron_cfg.optimizer]
bf16                            bool  none it follows policy.precision
fp16                            bool  only false [float16] precision is float32 or bfloat16
params_dtype                    text  none it follows policy.precision
overlap_cpu_optimizer_d2h_h2d   bool  none both directions are always busy at once where optimizer_cpu_offload is on

[policy.megatron_cfg.scheduler]
override_opt_param_scheduler    bool  none a run that goes on keeps the schedule of its configuration

[policy.megatron_cfg.distributed_data_parallel_config]
average_in_collective           bool  none when gradients are divided; the mean is the same
use_custom_fsdp                 bool  only false [Megatron-FSDP] weights are not split over data-parallel ranks
data_parallel_sharding_strategy text  none read with use_custom_fsdp alone

[policy.megatron_cfg.checkpoint]
async_save                      bool  honoured becomes checkpointing.is_async
ckpt_assume_constant_structure  bool  none checkpoints are planned anew each time
ckpt_fully_parallel_save_process_group text  none how ranks share the writing
ckpt_fully_parallel_load_process_group text  none how ranks share the reading
ckpt_fully_parallel_load_exchange_algo text  none how ranks share the reading
fully_parallel_save_process_group text none how ranks share the writing
fully_parallel_load_process_group text none how ranks share the reading
fully_parallel_load_exchange_algo text none how ranks share the reading

[policy.megatron_cfg.fp8_cfg]
force_clear_fp8_caches          bool  none copies of weights in 8 bits are freed where memory is handed back
    or lacks

[policy.generation]
model_name                      text  none it is policy.model_name
bad_words                       list? only null  [forbidden words] any token may be sampled
use_async_rollouts              bool  only false [the asynchronous engine's older key] vllm_cfg.async_engine says it
port_range_low                  int   none ports are free ones
port_range_high                 int   none ports are free ones
refit_transport                 text? none weights go over by Ray, or stay where they are
refit_cfg.*                     map?  none weights go over by Ray, or stay where they are
real_quant                      bool  only false [engines that multiply in NVFP4] they compute with the same weights in
    policy.precision
real_quant_ignore               list  none read with real_quant alone
real_quant_export_cpu_offload   bool  none read with real_quant alone
nvfp4_pertoken_rollout          bool  only false [engines that multiply in NVFP4] they compute with the same weights in
    policy.precision
lora_refit_mode                 text  none engines get merged weights
worker_extension_cls_fqn        text? none read by another engine
sglang_cfg.*                    map   none read by SGLang alone
sglang_kwargs.*                 map   none read by SGLang alone
trtllm_cfg.*                    map   none read by TensorRT-LLM alone
trtllm_kwargs.*                 map   none read by TensorRT-LLM alone
dynamo_cfg.*                    map   none read by Dynamo alone
_pad_token_id                   int   none it is the tokenizer's
_debug_payload_metrics          bool  none figures for developers
_mtp_weights_from_refit         bool  none read by vLLM alone

[policy.generation.vllm_cfg]
cap_max_tokens_to_context       bool  none a response ends where its context does
distributed_executor_backend    text? none an engine's processes are started here
enable_expert_parallel          bool  none expert_parallel_size says it
enable_return_routed_experts    bool  none policy.router_replay.enabled says it
enable_thinking                 bool  none read by a server of chats alone
enable_vllm_metrics_logger      bool  none read by a server, or figures for developers
enforce_monotonicity            bool  none read by a server, or figures for developers
expose_http_server              bool  honoured true: accepted with data.env_name nemo_gym
http_refit_api_key_env_var      text? none read by a server, or figures for developers
http_refit_server_port          int?  none read by a server, or figures for developers
logprobs_mode                   text  none log-probabilities are those of the
    distribution that is sampled
pruned_layers                   list? refused [pruned models] an engine has the model that is trained
reset_encoder_cache_after_weight_update bool  none models read text alone
use_tqdm                        bool  none read by a server, or figures for developers
limit_mm_per_prompt.*           map   none models read text alone
max_num_seqs                    int   none NeMo-RL does not read it either; vllm_kwargs.max_num_seqs is the engine's
video.*                         map   none models read text alone
vllm_metrics_logger_interval    num   none read by a server, or figures for developers
zmq_refit_server_port           int?  none read by a server, or figures for developers

[policy.generation.mcore_generation_config]
tensor_model_parallel_size      int   none responses are generated in training's layout
pipeline_model_parallel_size    int   none responses are generated in training's layout
context_parallel_size           int   none responses are generated on whole sequences
expert_model_parallel_size      int   none responses are generated in training's layout
expert_tensor_parallel_size     int   none responses are generated in training's layout
sequence_parallel               bool  none off while responses are generated
activation_checkpointing        bool  none nothing is kept for a backward pass
moe_router_dtype                text? none as in training
moe_router_num_groups           int?  none as in training
moe_router_group_topk           int?  none as in training
transformer_impl                text  none as in training
expose_http_server              bool  honoured without effect where vLLM generates
parsers                         list  none read by a server for other programs
num_speculative_tokens          int   none responses have the same distribution
block_size_tokens               int   none of another cache of keys and values
buffer_size_gb                  num   none of another cache of keys and values
buffer_guaranteed_fraction      num   none of another cache of keys and values
inference_moe_token_dispatcher_type text none of another engine in Megatron-Core
cuda_graph_impl                 text  none generation captures no graphs; the responses are the same
enable_chunked_prefill          bool  none of another engine in Megatron-Core
enable_prefix_caching           bool  none of another engine in Megatron-Core
inference_cuda_graph_scope      text  none generation captures no graphs; the responses are the same
inference_grouped_gemm_backend  text  none of another engine in Megatron-Core
kv_cache_management_mode        text  none the cache is made anew for each batch
logging_step_interval           int   none of another engine in Megatron-Core
mamba_inference_conv_states_dtype text  none states are float32
mamba_inference_ssm_states_dtype text  none states are float32
materialize_only_last_token_logits bool  none of another engine in Megatron-Core
max_model_len                   int   none policy.max_total_sequence_length is the limit
max_tokens                      int   none policy.generation_batch_size is the limit
num_cuda_graphs                 int   none generation captures no graphs; the responses are the same
refit_backend                   text  none weights go over by Ray, or stay where they are
unified_memory_level            int   none of another engine in Megatron-Core
use_cuda_graphs_for_non_decode_steps bool  none generation captures no graphs; the responses are the same

[loss_fn]
positive_example_nll_weight     num   only 0.0   [a likelihood term for correct responses] the loss has none
alpha                           num   refused [cross-tokenizer distillation] teacher and student share a vocabulary
ce_loss_scale                   num   refused [cross-tokenizer distillation] teacher and student share a vocabulary
dynamic_loss_scaling            bool  refused [cross-tokenizer distillation] teacher and student share a vocabulary
exact_token_match_only          bool  refused [cross-tokenizer distillation] teacher and student share a vocabulary
gold_loss                       bool  refused [cross-tokenizer distillation] teacher and student share a vocabulary
kd_loss_mode                    text  refused [cross-tokenizer distillation] teacher and student share a vocabulary
kl_loss_weight                  num   refused [cross-tokenizer distillation] teacher and student share a vocabulary
normalize_teacher_by_vocab      bool  refused [cross-tokenizer distillation] teacher and student share a vocabulary
projection_matrix_paths         list  refused [cross-tokenizer distillation] teacher and student share a vocabulary
reverse_kl                      bool  refused [cross-tokenizer distillation] teacher and student share a vocabulary
student_vocab_size              int   refused [cross-tokenizer distillation] teacher and student share a vocabulary
sum_weights_metric              text? refused [cross-tokenizer distillation] teacher and student share a vocabulary
teacher_gold_loss               list  refused [cross-tokenizer distillation] teacher and student share a vocabulary
teacher_vocab_sizes             list  refused [cross-tokenizer distillation] teacher and student share a vocabulary
teacher_weights                 list  refused [cross-tokenizer distillation] teacher and student share a vocabulary
teacher_xtoken_loss             list  refused [cross-tokenizer distillation] teacher and student share a vocabulary
temperature                     num   refused [cross-tokenizer distillation] teacher and student share a vocabulary
uncommon_topk                   int   refused [cross-tokenizer distillation] teacher and student share a vocabulary
vocab_topk                      int   refused [cross-tokenizer distillation] teacher and student share a vocabulary
xtoken_loss                     bool  refused [cross-tokenizer distillation] teacher and student share a vocabulary

[grpo]
val_start_at                    int   only -1    [validation from a later step on] the first is after val_period steps
skip_reference_policy_logprobs_calculation bool  honoured true: accepted where loss_fn.reference_policy_kl_penalty is
    0, which leaves the reference model out
invalid_tool_call_strategy      text? none read with penalize_invalid_tool_call alone
penalize_invalid_tool_call      bool  honoured false: invalid_tool_call_advantage is null
penalize_malformed_thinking     bool  honoured false: malformed_thinking_advantage is null
calculate_advantages_on_gpu     bool  none where advantages are computed
deduplicate_multimodal_data     bool  none models read text alone
debug_payload_metrics           bool  none figures for developers
best_at_k_k                     int   none NeMo-RL does not read it either
best_at_k_m                     int   none NeMo-RL does not read it either
use_best_at_k                   bool  none NeMo-RL does not read it either
use_combined_training           bool  none NeMo-RL does not read it either
combined_training_weight_mode   text  none NeMo-RL does not read it either
combined_training_best_at_k_weight num none NeMo-RL does not read it either
combined_training_pass_at_1_weight num none NeMo-RL does not read it either
dynamic_sampling_oversample_ratio num none NeMo-RL does not read it either
zero_variance_prompt_filtering  bool  none NeMo-RL does not read it either
num_val_generations_per_prompt  int   none NeMo-RL does not read it either; val_num_generations_per_prompt says it

[grpo.async_grpo]
max_generation_failures         int   none an engine that fails ends the run, or starts it again:
    fault_tolerance.max_restarts

[grpo.adv_estimator]
normalize_rewards               bool  honoured becomes grpo.normalize_rewards
use_leave_one_out_baseline      bool  honoured becomes grpo.use_leave_one_out_baseline

[grpo.reward_shaping]
stop_properly_penalty_coef      num?  honoured 0: responses without an end have the reward 0 and no other penalty; any
    other value is refused

[sft]
val_batches                     int   honoured times val_global_batch_size it becomes max_val_samples
val_global_batch_size           int   honoured times val_batches it becomes max_val_samples
val_micro_batch_size            int   none validation has microbatches of policy.train_micro_batch_size
only_unmask_final               bool  only false [learning from the last turn alone] all turns of the assistant are
    learned

[dpo]
val_batches                     int   honoured times val_global_batch_size it becomes max_val_samples
val_global_batch_size           int   honoured times val_batches it becomes max_val_samples
val_micro_batch_size            int   none validation has microbatches of policy.train_micro_batch_size
preference_loss                 text  only "dpo" [other preference losses] dpo is the only one
gt_reward_scale                 num   none read by other preference losses alone

[data]
add_generation_prompt           bool  honoured what the template opens an assistant's turn with is given, never
    learned: true, or a template without it
add_system_prompt               bool  only true  [dropped system prompts] conversations are taken as they are
num_workers                     int   none data is read before training
use_multiple_dataloader         bool  only false [batches by data set] they are drawn from all data sets together
num_prompts_per_dataloader      int   none read with use_multiple_dataloader alone
custom_dataloader               text? none read with use_multiple_dataloader alone
default                         map?  honoured keys that data.train and data.validation lack
dataset_name                    text? none NeMo-RL does not read it either; data.train.dataset_name says it

[env]
should_use_nemo_gym             bool  honoured true: data.env_name is nemo_gym
should_log_nemo_gym_responses   bool  none samples.jsonl has responses
should_mask_flagged_samples     bool  honoured as env.nemo_gym.mask_flagged_samples
reward_model.*                  map?  none read where an environment of that name scores
code.*                          map?  none read where an environment of that name scores
dapo.*                          map?  none read where an environment of that name scores
vlm.*                           map?  none read where an environment of that name scores
mmpr-tiny.*                     map?  none read where an environment of that name scores
code_jaccard.*                  map?  none read where an environment of that name scores
multichoice_qa.*                map?  none read where an environment of that name scores
sliding_puzzle_game.*           map?  refused [games] environments are those of docs/algorithms.md
clevr-cogent.*                  map?  none read where an environment of that name scores
geometry3k.*                    map?  none read where an environment of that name scores
refcoco.*                       map?  none read where an environment of that name scores

[env.math]
math_verify_impl                text? honoured dapo_math_verify becomes env.math.comparison dapo
verifier_type                   text? honoured english_multichoice and multilingual_multichoice become
    env.math.comparison
stop_strings                    list? only null  [stop strings] a response ends at the tokenizer's end tokens

[env.math_multi_reward]
math_verify_impl                text? none its rewards are compared as text
verifier_type                   text? none its rewards are compared as text
stop_strings                    list? only null  [stop strings] a response ends at the tokenizer's end tokens

[logger]
log_dir                         text  none metrics are in the run directory, beside the checkpoints
tensorboard.*                   map   none its files are in the run directory

[logger.wandb]
entity                          text? none WANDB_ENTITY names it
log_nemo_gym_full_result_tables bool  none samples.jsonl has responses

[logger.mlflow]
artifact_location               text? none nothing but metrics goes there
run_id                          text? none a run that goes on finds its own

[checkpointing]
model_save_format               text? none `nemo-rl-offload export` writes safetensors
save_consolidated               bool  none `nemo-rl-offload export` writes a Hugging Face folder
model_cache_dir                 text  none of another format of checkpoints
model_repo_id                   text  none of another format of checkpoints
is_peft                         bool  none a run with adapters saves those
peft_config.*                   map?  none a run with adapters saves those
pretrained_checkpoint.*         map?  refused [checkpoints of other programs] runs start from a Hugging Face folder
ft_keep_latest_k                int?  only null  [checkpoints beside the best] keep_top_k says how many are kept
ft_save_period                  int?  only null  [checkpoints beside the best] save_period says when they are written
save_data_plane                 bool  none batches go from process to process by Ray

[cluster]
segment_size                    int?  none nodes are taken in Ray's order
master_port_range_low           int   none ports are free ones
master_port_range_high          int   none ports are free ones
"""

_OF_A_DATA_SET = r"""
dataset_name                    text? honoured becomes dataset_name, or the keys of a local file
data_path                       text? honoured becomes path
input_key                       text  honoured becomes input_key
output_key                      text  honoured becomes output_key
prompt_key                      text  only "prompt" [other names of columns] pairs are recognized by their usual names
chosen_key                      text  only "chosen" [other names of columns] pairs are recognized by their usual names
rejected_key                    text  only "rejected" [other names of columns] pairs are recognized by their usual
    names
chat_key                        text  only "messages" [other names of columns] conversations are recognized by their
    usual names
tool_key                        text? only "tools"|null [other names of columns] conversations are recognized by their
    usual names
system_key                      text? only null  [other names of columns] conversations are recognized by their usual
    names
system_prompt                   text? only null  [other names of columns] data.system_prompt_file gives one
use_preserving_dataset          bool  none how records are held in memory
subset                          text? only null  [parts of data sets on the hub] download the part, and give its
    folder as path
prompt_file                     text? honoured becomes data.prompt_file
system_prompt_file              text? honoured becomes data.system_prompt_file
env_name                        text  honoured becomes data.env_name
processor                       text  honoured the algorithm and the environment say how records become samples;
    others are refused
download_dir                    text? none the hub's cache is where HF_HOME says
split_validation_size           num   honoured becomes split_validation_size
repeat                          int   honoured becomes repeat
num_samples                     int?  only null  [parts of data sets] data sets are taken as a whole
data_files                      text? refused [raw text] records are conversations, pairs or problems
text_key                        text? refused [raw text] records are conversations, pairs or problems
characters_per_sample           int?  refused [raw text] records are conversations, pairs or problems
num_frames                      int   none models read text alone
video_sampling_style            text  none models read text alone
video_target_num_patches        int?  none models read text alone
video_temporal_patch_size       int   none models read text alone
video_maintain_aspect_ratio     bool  none models read text alone
min_generation_tokens           int   none models read text alone
"""
DATA_SETS = ("data.train", "data.validation", "data.default")
"""Sections that describe a data set."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "num": (int, float),
    "text": (str,),
    "list": (list,),
    "map": (dict,),
    "seq": (list, dict),
}
_WORDS_FOR = {"true": True, "false": False, "null": None}
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "num": "a number",
    "text": "text",
    "list": "a list",
    "map": "a section of keys",
    "seq": "a list of sections",
}


@dataclass(frozen=True)
class Row:
    """What becomes of one key."""

    path: str
    types: str
    """One of `_TYPES`; with `?`, null too."""
    verdict: Verdict
    values: tuple[Any, ...]
    """With `only`, what is accepted."""
    feature: str
    """What is missing here, where a value is refused."""
    reason: str
    is_open: bool
    """Whether the section holds anything."""

    def fits(self, value: Any) -> bool:
        """Whether the value is of one of the types."""
        if value is None:
            return self.types.endswith("?")
        allowed = _TYPES[self.types.rstrip("?")]
        return isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool))

    @property
    def allowed(self) -> str:
        """The types in words."""
        return _WORDS[self.types.rstrip("?")] + (", or null" if self.types.endswith("?") else "")


@cache
def rows() -> Mapping[str, Row]:
    """All rows by the key's whole path, without those that the schema has too."""
    parts = re.split(r"^\[([\w.]*)\]$", _ROWS, flags=re.MULTILINE)[1:]
    found = [row for section, text in zip(parts[::2], parts[1::2], strict=True) for row in _parse(section, text)]
    found += [row for section in DATA_SETS for row in _parse(section, _OF_A_DATA_SET)]
    for each in ("split text?", "seed int", "max_samples int?"):
        found += _parse("data.default", f"{each} honoured as in data.train")
    return {row.path: row for row in found if not _is_in_schema(row.path)}


def _is_in_schema(path: str) -> bool:
    *parents, key = path.split(".")
    return key in keys_of(section_at(parents))


def _parse(section: str, text: str) -> Iterator[Row]:
    for line in filter(None, re.sub(r"\n +", " ", text).splitlines()):
        key, types, verdict, rest = line.split(None, 3)
        values: tuple[Any, ...] = ()
        if verdict == "only":
            given, rest = rest.split(None, 1)
            values = tuple(
                _WORDS_FOR.get(value) if value in _WORDS_FOR else _value(value) for value in given.split("|")
            )
        _, feature, reason = re.split(r"^(?:\[(.+?)\] )?", rest.strip(), maxsplit=1)
        path = f"{section}.{key}".lstrip(".")
        is_open = path.endswith(".*")
        yield Row(path.removesuffix(".*"), types, cast("Verdict", verdict), values, feature or "", reason, is_open)


def _value(text: str) -> str | float:
    if text.startswith('"'):
        return text.strip('"')
    return float(text) if "." in text else int(text)


@cache
def sections() -> frozenset[str]:
    """The paths of sections that hold other rows."""
    return frozenset(".".join(path.split(".")[:depth]) for path in rows() for depth in range(1, path.count(".") + 1))


def keys_in(section: str) -> list[str]:
    """The names of the keys and sections that rows have right below a section."""
    prefix = f"{section}." if section else ""
    names = [path.removeprefix(prefix) for path in (*rows(), *sections()) if path.startswith(prefix)]
    return sorted({name.partition(".")[0] for name in names})
