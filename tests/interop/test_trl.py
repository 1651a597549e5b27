"""TRL's ``GRPOTrainer`` on our environments: a real update on a CPU, with a tiny model whose replies are scripted.

Needs the package ``trl``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.interop.trl import TrlShell, prompts, rewards, shells

pytest.importorskip("trl", reason="needs TRL: clawgym interop check trl")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

from clawgym.engines.tiny import make_tiny_model
from clawgym.gateway.render import Renderer

from .one_task import EPISODES, TASKS, by_gym_make

SCRIPTS = [
    *map(list, EPISODES.values()),
    ["echo one > a", "printf 'é <|im_end|> \\n'; cat a"],
    ["false", "no-such-program"],
    [],
    ["echo one > a", "exit 3", "cat a a > b"],
    ["touch a b c"],
    ["for i in 1 2 3; do echo $i; done", "echo one | tee a"],
]
"""The commands of each episode of a group."""


class Scripted(GRPOTrainer):
    """Samples what the scripts say, and notes all ids."""

    def _tokenize_prompts(self, prompts: Any) -> Any:
        self.seen: list[list[list[int]]] = []
        """The prompt of each turn of each episode, as ids."""
        self.sampled: list[list[list[int]]] = []
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        replies = []
        if not self.seen:
            self.seen, self.sampled = [[] for _ in prompt_ids], [[] for _ in prompt_ids]
            playing = list(range(len(prompt_ids)))
        else:
            playing = [n for n, turns in enumerate(self.sampled) if self.turn == len(turns) <= len(SCRIPTS[n])]
        assert len(playing) == len(prompt_ids)
        self.turn = len(self.sampled[playing[0]]) + 1
        for n, ids in zip(playing, prompt_ids, strict=True):
            turn = len(self.sampled[n])
            call = ""
            if turn < len(SCRIPTS[n]):
                body = json.dumps({"name": "bash", "arguments": {"command": SCRIPTS[n][turn]}})
                call = f"<tool_call>\n{body}\n</tool_call>"
            reply = [*self._tokenizer.encode(call or "done", add_special_tokens=False), self._tokenizer.eos_token_id]
            self.seen[n].append(list(ids))
            self.sampled[n].append(reply)
            replies.append(reply)
        return replies, None

    def _calculate_rewards(self, *given: Any) -> Any:
        found = super()._calculate_rewards(*given)
        self.given = found[:, 0].tolist()
        return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scripted, dict[str, torch.Tensor], Path]:
    """A trainer after one update, the weights before it, and the folder of the model."""
    out = tmp_path_factory.mktemp("trl")
    commands = [command for script in SCRIPTS for command in script]
    words = [qwen3_instruct_2507_chat_template, TASKS.tasks[0].instruction, str(get_json_schema(TrlShell.bash)), "done"]
    folder = make_tiny_model(out / "model", corpus=[*words, *commands], spread=0.05)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen3_instruct_2507_chat_template
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = GRPOConfig(
        output_dir=str(out / "run"),
        max_steps=1,
        per_device_train_batch_size=len(SCRIPTS),
        num_generations=len(SCRIPTS),
        max_completion_length=4096,
        max_tool_calling_iterations=5,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Scripted(
        model,
        rewards,
        args=config,
        train_dataset=Dataset.from_list(prompts(TASKS)),
        processing_class=tokenizer,
        environment_factory=shells(TASKS),
    )
    trainer.train()
    return trainer, before, folder


def test_it_takes_a_step(trained: Any, record_property: Callable[..., None]) -> None:
    trainer, before, _ = trained
    after = trainer.model.state_dict()
    moved = [name for name, weight in before.items() if not torch.equal(weight, after[name].cpu())]
    assert len(moved) == len(before)
    (logged,) = (row for row in trainer.state.log_history if "grad_norm" in row)
    assert logged["grad_norm"] > 0
    record_property("held", "`GRPOTrainer` takes an update on a CPU, with a tiny model from this library")


def test_rewards_are_those_of_gym_make(trained: Any, record_property: Callable[..., None]) -> None:
    trainer, _, _ = trained
    expected = [by_gym_make(commands).reward for commands in SCRIPTS]
    assert trainer.given == pytest.approx(expected)
    assert expected[:2] == pytest.approx([1.0, 1 / 3])
    assert len(set(expected)) > 2
    record_property("held", f"the rewards of {len(expected)} episodes are those of `gym.make`")


def test_ids_are_those_of_the_ledger(trained: Any, record_property: Callable[..., None]) -> None:
    """Each prompt is what the gateway builds: the stored ids, and the ids of the new messages."""
    trainer, _, folder = trained
    renderer = Renderer(folder, chat_template=qwen3_instruct_2507_chat_template)
    tools = [get_json_schema(TrlShell.bash)]
    question = prompts(TASKS)[0]["prompt"]
    turns = 0
    for commands, seen, sampled in zip(SCRIPTS, trainer.seen, trainer.sampled, strict=True):
        outputs = by_gym_make(commands).outputs
        ids = list(renderer.prompt(question, tools))
        assert seen[0] == ids
        for n, output in enumerate(outputs):
            if "<|im_end|>" in output:  # TRL encodes the text as the special token
                assert trainer._tokenizer.eos_token_id in seen[n + 1][len(ids) + len(sampled[n]) + 1 :]
                break
            message = {"role": "tool", "name": "bash", "tool_call_id": "1", "content": output}
            ids = ids + sampled[n] + list(renderer.increment(sampled[n], [message], tools))
            assert seen[n + 1] == ids
            turns += 1
    assert turns > 8
    record_property("held", f"the ids of {turns} prompts after a tool's result are those that the gateway builds")


def test_an_episode_that_is_over() -> None:
    shell = TrlShell(TASKS)
    shell.reset(TASKS.tasks[0].id, prompt="unused", seed=3)
    assert shell.bash("echo hi") == "hi\n"
    assert rewards([shell], completions=[]) == [0.0]
    assert rewards([shell]) == [0.0]
    assert shell.bash("ls") == "[the episode is over]"
    shell.reset(TASKS.tasks[0].id)
    shell.bash("echo one > a; cat a a > b; cat a b > c")
    shell.bash("submit")
    assert rewards([shell]) == [1.0]
