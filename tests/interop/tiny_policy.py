"""A tiny model that writes the word of a task to its file in half of its replies, and another word otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from clawgym.agents.text_protocol import HOW_TO
from clawgym.engines.tiny import make_tiny_model
from clawgym.gateway.render import Renderer
from clawgym.records import Task

SYSTEM = "Work."


def messages_of(task: Task) -> list[dict[str, str]]:
    """What the agent tool-loop asks in the text protocol."""
    return [
        {"role": "system", "content": f"{SYSTEM}\n\n{HOW_TO}"},
        {"role": "user", "content": task.instruction},
    ]


def replies_of(task: Task) -> list[str]:
    """The solution of a task, and one that fails."""
    word, file = task.instruction.split()[3], task.instruction.split()[-1].rstrip(".")
    return [f"```bash\necho {said} > {file}\n```" for said in (word, "wrong")]


def tiny_policy(folder: Path, tasks: Sequence[Task], steps: int = 100) -> Path:
    """Train such a model on ``tasks`` and write it to ``folder``."""
    texts = [text for task in tasks for text in (task.instruction, *replies_of(task))]
    make_tiny_model(folder, hidden=64, layers=1, vocab=400, corpus=[SYSTEM, HOW_TO, *texts], spread=0.05)
    renderer, tokenizer = Renderer(folder), AutoTokenizer.from_pretrained(folder)
    rows = []
    for task in tasks:
        prompt = list(renderer.prompt(messages_of(task)))
        for reply in replies_of(task):
            ids = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
            rows.append((prompt + ids, [-100] * len(prompt) + ids))
    size = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([ids + [0] * (size - len(ids)) for ids, _ in rows])
    labels = torch.tensor([given + [-100] * (size - len(given)) for _, given in rows])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.set_num_threads(1)  # with more, threads of a busy machine wait for each other
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder
