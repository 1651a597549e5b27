"""Seconds of a step by phase, and idle shares, of ``trainer: verl``, beside verl's own agent loop on the same toy task.

    python benchmarks/verl.py ours --steps 6        # one-word tasks in real boxes, through the gateway
    python benchmarks/verl.py stock --steps 6       # the same model and servers, verl's loop of one reply, no box
    python benchmarks/verl.py ours --set verl.mode=separate_async --set rollout.staleness=1

On CPUs, by our engine as verl's rollout server, on a random model of one layer of 64. Both make ``--groups`` groups of
``--group-size``, with replies of at most 24 tokens; the first step, in which processes come up, is left out. ``stock``
is verl 0.9.1's trainer with its single-turn loop, its GRPO and its loss, and a reward of its own: it has no tools, no
boxes, no grading and no second turn, so what is compared is what the way there costs, not the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clawgym.engines.tiny import make_tiny_model
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.verl.settings import environment, verl_settings

PHASES = ("timing/step", "timing/wait_for_batch", "timing/update", "timing/weights", "perf/trainer_idle_ratio")
WINDOW = 1024


def config(args: argparse.Namespace, model: Path) -> TrainConfig:
    """The toy task."""
    return TrainConfig.model_validate(
        {
            "name": "bench",
            "trainer": "verl",
            "backend": "namespace",
            "model": {"path": str(model)},
            "tasks": {
                "generators": ["write-word"], "demonstrations": {"count": 1}, "train": {"first": 100, "count": 50},
                "validation": {"count": 1}, "heldout": {"first": 100, "count": 1},
            },
            "agent": {"protocol": "text", "system_prompt": "Work.", "max_steps": 2, "max_tokens": 24},
            "rollout": {"groups": args.groups, "group_size": args.group_size, "concurrency": 64},
            "evaluation": {"every": 1000, "canary": 0},
            "budget": {"steps": args.steps},
            "checkpoint_every": 1000,
            "verl": {"engine": "transformers"},
        }
    )  # fmt: skip


def ours(args: argparse.Namespace, folder: Path, model: Path) -> list[Mapping[str, float]]:
    """The rows of a run's ``metrics.jsonl``."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config(args, model).model_dump(mode="json")))
    argv = [sys.executable, "-c", "from clawgym.cli import main; main()", "train", "rl"]
    argv += ["--config", str(folder / "config.yaml"), "--out", str(folder / "run")]
    for setting in args.set:
        argv += ["--set", setting]
    subprocess.run(argv, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


_STOCK = """
import json, sys
import ray
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1

settings = OmegaConf.load(sys.argv[1])
env = json.loads(sys.argv[2])
ray.init(num_cpus=24, num_gpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=500_000_000,
         runtime_env={"env_vars": {**env, "TRANSFER_QUEUE_ENABLE": "1"}})
ray.get(TaskRunnerV1.remote().run.remote(settings))
"""
_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(c in "aeiou" for c in solution_str) / max(1, len(solution_str))
"""


def stock(args: argparse.Namespace, folder: Path, model: Path) -> list[Mapping[str, float]]:
    """verl's own figures of each step, under our names."""
    import pyarrow
    import pyarrow.parquet
    from omegaconf import OmegaConf

    about = config(args, model)
    env = {**environment(about), "VERL_FILE_LOGGER_PATH": str(folder / "stock.jsonl")}
    os.environ.update(env)
    (folder / "reward.py").write_text(_REWARD)
    row: dict[str, Any] = {
        "data_source": "toy", "prompt": [{"role": "user", "content": "Write a word."}],
        "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": 0},
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 64), folder / "rows.parquet")
    made = verl_settings(about, model, window=WINDOW, run=folder, resume=None)
    OmegaConf.set_struct(made, False)
    changes = {
        "data": {"custom_cls": {"path": None, "name": None}, "train_files": str(folder / "rows.parquet"),
                 "val_files": str(folder / "rows.parquet"), "max_response_length": 24, "max_prompt_length": 512},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}, "clip_ratio_c": 3.0},
                              "rollout": {"agent": {"num_workers": 1}}},
        "reward": {"num_workers": 1,
                   "custom_reward_function": {"path": str(folder / "reward.py"), "name": "compute_score"}},
        "trainer": {"logger": ["file"], "v1": {"sampler": {"sync_refill_failed_groups": False}}},
    }  # fmt: skip
    made.merge_with(OmegaConf.create(changes))
    OmegaConf.save(made, folder / "settings.yaml")
    argv = [sys.executable, "-c", _STOCK, str(folder / "settings.yaml"), json.dumps(env)]
    subprocess.run(argv, check=True, stdout=sys.stderr)
    return [_ours_of(json.loads(line)["data"]) for line in (folder / "stock.jsonl").read_text().splitlines()]


def _ours_of(said: Mapping[str, float]) -> Mapping[str, float]:
    step, waited = said["timing_s/step"], said["timing_s/gen"]
    return {
        "timing/step": step,
        "timing/wait_for_batch": waited,
        "timing/update": sum(said.get(f"timing_s/{name}", 0.0) for name in ("old_log_prob", "adv", "update_actor")),
        "timing/weights": said.get("timing_s/update_weights", 0.0),
        "perf/trainer_idle_ratio": waited / step,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ours", "stock"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="as of clawgym train; ours only")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_model(folder / "model", context_window=WINDOW, layers=1, hidden=64)
        rows = (ours if args.what == "ours" else stock)(args, folder, model)[1:]
    for phase in PHASES:
        values = [row[phase] for row in rows]
        print(f"{phase:26} {statistics.median(values):7.3f}   {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    del sys.path[0]  # this folder: in it, this file would be imported for verl
    main()
