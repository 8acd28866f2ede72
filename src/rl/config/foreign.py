"""Maps setting names of prime-rl, verl, TRL and OpenRLHF to the keys of rl, for hints on unknown
keys.

docs/migrating.md is made from this table (`uv run scripts/reference.py`).
"""

from typing import NamedTuple


class Foreign(NamedTuple):
    """Other trainers' names for one setting, and the key to use here."""

    names: str
    """Names separated by spaces. A dotted name matches as the end of a key, in any section."""
    here: str
    """Key or flag here, or two joined by `and`; empty if there is none."""
    note: str = ""
    """Further explanation; if `here` is empty, why there is no such setting."""

    def hint(self, name: str = "") -> str:
        """Returns the hint for an unknown key; `name` is the part of the key that is known
        elsewhere, if not all of it."""
        called = f"{name} is called {self.here} here".strip() if self.here else ""
        return ": ".join(filter(None, [called, self.note]))


ROWS = (
    # model and lengths
    "model_name_or_path name_or_path model_name model.path pretrain actor_rollout_ref.model.path "
    "-> model.name",
    "seq_len max_seq_len max_seq_length max_model_length max_length -> model.max_model_len | "
    "prompt and answer together",
    "max_prompt_length prompt_max_len -> model.max_model_len | prompt and answer together; "
    "prompts have no limit of their own",
    "max_completion_length max_response_length response_length generate_max_len max_new_tokens -> "
    "orchestrator.sampling.max_tokens | new tokens in one turn",
    "torch_dtype bf16 fp16 -> model.dtype | bfloat16 or float32",
    "optimization_dtype reduce_dtype -> | master weights, optimizer state and reductions are "
    "always float32 here",
    "tokenizer.chat_template chat_template_path -> model.chat_template",
    "tokenizer.name tokenizer_name_or_path -> | the model's own tokenizer is used here",
    "attn_implementation attn -> trainer.attention",
    # length of a run, and what a step trains on
    "total_training_steps max_train_steps train_steps num_steps total_steps -> max_steps",
    "total_epochs num_train_epochs num_episodes num_epochs -> max_steps | in batches; passes over "
    "the data are counted by `rl sft` alone (sft.epochs)",
    "train_batch_size rollout_batch_size generation_batch_size gen_batch_size global_batch_size "
    "-> orchestrator.batch_size | in episodes (rollouts, if there is one agent), which are "
    "prompts times group_size",
    "rollouts_per_example num_generations n_samples_per_prompt num_samples_per_prompt rollout.n "
    "-> orchestrator.group_size",
    "per_device_train_batch_size gradient_accumulation_steps micro_batch_size "
    "micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "log_prob_micro_batch_size_per_gpu ppo_max_token_len_per_gpu train_max_tokens_per_gpu "
    "use_dynamic_bsz use_dynamic_batch -> trainer.micro_batch_tokens | in tokens per pass and "
    "rank; the number of passes per batch follows from it",
    "mini_batch_size ppo_mini_batch_size num_mini_batches steps_per_generation -> "
    "trainer.minibatches | number of parts of a batch",
    "ppo_epochs num_ppo_epochs max_epochs num_iterations -> trainer.epochs | passes over a batch",
    "max_async_level async_level staleness_threshold max_staleness async_queue_size -> max_lag | "
    "0 is on-policy",
    "max_concurrent max_inflight_rollouts oversampling_factor -> "
    "orchestrator.environment.max_generating | max_lag and batch_size determine how many rollouts "
    "are in flight; this limits them",
    # loss
    "loss_mode policy_loss_type loss_type -> trainer.loss.type",
    'loss.type.ppo loss.type.grpo loss.type.dapo -> trainer.loss.type = "clip"',
    'loss.import_path -> trainer.loss.function | with trainer.loss.type = "custom"',
    "loss_agg_mode -> trainer.loss.aggregation",
    "epsilon epsilon_low cliprange cliprange_low clip_ratio clip_ratio_low clip_eps eps_clip -> "
    'trainer.loss.clip_low | with trainer.loss.type = "clip", "cispo" or "gspo"',
    "epsilon_high cliprange_high clip_ratio_high -> trainer.loss.clip_high | with "
    'trainer.loss.type = "clip", "cispo" or "gspo"',
    "eps_clip_low_high -> trainer.loss.clip_low and trainer.loss.clip_high | with "
    'trainer.loss.type = "clip", "cispo" or "gspo"',
    'ipo_mask_low -> trainer.loss.mask_low | with trainer.loss.type = "dppo"',
    'ipo_mask_high -> trainer.loss.mask_high | with trainer.loss.type = "dppo"',
    "token_mask_low token_mask_high -> trainer.loss.token_mask | lowest and highest ratio "
    "together, [0.125, 8.0]",
    "sequence_mask_low sequence_mask_high -> trainer.loss.sequence_mask | lowest and highest "
    "ratio together, [0.125, 8.0]",
    "geo_mask_low geo_mask_high -> trainer.loss.geometric_mask | lowest and highest ratio "
    "together, [0.125, 8.0]",
    "ratio_type importance_sampling_level rollout_is -> trainer.loss.importance",
    "vllm_importance_sampling_cap tis_imp_ratio_cap vllm_is_truncated_threshold "
    'rollout_is_threshold -> trainer.loss.truncate | with trainer.loss.type = "policy_gradient", '
    "or a clipping loss with several optimizer steps per batch",
    "vllm_importance_sampling_correction enable_vllm_is_correction -> trainer.loss.importance | "
    "on by default; none switches it off",
    "beta kl_coef init_kl_coef kl_loss_coef kl_beta -> trainer.loss.kl_coefficient",
    "use_kl_loss use_kl_in_reward -> trainer.loss.kl_coefficient | a value above 0 switches it "
    "on, in the loss",
    "kl_loss_type kl_penalty -> trainer.loss.kl_estimator",
    "ref_model ref.model.path reference_model -> trainer.loss.kl_reference",
    "entropy_coeff entropy_coef entropy_loss_coef -> trainer.loss.entropy_coefficient",
    "teacher_tau -> trainer.loss.teacher_coefficient",
    # credit and environments
    "adv_estimator advantage_estimator advantage.type -> orchestrator.credit.type",
    "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm -> orchestrator.credit.type | "
    "grpo divides by the standard deviation, dr_grpo does not",
    "critic critic_pretrain critic_learning_rate value_coef vf_coef value_clip cliprange_value "
    "gamma lam lambd gae_lambda -> | there is no critic, value loss or discount here; credit "
    "comes from groups of rollouts (orchestrator.credit)",
    "reward_funcs reward_func reward_function custom_reward_function remote_rm_url "
    "reward_pretrain reward_model -> orchestrator.environment.reward | file.py:function, for a "
    "dataset; packaged environments bring their own",
    "env -> orchestrator.environment",
    "env_id environment_id env.id -> orchestrator.environment.id",
    "env.args -> orchestrator.environment.args",
    "env.name -> orchestrator.environment.name",
    "prompt_data train_files dataset_name train_dataset -> orchestrator.environment.dataset",
    "val_files -> orchestrator.environment.eval_dataset",
    "input_key prompt_key label_key -> | the columns of a dataset are called prompt and answer "
    "here",
    "env_ratios prompt_data_probs -> orchestrator.environment.weight | of each environment",
    "online_difficulty_filtering dynamic_filtering filter_groups filter_groups.enable "
    "dynamic_sampling -> orchestrator.replace_no_signal | on by default",
    "easy_threshold -> orchestrator.environment.difficulty.easy_above",
    "hard_threshold -> orchestrator.environment.difficulty.hard_up_to",
    "mask_truncated_completions overlong_filtering -> orchestrator.mask_truncated",
    "teacher_model teacher_model_name_or_path -> orchestrator.teacher.base_url | the address of a "
    "server that has the model",
    "rollout.temperature -> orchestrator.sampling.temperature",
    "rollout.top_p -> orchestrator.sampling.top_p",
    "rollout.top_k -> orchestrator.sampling.top_k",
    "repetition_penalty frequency_penalty presence_penalty -> | unsupported: they change the "
    "distribution that the trainer assumes",
    # evaluation
    "eval_steps test_freq eval_interval val_interval val.interval -> orchestrator.eval.interval",
    "num_generations_eval eval_n_samples_per_prompt val_kwargs.n eval.rollouts_per_example -> "
    "orchestrator.eval.samples",
    "eval_temperature val_kwargs.temperature -> orchestrator.eval.sampling.temperature",
    "val.num_examples -> orchestrator.eval.num_examples",
    "eval.env -> orchestrator.eval.id",
    "eval_on_start val_before_train eval_base_model -> | the base model is always evaluated "
    "here, before the first step",
    # optimizer
    "actor_learning_rate optimizer.lr actor.optim.lr -> trainer.optim.lr",
    "adam_betas adam_beta1 adam_beta2 betas1 betas2 -> trainer.optim.betas | both of them, [0.9, "
    "0.95]",
    "adam_epsilon adam_eps -> trainer.optim.eps",
    "l2 -> trainer.optim.weight_decay",
    "max_norm grad_clip clip_grad clip_grad_norm gradient_clipping -> trainer.optim.max_grad_norm",
    "lr_warmup_steps num_warmup_steps -> trainer.optim.warmup_steps",
    "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio -> trainer.optim.warmup_steps | in steps",
    "lr_scheduler lr_scheduler_type scheduler scheduler.type warmup_style -> "
    "trainer.optim.schedule",
    "adam_offload optim_cpu_offload optimizer_offload fsdp_cpu_offload -> trainer.optim.offload",
    # trainer
    "ac ac.freq activation_checkpoint gradient_checkpointing enable_gradient_checkpointing -> "
    "trainer.activation_checkpointing",
    "cp ring_attn_size ulysses_sequence_parallel_size context_parallel_size -> "
    "trainer.context_parallel",
    "model.ep ep_size expert_model_parallel_size expert_parallel_size -> trainer.expert_parallel",
    "torch_compile use_torch_compile -> trainer.compile",
    "model.tp zero_stage fsdp_config fsdp_size deepspeed -> | the trainer shards over all its "
    "ranks (FSDP2); trainer.dp_replicate and trainer.context_parallel divide them",
    "use_peft peft_config lora_config -> trainer.lora",
    "lora_rank lora_r -> trainer.lora.rank",
    "lora_alpha -> trainer.lora.alpha",
    "target_modules lora_target_modules -> trainer.lora.targets",
    "lora_dropout lora.dropout -> | adapters have no dropout here, because the on-policy ratio "
    "must be 1",
    "full_determinism -> trainer.deterministic",
    # inference
    "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size parallel.tp -> "
    "inference.vllm.tensor_parallel_size",
    "gpu_memory_utilization vllm_gpu_memory_utilization -> inference.vllm.gpu_memory_utilization",
    "enforce_eager -> inference.vllm.enforce_eager",
    "enable_prefix_caching -> inference.vllm.enable_prefix_caching",
    "max_num_seqs -> inference.vllm.max_num_seqs",
    "max_num_batched_tokens -> inference.vllm.max_num_batched_tokens",
    "tool_call_parser -> inference.vllm.tool_call_parser",
    "reasoning_parser -> inference.vllm.reasoning_parser",
    "enable_auto_tool_choice -> inference.vllm.enable_auto_tool_choice",
    "kv_cache_dtype -> inference.vllm.kv_cache_dtype",
    "use_vllm vllm_mode rollout.name -> | vLLM always samples here, in a server of its own",
    "vllm_server_base_url client.base_url -> orchestrator.inference_urls",
    "server.host vllm_server_host -> inference.host",
    "server.port vllm_server_port -> inference.port",
    "weight_broadcast -> trainer.weights.dir | versions of the weights travel as files",
    # machines
    "num_train_gpus trainer_gpu_ids n_gpus_per_node actor_num_gpus_per_node -> trainer.gpus",
    "num_infer_gpus inference_gpu_ids vllm_num_engines -> inference.gpus",
    "deployment -> trainer.gpus and inference.gpus | for several nodes see docs/clusters.md",
    "nnodes num_nodes -> cluster.nodes",
    "num_train_nodes -> cluster.trainer_nodes",
    "num_infer_nodes -> cluster.inference_nodes",
    "slurm -> cluster.engine | slurm, and its settings are in [cluster.slurm]",
    # checkpoints and logs
    "ckpt -> trainer.checkpoint",
    "ckpt.interval save_freq save_steps save_interval checkpoint_interval -> "
    "trainer.checkpoint.interval",
    "ckpt.keep_last save_total_limit max_ckpt_num max_actor_ckpt_to_keep -> "
    "trainer.checkpoint.keep_last",
    "ckpt.keep_interval -> trainer.checkpoint.keep_every",
    "resume_step resume_from_checkpoint resume_from_path resume_mode load_checkpoint -> --resume "
    "[STEP]",
    "clean_output_dir overwrite_output_dir -> --clean",
    "default_local_dir save_path ckpt_path -> output_dir | the parent of the run's directory, "
    "which `name` names",
    "experiment_name run_name wandb_run_name -> name",
    "project_name wandb_project -> wandb.project",
    "wandb_org wandb_entity -> wandb.entity",
    "wandb_group -> wandb.group",
    "wandb_tags -> wandb.tags",
    "wandb_notes -> wandb.notes",
    "report_to use_wandb trainer.logger -> wandb | --wandb switches it on",
    "log_completions num_completions_to_print -> orchestrator.show_rollout_every",
    "bench -> trainer.data.fake | random batches, for the trainer alone; scripts/bench.py "
    "measures the rest",
)
"""NAMES -> KEY HERE | NOTE."""
FOREIGN = [
    Foreign(names, *(text.strip() for text in meaning.split("|")))
    for names, meaning in (row.split(" -> ") for row in ROWS)
]
BY_NAME = {name: row for row in FOREIGN for name in row.names.split()}


def known_elsewhere(key: str) -> str:
    """Returns the hint for another trainer's dotted key, by the longest name that ends the key
    or one of its sections; otherwise empty."""
    words = key.split(".")
    for end in range(len(words), 0, -1):
        for name in (".".join(words[start:end]) for start in range(end)):
            if row := BY_NAME.get(name):
                return row.hint(name if end < len(words) else "")
    return ""
