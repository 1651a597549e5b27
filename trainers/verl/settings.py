"""Convert a configuration to one of verl: verl's defaults with changes.

Invariant: unsupported settings raise an error that names them before anything starts.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym.engines.folders import load_config
from clawgym.engines.load import sees
from clawgym.errors import TrainingError
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.protocols import loss_of
from clawgym.trainers.traits import traits_of
from clawgym.trainers.verl.from_verl import check_names

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = [
    "CPU",
    "check_learner",
    "check_supported",
    "environment",
    "loss_mode",
    "on_cpu",
    "verl_settings",
    "window_of",
]

CPU = "clawgym.trainers.verl.cpu"
FORMULAS = "clawgym.trainers.verl.formulas"
NAME = "clawgym"


def on_cpu(config: TrainConfig) -> bool:
    """Whether ranks are CPU processes."""
    return config.verl.engine == "transformers"


def check_learner(config: TrainConfig, model: Path | None = None) -> None:
    """Raise :class:`~clawgym.errors.TrainingError` for settings that training on verl's ranks does not support. With
    ``model``, its folder, check the model too."""
    _refuse(
        (
            config.distillation.loss == "topk",
            "distillation.loss",
            "leave it out, which is advantage, or use trainer: local",
        ),
        (
            traits_of(config.algorithm.advantage).uses_values,
            "algorithm.advantage",
            f"{config.algorithm.advantage} needs a critic: choose another of `clawgym list advantages`, or use "
            "trainer: local",
        ),
        (config.model.quantize, "model.quantize", "leave it out, or use trainer: local"),
        (model is not None and sees(model), "model.path", "for a vision model use trainer: local"),
        (
            on_cpu(config) and config.compute.device not in (None, "cpu"),
            "verl.engine",
            "transformers is for a CPU: choose vllm or sglang",
        ),
    )


def check_supported(config: TrainConfig, model: Path | None = None) -> None:
    """Raise :class:`~clawgym.errors.TrainingError` for settings that this trainer does not support. With ``model``, its
    folder, check the model too."""
    check_learner(config, model)
    sync = config.verl.mode == "sync"
    served = [name for name in ("vllm", "sglang") if getattr(config.compute, name)]
    _refuse(
        (served, f"compute.{''.join(served)}", f"set verl.engine to {''.join(served)} instead"),
        (
            config.distillation.hints and config.rollout.temperature != 1,
            "rollout.temperature",
            "with distillation.hints it must be 1: servers compute log-probs of given ids at temperature 1 only",
        ),
        (
            config.algorithm.imitation and config.rollout.temperature != 1,
            "rollout.temperature",
            "with algorithm.imitation it must be 1: the imitation loss is at temperature 1",
        ),
        (
            config.algorithm.imitation and config.verl.nodes > 1,
            "verl.nodes",
            "with algorithm.imitation it must be 1: a resumed run reads solved episodes from the pool of one node",
        ),
        (sync and config.rollout.staleness, "rollout.staleness", "with verl.mode sync it must be 0"),
        (not sync and not config.rollout.staleness, "rollout.staleness", f"{config.verl.mode} needs 1 or more"),
    )


def _refuse(*cases: tuple[Any, str, str]) -> None:
    """Raise for the first of ``cases`` that holds: whether it does, the setting, and what to do."""
    for asked, setting, instead in cases:
        if asked:
            raise TrainingError(f"{setting}: not supported by trainer: verl: {instead}")


def window_of(config: TrainConfig, model: Path) -> int:
    """The context window: most tokens of a prompt and its reply. Raises :class:`~clawgym.errors.TrainingError` if
    ``model.context_window`` exceeds that of the model in the folder ``model``."""
    asked = config.model.context_window
    made_for = int(load_config(model).get_text_config().max_position_embeddings)
    if asked is not None and asked > made_for:
        raise TrainingError(f"model.context_window: the model has {made_for}, not {asked}: set at most {made_for}")
    return asked or made_for


def environment(config: TrainConfig) -> dict[str, str]:
    """The environment variables of every process of a run."""
    given = {
        "TOKENIZERS_PARALLELISM": "false",
        # At more verbose levels, a log call of verl 0.9.1 in the mode separate_async raises.
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARN"),
    }
    if on_cpu(config):
        given |= {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl has its engine for PyTorch's FSDP
            "VERL_USE_EXTERNAL_MODULES": CPU,
            "OMP_NUM_THREADS": str(config.compute.threads or 1),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
    return given


def loss_mode(config: TrainConfig) -> str:
    """The loss of ``config`` and its options as JSON text, which verl passes to each training process. Raises as
    :func:`~clawgym.trainers.protocols.loss_of` does."""
    return json.dumps([config.algorithm.loss, loss_of(config.algorithm).keywords])


def verl_settings(config: TrainConfig, model: Path, *, window: int, run: Path, resume: Path | None) -> DictConfig:
    """verl's settings for a run. ``window``: most ids of a training sequence; ``resume``: the folder ``global_step_N``
    of a checkpoint. Raises :class:`~clawgym.errors.TrainingError` for a ``verl:NAME`` that cannot be used."""
    check_names(config)
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(config_dir=str(files("verl.trainer") / "config"), version_base=None):
        made = compose("ppo_trainer")
    OmegaConf.set_struct(made, False)
    made.merge_with(OmegaConf.create(_changes(config, model, window, run, resume)))
    return made


def _changes(config: TrainConfig, model: Path, window: int, run: Path, resume: Path | None) -> dict[str, Any]:
    about, cpu = config.verl, on_cpu(config)
    tokens = max(config.compute.micro_tokens, window)
    apart = about.mode == "separate_async"
    lora: dict[str, Any] = {}
    if config.model.lora is not None:
        lora = {
            "lora_rank": config.model.lora.rank,
            "lora_alpha": config.model.lora.alpha,
            "target_modules": list(config.model.lora.targets),
            "lora": {"merge": True},  # servers get merged weights, so that any engine works
        }
    half = not cpu and config.model.dtype == "bfloat16"
    shards = {
        "use_torch_compile": not cpu,
        "mixed_precision": {
            "param_dtype": "bf16" if half else "fp32",
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
        "param_offload": about.offload,
    }
    return {
        "algorithm": {
            "adv_estimator": NAME,
            "rollout_correction": {"bypass_mode": config.algorithm.old == "rollout", "rollout_is": None},
        },
        "critic": {"enable": False},
        "reward": {"num_workers": 0},
        "data": {
            "train_files": [],
            "val_files": [],
            "custom_cls": {"path": "pkg://clawgym.trainers.verl.dataset", "name": "GroupNumbers"},
            "train_batch_size": config.rollout.groups,
            "val_batch_size": 1,
            "dataloader_num_workers": 0,
            "shuffle": False,
            "max_prompt_length": window // 2,
            "max_response_length": window - window // 2,
        },
        "trainer": {
            "device": "cpu" if cpu else "cuda",
            "nnodes": about.nodes,
            "n_gpus_per_node": about.ranks,
            "logger": [],
            "project_name": NAME,
            "experiment_name": run.name,
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": -1,
            "default_local_dir": str(run / "checkpoints"),
            "resume_mode": "disable" if resume is None else "resume_path",
            "resume_from_path": None if resume is None else str(resume),
            "total_training_steps": config.budget.steps,
            "total_epochs": 1,
            "v1": {
                "trainer_mode": about.mode,
                "sampler": {
                    "sync_refill_failed_groups": True,
                    "max_off_policy_threshold": config.rollout.staleness + 1,
                    "max_off_policy_strategy": "drop",
                },
                "colocate_async": {"num_warmup_batches": config.rollout.staleness},
                "separate_async": {"num_warmup_batches": config.rollout.staleness, "parameter_sync_step": 1},
            },
        },
        "actor_rollout_ref": {
            "hybrid_engine": not apart,
            "model": {
                "path": str(model),
                "external_lib": FORMULAS,
                "use_remove_padding": not cpu,
                "enable_gradient_checkpointing": config.compute.checkpointing,
                # Computes log-probs and entropy 512 tokens at a time, never the logits of a whole micro-batch.
                "use_fused_kernels": True,
                "fused_kernel_options": {"impl_backend": "torch"},
                "override_config": {"attn_implementation": "sdpa" if cpu else "flash_attention_2"},
                **lora,
            },
            "actor": {
                "strategy": "fsdp2",
                "ppo_mini_batch_size": config.rollout.groups,
                "ppo_epochs": config.algorithm.epochs,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": tokens,
                "clip_ratio_low": config.algorithm.clip_low,
                "clip_ratio_high": config.algorithm.clip_high,
                "clip_ratio_c": config.algorithm.dual_clip or float("inf"),
                "policy_loss": {"loss_mode": loss_mode(config)},
                "calculate_entropy": True,
                "entropy_coeff": config.algorithm.entropy,
                "use_kl_loss": config.algorithm.kl > 0,  # makes verl load a reference model
                "kl_loss_coef": config.algorithm.kl,
                "kl_loss_type": config.algorithm.kl_estimator,
                "use_torch_compile": not cpu,
                "grad_clip": config.optimizer.grad_clip,
                "optim": {
                    "lr": config.optimizer.lr,
                    "betas": list(config.optimizer.betas),
                    "weight_decay": config.optimizer.weight_decay,
                    "override_optimizer_config": {"eps": config.optimizer.eps},
                    "lr_warmup_steps": 0,  # each batch brings its learning rate (worker.RATE)
                    "clip_grad": config.optimizer.grad_clip,
                },
                "checkpoint": {"save_contents": ["model", "optimizer", "extra", "hf_model"]},
                "fsdp_config": {**shards, "optimizer_offload": about.offload, "seed": config.seed},
            },
            # verl keeps a forward-only model in pinned GPU memory. Without a GPU the reference model therefore gets an
            # optimizer, which is never used.
            "ref": {
                "fsdp_config": {**shards, "forward_only": not cpu},
                "optim": {"_target_": "verl.workers.config.FSDPOptimizerConfig"},
            },
            "rollout": {
                "name": about.engine,
                "mode": "async",
                "n": config.rollout.group_size,
                "nnodes": about.rollout_nodes if apart else 0,
                "n_gpus_per_node": about.rollout_ranks if apart else about.ranks,
                "temperature": config.rollout.temperature,
                "tensor_model_parallel_size": about.tensor_parallel,
                "gpu_memory_utilization": about.memory,
                "max_model_len": window,
                "max_num_seqs": config.rollout.concurrency,
                "dtype": "float32" if cpu else "bfloat16",
                "load_format": "auto" if cpu else "dummy",
                "log_prob_max_token_len_per_gpu": tokens,
                "calculate_log_probs": True,
                "checkpoint_engine": {
                    "backend": ("clawgym_ray" if cpu else "nccl") if apart else "naive",
                    "custom_backend_module": CPU if apart and cpu else None,
                },
            },
        },
        "transfer_queue": {
            "backend": {
                "SimpleStorage": {
                    # Training sequences; an episode whose conversation was rewritten has several.
                    "total_storage_size": 64 * config.rollout.groups * config.rollout.group_size
                    * (config.rollout.staleness + 2),
                    "num_data_storage_units": about.nodes,
                }
            }
        },
    }  # fmt: skip
