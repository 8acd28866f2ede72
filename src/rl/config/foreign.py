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


NO_CRITIC = (
    "there is no critic, value loss or discount here; credit comes from groups of rollouts "
    "(orchestrator.credit)"
)
WITH_CLIP = 'with trainer.loss.type = "clip", "cispo" or "gspo"'
WITH_DPPO = 'with trainer.loss.type = "dppo"'
WITH_BAND = "lowest and highest ratio together, [0.125, 8.0]"

FOREIGN = (
    # model and lengths
    Foreign(
        "model_name_or_path name_or_path model_name model.path pretrain "
        "actor_rollout_ref.model.path",
        "model.name",
    ),
    Foreign(
        "seq_len max_seq_len max_seq_length max_model_length max_length",
        "model.max_model_len",
        "prompt and answer together",
    ),
    Foreign(
        "max_prompt_length prompt_max_len",
        "model.max_model_len",
        "prompt and answer together; prompts have no limit of their own",
    ),
    Foreign(
        "max_completion_length max_response_length response_length generate_max_len max_new_tokens",
        "orchestrator.sampling.max_tokens",
        "new tokens in one turn",
    ),
    Foreign("torch_dtype bf16 fp16", "model.dtype", "bfloat16 or float32"),
    Foreign(
        "optimization_dtype reduce_dtype",
        "",
        "master weights, optimizer state and reductions are always float32 here",
    ),
    Foreign("tokenizer.chat_template chat_template_path", "model.chat_template"),
    Foreign("tokenizer.name tokenizer_name_or_path", "", "the model's own tokenizer is used here"),
    Foreign("attn_implementation attn", "trainer.attention"),
    # length of a run, and what a step trains on
    Foreign("total_training_steps max_train_steps train_steps num_steps total_steps", "max_steps"),
    Foreign(
        "total_epochs num_train_epochs num_episodes num_epochs",
        "max_steps",
        "in batches; passes over the data are counted by `rl sft` alone (sft.epochs)",
    ),
    Foreign(
        "train_batch_size rollout_batch_size generation_batch_size gen_batch_size "
        "global_batch_size",
        "orchestrator.batch_size",
        "in episodes (rollouts, if there is one agent), which are prompts times group_size",
    ),
    Foreign(
        "rollouts_per_example num_generations n_samples_per_prompt num_samples_per_prompt "
        "rollout.n",
        "orchestrator.group_size",
    ),
    Foreign(
        "per_device_train_batch_size gradient_accumulation_steps micro_batch_size "
        "micro_train_batch_size ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
        "ppo_max_token_len_per_gpu train_max_tokens_per_gpu "
        "use_dynamic_bsz use_dynamic_batch",
        "trainer.micro_batch_tokens",
        "in tokens per pass and rank; the number of passes per batch follows from it",
    ),
    Foreign(
        "mini_batch_size ppo_mini_batch_size num_mini_batches steps_per_generation",
        "trainer.minibatches",
        "number of parts of a batch",
    ),
    Foreign(
        "ppo_epochs num_ppo_epochs max_epochs num_iterations",
        "trainer.epochs",
        "passes over a batch",
    ),
    Foreign(
        "max_async_level async_level staleness_threshold max_staleness async_queue_size",
        "max_lag",
        "0 is on-policy",
    ),
    Foreign(
        "max_concurrent max_inflight_rollouts oversampling_factor",
        "orchestrator.environment.max_generating",
        "max_lag and batch_size determine how many rollouts are in flight; this limits them",
    ),
    # loss
    Foreign("loss_mode policy_loss_type loss_type", "trainer.loss.type"),
    Foreign("loss.type.ppo loss.type.grpo loss.type.dapo", 'trainer.loss.type = "clip"'),
    Foreign("loss.import_path", "trainer.loss.function", 'with trainer.loss.type = "custom"'),
    Foreign("loss_agg_mode", "trainer.loss.aggregation"),
    Foreign(
        "epsilon epsilon_low cliprange cliprange_low clip_ratio clip_ratio_low clip_eps eps_clip",
        "trainer.loss.clip_low",
        WITH_CLIP,
    ),
    Foreign("epsilon_high cliprange_high clip_ratio_high", "trainer.loss.clip_high", WITH_CLIP),
    Foreign("eps_clip_low_high", "trainer.loss.clip_low and trainer.loss.clip_high", WITH_CLIP),
    Foreign("ipo_mask_low", "trainer.loss.mask_low", WITH_DPPO),
    Foreign("ipo_mask_high", "trainer.loss.mask_high", WITH_DPPO),
    Foreign("token_mask_low token_mask_high", "trainer.loss.token_mask", WITH_BAND),
    Foreign("sequence_mask_low sequence_mask_high", "trainer.loss.sequence_mask", WITH_BAND),
    Foreign("geo_mask_low geo_mask_high", "trainer.loss.geometric_mask", WITH_BAND),
    Foreign("ratio_type importance_sampling_level rollout_is", "trainer.loss.importance"),
    Foreign(
        "vllm_importance_sampling_cap tis_imp_ratio_cap vllm_is_truncated_threshold "
        "rollout_is_threshold",
        "trainer.loss.truncate",
        'with trainer.loss.type = "policy_gradient", or a clipping loss with several '
        "optimizer steps per batch",
    ),
    Foreign(
        "vllm_importance_sampling_correction enable_vllm_is_correction",
        "trainer.loss.importance",
        "on by default; none switches it off",
    ),
    Foreign("beta kl_coef init_kl_coef kl_loss_coef kl_beta", "trainer.loss.kl_coefficient"),
    Foreign(
        "use_kl_loss use_kl_in_reward",
        "trainer.loss.kl_coefficient",
        "a value above 0 switches it on, in the loss",
    ),
    Foreign("kl_loss_type kl_penalty", "trainer.loss.kl_estimator"),
    Foreign("ref_model ref.model.path reference_model", "trainer.loss.kl_reference"),
    Foreign("entropy_coeff entropy_coef entropy_loss_coef", "trainer.loss.entropy_coefficient"),
    Foreign("teacher_tau", "trainer.loss.teacher_coefficient"),
    # credit and environments
    Foreign("adv_estimator advantage_estimator advantage.type", "orchestrator.credit.type"),
    Foreign(
        "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm",
        "orchestrator.credit.type",
        "grpo divides by the standard deviation, dr_grpo does not",
    ),
    Foreign(
        "critic critic_pretrain critic_learning_rate value_coef vf_coef value_clip "
        "cliprange_value gamma lam lambd gae_lambda",
        "",
        NO_CRITIC,
    ),
    Foreign(
        "reward_funcs reward_func reward_function custom_reward_function remote_rm_url "
        "reward_pretrain reward_model",
        "orchestrator.environment.reward",
        "file.py:function, for a dataset; packaged environments bring their own",
    ),
    Foreign("env", "orchestrator.environment"),
    Foreign("env_id environment_id env.id", "orchestrator.environment.id"),
    Foreign("env.args", "orchestrator.environment.args"),
    Foreign("env.name", "orchestrator.environment.name"),
    Foreign(
        "prompt_data train_files dataset_name train_dataset", "orchestrator.environment.dataset"
    ),
    Foreign("val_files", "orchestrator.environment.eval_dataset"),
    Foreign(
        "input_key prompt_key label_key",
        "",
        "the columns of a dataset are called prompt and answer here",
    ),
    Foreign(
        "env_ratios prompt_data_probs", "orchestrator.environment.weight", "of each environment"
    ),
    Foreign(
        "online_difficulty_filtering dynamic_filtering filter_groups filter_groups.enable "
        "dynamic_sampling",
        "orchestrator.replace_no_signal",
        "on by default",
    ),
    Foreign("easy_threshold", "orchestrator.environment.difficulty.easy_above"),
    Foreign("hard_threshold", "orchestrator.environment.difficulty.hard_up_to"),
    Foreign("mask_truncated_completions overlong_filtering", "orchestrator.mask_truncated"),
    Foreign(
        "teacher_model teacher_model_name_or_path",
        "orchestrator.teacher.base_url",
        "the address of a server that has the model",
    ),
    Foreign("rollout.temperature", "orchestrator.sampling.temperature"),
    Foreign("rollout.top_p", "orchestrator.sampling.top_p"),
    Foreign("rollout.top_k", "orchestrator.sampling.top_k"),
    Foreign(
        "repetition_penalty frequency_penalty presence_penalty",
        "",
        "unsupported: they change the distribution that the trainer assumes",
    ),
    # evaluation
    Foreign(
        "eval_steps test_freq eval_interval val_interval val.interval", "orchestrator.eval.interval"
    ),
    Foreign(
        "num_generations_eval eval_n_samples_per_prompt val_kwargs.n eval.rollouts_per_example",
        "orchestrator.eval.samples",
    ),
    Foreign("eval_temperature val_kwargs.temperature", "orchestrator.eval.sampling.temperature"),
    Foreign("val.num_examples", "orchestrator.eval.num_examples"),
    Foreign("eval.env", "orchestrator.eval.id"),
    Foreign(
        "eval_on_start val_before_train eval_base_model",
        "",
        "the base model is always evaluated here, before the first step",
    ),
    # optimizer
    Foreign("actor_learning_rate optimizer.lr actor.optim.lr", "trainer.optim.lr"),
    Foreign(
        "adam_betas adam_beta1 adam_beta2 betas1 betas2",
        "trainer.optim.betas",
        "both of them, [0.9, 0.95]",
    ),
    Foreign("adam_epsilon adam_eps", "trainer.optim.eps"),
    Foreign("l2", "trainer.optim.weight_decay"),
    Foreign(
        "max_norm grad_clip clip_grad clip_grad_norm gradient_clipping",
        "trainer.optim.max_grad_norm",
    ),
    Foreign("lr_warmup_steps num_warmup_steps", "trainer.optim.warmup_steps"),
    Foreign(
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
        "trainer.optim.warmup_steps",
        "in steps",
    ),
    Foreign(
        "lr_scheduler lr_scheduler_type scheduler scheduler.type warmup_style",
        "trainer.optim.schedule",
    ),
    Foreign(
        "adam_offload optim_cpu_offload optimizer_offload fsdp_cpu_offload", "trainer.optim.offload"
    ),
    # trainer
    Foreign(
        "ac ac.freq activation_checkpoint gradient_checkpointing enable_gradient_checkpointing",
        "trainer.activation_checkpointing",
    ),
    Foreign(
        "cp ring_attn_size ulysses_sequence_parallel_size context_parallel_size",
        "trainer.context_parallel",
    ),
    Foreign(
        "model.ep ep_size expert_model_parallel_size expert_parallel_size",
        "trainer.expert_parallel",
    ),
    Foreign("torch_compile use_torch_compile", "trainer.compile"),
    Foreign(
        "model.tp zero_stage fsdp_config fsdp_size deepspeed",
        "",
        "the trainer shards over all its ranks (FSDP2); trainer.dp_replicate and "
        "trainer.context_parallel divide them",
    ),
    Foreign("use_peft peft_config lora_config", "trainer.lora"),
    Foreign("lora_rank lora_r", "trainer.lora.rank"),
    Foreign("lora_alpha", "trainer.lora.alpha"),
    Foreign("target_modules lora_target_modules", "trainer.lora.targets"),
    Foreign(
        "lora_dropout lora.dropout",
        "",
        "adapters have no dropout here, because the on-policy ratio must be 1",
    ),
    Foreign("full_determinism", "trainer.deterministic"),
    # inference
    *(
        Foreign(names, f"inference.vllm.{names.split()[0]}")
        for names in (
            "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size parallel.tp",
            "gpu_memory_utilization vllm_gpu_memory_utilization",
            "enforce_eager",
            "enable_prefix_caching",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tool_call_parser",
            "reasoning_parser",
            "enable_auto_tool_choice",
            "kv_cache_dtype",
        )
    ),
    Foreign(
        "use_vllm vllm_mode rollout.name", "", "vLLM always samples here, in a server of its own"
    ),
    Foreign("vllm_server_base_url client.base_url", "orchestrator.inference_urls"),
    Foreign("server.host vllm_server_host", "inference.host"),
    Foreign("server.port vllm_server_port", "inference.port"),
    Foreign("weight_broadcast", "trainer.weights.dir", "versions of the weights travel as files"),
    # machines
    Foreign(
        "num_train_gpus trainer_gpu_ids n_gpus_per_node actor_num_gpus_per_node", "trainer.gpus"
    ),
    Foreign("num_infer_gpus inference_gpu_ids vllm_num_engines", "inference.gpus"),
    Foreign(
        "deployment", "trainer.gpus and inference.gpus", "for several nodes see docs/clusters.md"
    ),
    Foreign("nnodes num_nodes", "cluster.nodes"),
    Foreign("num_train_nodes", "cluster.trainer_nodes"),
    Foreign("num_infer_nodes", "cluster.inference_nodes"),
    Foreign("slurm", "cluster.engine", "slurm, and its settings are in [cluster.slurm]"),
    # checkpoints and logs
    Foreign("ckpt", "trainer.checkpoint"),
    Foreign(
        "ckpt.interval save_freq save_steps save_interval checkpoint_interval",
        "trainer.checkpoint.interval",
    ),
    Foreign(
        "ckpt.keep_last save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
        "trainer.checkpoint.keep_last",
    ),
    Foreign("ckpt.keep_interval", "trainer.checkpoint.keep_every"),
    Foreign(
        "resume_step resume_from_checkpoint resume_from_path resume_mode load_checkpoint",
        "--resume [STEP]",
    ),
    Foreign("clean_output_dir overwrite_output_dir", "--clean"),
    Foreign(
        "default_local_dir save_path ckpt_path",
        "output_dir",
        "the parent of the run's directory, which `name` names",
    ),
    Foreign("experiment_name run_name wandb_run_name", "name"),
    Foreign("project_name wandb_project", "wandb.project"),
    Foreign("wandb_org wandb_entity", "wandb.entity"),
    Foreign("wandb_group", "wandb.group"),
    Foreign("wandb_tags", "wandb.tags"),
    Foreign("wandb_notes", "wandb.notes"),
    Foreign("report_to use_wandb trainer.logger", "wandb", "--wandb switches it on"),
    Foreign("log_completions num_completions_to_print", "orchestrator.show_rollout_every"),
    Foreign(
        "bench",
        "trainer.data.fake",
        "random batches, for the trainer alone; scripts/bench.py measures the rest",
    ),
)

BY_NAME = {name: row for row in FOREIGN for name in row.names.split()}


def known_elsewhere(key: str) -> str:
    """Returns the hint for another trainer's dotted key, by the longest name that ends the key
    or one of its sections; otherwise empty."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        for name in (".".join(parts[start:end]) for start in range(end)):
            if row := BY_NAME.get(name):
                return row.hint(name if end < len(parts) else "")
    return ""
