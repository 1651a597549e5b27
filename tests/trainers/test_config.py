"""The configuration file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.errors import TrainingError
from clawgym.trainers.config import TrainConfig, load_config, recipes


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_valid(name: str) -> None:
    assert load_config(name).name


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\noptimizer: {lr: 1e-5}\n")
    assert load_config(path) == TrainConfig(name="a", optimizer={"lr": 1e-5})  # type: ignore[arg-type]
    changed = load_config(path, ["optimizer.lr=3e-4", "model.lora.rank=4", "tasks.generators=[write-word]", "seed=7"])
    assert (changed.optimizer.lr, changed.seed, changed.tasks.generators) == (3e-4, 7, ("write-word",))
    assert changed.model.lora is not None
    assert changed.model.lora.rank == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimiser: {lr: 1}", "run.yaml: optimiser: Extra inputs"),
        ("optimizer: {lr: -1}", r"optimizer\.lr: .* greater than 0"),
        ("rollout: {group_size: 1}", r"rollout\.group_size"),
        ("{reward: {milestones: turn}, agent: {name: openclaw}}", "set agent.name to tool-loop, or leave"),
        ("model: {quantize: 4bit}", "set model.lora as well"),
        ("algorithm: {dual_clip: 1}", r"algorithm\.dual_clip: .* greater than 1"),
        ("distillation: {hints: true}", r"distillation\.hints: .* set reward\.judge"),
        ("{distillation: {hints: true}, reward: {judge: rule}}", r"distillation\.hints: .* set reward\.judge"),
        (
            "{distillation: {hints: true}, reward: {judge: prm, judge_options: {path: a}}}",
            r"distillation\.hints: .* set reward\.judge",
        ),
        ("reward: {judge: prm}", r"judge is 'prm': set reward\.judge_options\.path"),
        ("reward: {judge: prm, judge_options: {pat: a}}", "judge 'prm' does not take pat.* Did you mean 'path'"),
        ("agent: {name: opnclaw}", "there is no agent 'opnclaw'. Did you mean 'openclaw'"),
        ("agent: {name: openclaw, options: {prompt: slimm}}", "agent 'openclaw': option prompt='slimm'"),
        ("agent: {options: {prompt: slim}}", "options are for other agents"),
        ("algorithm: {advantage: grpo, advantage_options: {esp: 1}}", "advantage 'grpo' does not take esp"),
        ("algorithm: {length: 9}", "length is for aggregation seq-mean-token-sum-norm, not episode: leave out"),
        (
            "algorithm: {old: rollout, importance: sequence}",
            "no effect with old: rollout.*: set algorithm.old to recomp",
        ),
        ("algorithm: {loss: 'verl:gpg'}", r"algorithm\.loss: verl:gpg is verl's own: set trainer to verl, or choose"),
        ("algorithm: {advantage: 'verl:rloo'}", r"algorithm\.advantage: verl:rloo is verl's own: set trainer to verl"),
        ("{trainer: verl, algorithm: {loss: 'verl:gpg', loss_options: {hi: 1}}}", "loss 'verl:gpg' does not take hi"),
        ("backend: dokcer", "there is no sandbox 'dokcer'. Did you mean 'docker'"),
        ("- a\n- b", "is a list, not a mapping"),
        ("a: [", "invalid YAML"),
    ],
)
def test_invalid_setting_is_named_in_error(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize("judge", ["policy", "complaints", "clawgym.rewards.rules:RuleJudge"])
def test_judges_that_give_hints_are_accepted(tmp_path: Path, judge: str) -> None:
    made = load_config(write(tmp_path, f"{{distillation: {{hints: true}}, reward: {{judge: '{judge}'}}}}"))
    assert made.distillation.hints


def test_recipes_are_loaded_without_torch() -> None:
    program = """if True:
        import sys
        from clawgym.trainers.config import TrainConfig, load_config, recipes
        TrainConfig()
        [load_config(name) for name in recipes()]
        print("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_documented_bounds_and_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "algorithm: {dual_clip: 1.5}")).algorithm.dual_clip == 1.5
    plain = TrainConfig()
    assert (plain.verl.nodes, plain.verl.ranks, plain.verl.rollout_nodes, plain.verl.rollout_ranks) == (1, 1, 1, 1)
    assert plain.algorithm.dual_clip is None


def test_constant_length_of_dr_grpo(tmp_path: Path) -> None:
    about = "agent: {max_tokens: 30, max_steps: 4}, algorithm: {aggregation: seq-mean-token-sum-norm"
    assert load_config(write(tmp_path, f"{{{about}}}}}")).loss_length == 120
    assert load_config(write(tmp_path, f"{{{about}, length: 7}}}}")).loss_length == 7
    assert TrainConfig().loss_length is None


def test_every_aggregation_can_be_configured() -> None:
    from clawgym.trainers.algorithms import Aggregation
    from clawgym.trainers.config import Algorithm

    assert Algorithm.model_fields["aggregation"].annotation == Aggregation


def test_invalid_override_is_named_in_error(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 1\n")
    for override, says in (
        ("lr", "write key=value"),
        ("seed.x=1", "'seed' has no nested keys"),
        ("a=[", "is not valid YAML"),
    ):
        with pytest.raises(TrainingError, match=says):
            load_config(path, [override])
    with pytest.raises(TrainingError, match="neither a recipe"):
        load_config(tmp_path / "absent.yaml")
