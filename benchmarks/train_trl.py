"""TRL's half of ``benchmarks/train.py update``, in a Python that has trl (and needs no clawgym).

    python benchmarks/train_trl.py FOLDER MICRO THREADS LR      # started by benchmarks/train.py, not by hand

FOLDER is the model, MICRO how many completions go through it at once. Each line on stdin names a file of ids to learn
from. TRL's ``GRPOTrainer`` makes one update on them, handed to it by its ``rollout_func``, and a line
``@@ {"seconds": ..., "grad_norm": ...}`` answers. The (CPU) seconds begin when TRL has its advantages, and end behind
the optimizer's step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MARK = "@@ "
GROUPS, SIZE = 8, 8
"""As in train.py."""


class Timed(GRPOTrainer):
    """Notes when learning begins: all before it is generation and reward."""

    began = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.began = time.process_time()
        return made


class Says(TrainerCallback):
    trainer: Timed
    seconds = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = time.process_time() - self.trainer.began

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "grad_norm" in logs:
            print(MARK + json.dumps({"seconds": self.seconds, "grad_norm": logs["grad_norm"]}), flush=True)


def main(folder: str, micro: int, threads: int, lr: float) -> None:
    torch.set_num_threads(threads)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        file = sys.stdin.readline().strip()
        if not file:
            raise SystemExit(0)
        groups = json.loads(Path(file).read_text())
        given: dict[str, int] = {}
        out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "given": []}
        for prompt in prompts:
            n = given[prompt] = given.get(prompt, -1) + 1
            group = groups[int(prompt)]
            out["prompt_ids"].append(group["prompt"])
            out["completion_ids"].append(group["completions"][n])
            out["given"].append(group["rewards"][n])
        return out

    def reward(given: list[float], **_: Any) -> list[float]:
        return given

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=GROUPS * SIZE // micro,
            num_generations=SIZE,
            num_iterations=1,
            max_steps=10**6,
            max_completion_length=256,
            learning_rate=lr,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="grpo",
            epsilon=0.2,
            epsilon_high=0.28,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            logging_strategy="steps",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        says = Says()
        trainer = says.trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(GROUPS)]),
            rollout_func=rollout,
            callbacks=[says],
        )
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
