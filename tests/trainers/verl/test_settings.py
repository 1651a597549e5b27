"""The settings of verl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.trainers.config import TrainConfig, load_config, recipes
from clawgym.trainers.verl.settings import check_supported, environment, verl_settings, window_of

from ..runs import small

pytest.importorskip("verl")


def config(**parts: Any) -> TrainConfig:
    return TrainConfig.model_validate({"trainer": "verl", **parts})


def settings_of(tmp_path: Path, about: TrainConfig, **more: Any) -> Any:
    from omegaconf import OmegaConf

    given: dict[str, Any] = {"window": 4096, "run": tmp_path, "resume": None, **more}
    made = verl_settings(about, Path("/models/m"), **given)
    OmegaConf.resolve(made)
    return made


def test_settings_on_gpus(tmp_path: Path) -> None:
    about = config(
        model={"dtype": "bfloat16", "lora": {"rank": 8}},
        verl={"mode": "separate_async", "nodes": 2, "ranks": 8, "rollout_nodes": 3, "rollout_ranks": 4},
        rollout={"staleness": 2, "groups": 16, "group_size": 4, "temperature": 0.7},
        algorithm={"old": "rollout", "dual_clip": 3.0},
    )
    made = settings_of(tmp_path, about, resume=tmp_path / "checkpoints/000007/verl/global_step_7")
    rollout, actor, trainer = made.actor_rollout_ref.rollout, made.actor_rollout_ref.actor, made.trainer
    assert (trainer.device, trainer.nnodes, trainer.n_gpus_per_node) == ("cuda", 2, 8)
    assert (rollout.name, rollout.nnodes, rollout.n_gpus_per_node, rollout.n) == ("vllm", 3, 4, 4)
    assert (rollout.temperature, rollout.max_model_len, rollout.checkpoint_engine.backend) == (0.7, 4096, "nccl")
    assert made.data.train_batch_size == actor.ppo_mini_batch_size == 16  # verl checks it in this mode
    assert made.actor_rollout_ref.hybrid_engine is False
    assert made.algorithm.adv_estimator == "clawgym"
    name, options = json.loads(actor.policy_loss.loss_mode)
    assert (name, options["dual_clip"]) == ("ppo", 3.0)
    assert actor.fsdp_config.mixed_precision.param_dtype == "bf16"
    assert actor.clip_ratio_c == 3.0
    assert actor.use_dynamic_bsz is True  # micro-batches are bounded by tokens, not by rows
    assert actor.ppo_max_token_len_per_gpu >= 4096
    assert made.algorithm.rollout_correction.bypass_mode is True
    assert made.actor_rollout_ref.model.lora.merge is True
    assert trainer.v1.sampler.max_off_policy_threshold == 3
    assert trainer.resume_from_path.endswith("global_step_7")
    assert "VERL_PLATFORM" not in environment(about)


def test_optimizer_of_verl_gets_betas_and_eps(tmp_path: Path) -> None:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config.optimizer import build_optimizer

    made = settings_of(tmp_path, config(optimizer={"eps": 1e-5, "betas": (0.8, 0.9)}))
    about = omega_conf_to_dataclass(made.actor_rollout_ref.actor.optim)
    group = build_optimizer([torch.nn.Parameter(torch.zeros(1))], about).param_groups[0]
    assert (group["eps"], tuple(group["betas"])) == (1e-5, (0.8, 0.9))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"loss": "verl:gppg"}, r"^algorithm\.loss: verl:gppg: verl has none .* Did you mean 'gpg'"),
        ({"loss": "verl:sapo"}, r"^algorithm\.loss: verl:sapo: it ignores token weights: choose one of"),
        (
            {"advantage": "verl:gae"},
            r"^algorithm\.advantage: verl:gae: it needs more than an outcome \(values, .*\): choose",
        ),
        ({"advantage": "verl:opo"}, r"^algorithm\.advantage: verl:opo: it needs more than an outcome"),
        ({"advantage": "verl:clawgym"}, r"^algorithm\.advantage: verl:clawgym"),
    ],
)
def test_unusable_name_of_verl_is_an_error(tmp_path: Path, parts: dict[str, Any], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        settings_of(tmp_path, config(algorithm=parts))


def test_settings_on_cpu(tmp_path: Path) -> None:
    about = config(verl={"engine": "transformers"})
    made = settings_of(tmp_path, about)
    assert (made.trainer.device, made.actor_rollout_ref.rollout.name) == ("cpu", "transformers")
    assert made.actor_rollout_ref.model.use_remove_padding is False
    assert made.trainer.resume_mode == "disable"
    assert made.reward.num_workers == 0
    assert environment(about)["VERL_PLATFORM"] == "cpu"


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"model": {"quantize": "4bit", "lora": {}}}, "model.quantize"),
        ({"rollout": {"staleness": 1}}, "rollout.staleness"),
        ({"verl": {"mode": "colocate_async"}}, "rollout.staleness"),
        ({"verl": {"engine": "transformers"}, "compute": {"device": "cuda"}}, "verl.engine"),
        (
            {"distillation": {"hints": 1}, "reward": {"judge": "policy"}, "rollout": {"temperature": 0.9}},
            "rollout.temperature",
        ),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage"),
        (
            {"distillation": {"hints": 1, "loss": "topk"}, "reward": {"judge": "policy"}},
            "distillation.loss",
        ),
        ({"algorithm": {"imitation": 0.1}, "rollout": {"temperature": 0.9}}, "rollout.temperature"),
        ({"algorithm": {"imitation": 0.1}, "verl": {"nodes": 2}}, "verl.nodes"),
    ],
)
def test_unsupported_setting_is_named(parts: dict[str, Any], named: str) -> None:
    with pytest.raises(TrainingError, match=f"^{named}: not supported by trainer: verl: "):
        check_supported(config(**parts))


def launches() -> list[tuple[str, ...]]:
    """Recipes with their overrides: all recipes for verl, and the commands in docs/how-to/verl.md."""
    page = (Path(__file__).parents[3] / "docs/how-to/verl.md").read_text("utf-8")
    (judge,) = re.findall(r'^judge="(.*)"$', page, re.MULTILINE)
    said = re.findall(r"^clawgym train rl --config (.*)$", page, re.MULTILINE)
    found = [tuple(line.replace("$judge", judge).replace("--set ", "").split()) for line in said]
    assert len(found) >= 5
    return [(name,) for name in recipes() if load_config(name).trainer == "verl"] + found


@pytest.mark.parametrize("launch", launches(), ids=" ".join)
def test_recipes_and_documented_commands_are_valid_for_verl(launch: tuple[str, ...], tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    about = load_config(launch[0], launch[1:])
    check_supported(about)
    made = settings_of(tmp_path, about)
    validate_config(made, use_reference_policy=need_reference_policy(made), use_critic=need_critic(made))
    assert (need_reference_policy(made), need_critic(made)) == (False, False)
    assert about.trainer == "verl"
    assert about.model.context_window is not None  # these were made for a quarter of a million tokens


def test_context_window_is_limited_by_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", context_window=512)
    assert [window_of(config(model={"context_window": n}), folder) for n in (None, 100, 512)] == [512, 100, 512]
    with pytest.raises(TrainingError, match=r"^model\.context_window: the model has 512, not 513"):
        window_of(config(model={"context_window": 513}), folder)


def test_planned_memory_is_per_rank(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from clawgym.trainers.local.main import plan

    folder = make_tiny_model(tmp_path / "tiny")

    def planned(**about: Any) -> Any:
        given = small(trainer="verl", model={"path": str(folder)}, verl={"engine": "transformers", **about})
        return plan(given, "rl", tmp_path / "run")

    one, four, apart = planned(), planned(ranks=4), planned(mode="separate_async")
    assert (one["ranks"], four["ranks"]) == (1, 4)
    for name in ("weights of the policy", "gradients", "moments of AdamW"):
        assert four["memory_bytes"][name] == pytest.approx(one["memory_bytes"][name] / 4, rel=1e-3)
    assert four["memory_bytes"]["weights of the engine"] == one["memory_bytes"]["weights of the engine"]
    elsewhere = {"weights of the engine", "keys and values of rollouts"}
    assert set(one["memory_bytes"]) - set(apart["memory_bytes"]) == elsewhere


def test_vision_model_is_not_supported(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "sees", vision=True)
    with pytest.raises(TrainingError, match=r"^model\.path"):
        check_supported(config(), folder)


def test_tiny_recipe_runs_on_verl_with_staleness_zero() -> None:
    check_supported(load_config("tiny-cpu", ["trainer=verl", "verl.engine=transformers", "rollout.staleness=0"]))


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_reference_model_is_kept_for_kl(engine: str, tmp_path: Path) -> None:
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    made = settings_of(tmp_path, config(verl={"engine": engine}, algorithm={"kl": 0.1, "entropy": 0.2}))
    actor, ref = made.actor_rollout_ref.actor, made.actor_rollout_ref.ref
    assert need_reference_policy(made)
    validate_config(made, use_reference_policy=True, use_critic=False)
    assert (actor.kl_loss_coef, actor.kl_loss_type, actor.entropy_coeff) == (0.1, "k2", 0.2)
    assert ref.fsdp_config.mixed_precision == actor.fsdp_config.mixed_precision
    assert ref.fsdp_config.forward_only == (engine == "vllm")
