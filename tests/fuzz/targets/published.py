"""Copies of BFCL, tau2-bench, PinchBench and Claw-Eval, whose files somebody changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from clawgym.errors import TaskError
from clawgym.records import Layer
from clawgym.tasks.formats import bfcl, claw_eval, pinchbench, tau2

from ..source import Source, scratch_folder
from .rows import _short

READS = ("tasks.formats.bfcl", "tasks.formats.tau2", "tasks.formats.pinchbench", "tasks.formats.claw_eval")

_FUNCTION = {
    "name": "a.b",
    "description": "Adds.",
    "parameters": {
        "type": "dict",
        "properties": {"x": {"type": "float"}, "y": {"type": "array", "items": {"type": "integer"}}},
        "required": ["x"],
    },
}
_QUESTION = [[{"role": "user", "content": "1 + 1?"}]]
_ONE = {"id": "simple_python_0", "question": _QUESTION, "function": [_FUNCTION]}
_RIGHT = {"id": "simple_python_0", "ground_truth": [{"a.b": {"x": [1.0], "y": [[1], ""]}}]}
_SEVERAL = {
    "id": "multi_turn_base_0", "question": [*_QUESTION, *_QUESTION], "involved_classes": ["MathAPI"],
    "initial_config": {}, "missed_function": {"1": ["add"]},
}  # fmt: skip
_TURNS = {"id": "multi_turn_base_0", "ground_truth": [["add(a=1)"], ["add(1)"]]}
_MEMORY = {"id": "memory_0", "question": _QUESTION}
_TAU2 = {
    "id": "[a]b|c",
    "user_scenario": {"persona": "p", "instructions": {"domain": "d", "reason_for_call": "r", "known_info": "k"}},
    "initial_state": {"initialization_actions": [{"env_type": "user", "func_name": "f", "arguments": {}}]},
    "evaluation_criteria": {
        "actions": [{"action_id": "1", "requestor": "user", "name": "n", "arguments": {"a": 1}}],
        "communicate_info": ["5"], "env_assertions": [], "reward_basis": ["DB"],
    },
}  # fmt: skip
_FRONT = {
    "id": "task_00_sanity", "category": "c", "grading_type": "hybrid", "timeout_seconds": 60,
    "grading_weights": {"automated": 0.5}, "workspace_files": [{"path": "a", "content": "x"}],
}  # fmt: skip
_BODY = """
## Prompt

Do it.

## Grading Criteria

- [ ] done

## Automated Checks

```python
def grade(transcript, workspace_path):
    return {"a": 1.0}
```
"""


_CLAW = {
    "task_id": "T1", "category": "c", "difficulty": "easy", "prompt": {"text": "Do it.", "attachments": ["a.png"]},
    "services": [
        {
            "name": "mail", "command": "python mock_services/mail/server.py", "port": 9100,
            "reset_endpoint": "http://localhost:9100/mail/reset", "env": {"MAIL": "tasks/T1/fixtures/a.json"},
        },
    ],
    "tools": [{"name": "mail", "description": "d", "input_schema": {"type": "object"}}],
    "tool_endpoints": [{"tool_name": "mail", "url": "http://localhost:9100/mail", "method": "POST"}],
    "environment": {"timeout_seconds": 60, "max_turns": 5},
    "user_agent": {"enabled": True, "persona": "p", "system_prompt_suffix": "s"},
    "sandbox_files": ["fixtures/a.json"], "sandbox_grader_files": ["check.py"], "env_snapshot_commands": ["true"],
    "scoring_components": [{"check": {"keywords": ["a", 1]}}], "judge_rubric": "Is it done?",
}  # fmt: skip


def _no_layer() -> tuple[Layer, None]:
    """Instead of the layer that is made from a package index."""
    return Layer("mpmath", "0" * 64, Path("/nonexistent")), None


def _write(root: Path, files: Mapping[str, bytes]) -> None:
    for name, body in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)


def _bfcl(source: Source, root: Path) -> Any:
    documents = b"\n".join(source.json({**_FUNCTION, "name": name}) for name in ("add", "mul"))
    _write(
        root,
        {
            "data/BFCL_v4_simple_python.json": source.json(_ONE),
            "data/possible_answer/BFCL_v4_simple_python.json": source.json(_RIGHT),
            "data/BFCL_v4_multi_turn_base.json": source.json(_SEVERAL),
            "data/possible_answer/BFCL_v4_multi_turn_base.json": source.json(_TURNS),
            "data/multi_turn_func_doc/math_api.json": documents,
            "data/BFCL_v4_memory.json": source.json(_MEMORY),
            "eval_checker/multi_turn_eval/func_source_code/math_api.py": b"x = 1\n",
            "eval_checker/multi_turn_eval/func_source_code/long_context.py": b"x = 1\n",
        },
    )
    (root / "data/BFCL_v4_web_search.json").write_bytes(b"")
    for category in (*bfcl._SINGLE, *bfcl._TURNS):
        (root / f"data/BFCL_v4_{category}.json").touch()
    return bfcl.BfclFormat()


def _tau2(source: Source, root: Path) -> Any:
    for domain in tau2._DOMAINS:
        own = domain == "airline"
        rows, split = (source.json([_TAU2]), source.json({"base": ["[a]b|c"]})) if own else (b"[]", b'{"base": []}')
        _write(
            root,
            {
                f"{tau2._DATA}/{domain}/tasks.json": rows,
                f"{tau2._DATA}/{domain}/split_tasks.json": split,
                f"{tau2._DATA}/{domain}/policy.md": b"Be kind.\n",
                f"domains/{domain}/environment.py": b"",
            },
        )
    _write(root, {"data/tau2/user_simulator/simulation_guidelines.md": b"Play.\n"})
    _write(root, dict.fromkeys(("__init__.py", "config.py", "domains/__init__.py", "utils/a.py"), b""))
    _write(root, dict.fromkeys(("data_model/a.py", "environment/a.py"), b""))
    return tau2.Tau2Format()


def _pinchbench(source: Source, root: Path) -> Any:
    front = source.json(_FRONT)  # JSON is YAML
    if source.byte() % 4 == 1:
        front = json.dumps(_FRONT).encode()[:-1] + b', "since": 2026-01-02, "x": !!set {a}}'
    body = _BODY.encode() if source.byte() % 4 != 1 else source.bytes(200)
    _write(root, {"tasks/task_00_sanity.md": b"---\n" + front + b"\n---\n" + body, "tasks/TASK_TEMPLATE.md": b""})
    return pinchbench.PinchBenchFormat()


def _claw_eval(source: Source, root: Path) -> Any:
    grader = (b"x = judge.evaluate('')\n", b'load_peer_grader("T1")\n', source.bytes(100))[source.byte() % 3]
    files = ("graders/registry.py", "graders/__init__.py", "models/task.py", "__init__.py")
    _write(root, {f"src/claw_eval/{name}": b"" for name in files})
    _write(
        root,
        {
            "src/claw_eval/runner/user_agent.py": b'PROMPT = "Be {persona}"\n',
            "mock_services/_base.py": b"",
            "mock_services/mail/server.py": b'x = "tasks" / "T1" / "fixtures" / "a.json"\n',
            "tasks/T1/task.yaml": source.json(_CLAW),
            "tasks/T1/grader.py": grader,
            "tasks/T1/check.py": b"",
            "tasks/T1/fixtures/a.json": b"[]",
        },
    )
    return claw_eval.ClawEvalFormat()


def fuzz(data: bytes) -> None:
    source = Source(data)
    root = scratch_folder() / "set"
    shutil.rmtree(root, ignore_errors=True)
    for cached in (bfcl._documents, bfcl._classes, tau2._policy, tau2._package, claw_eval._library):
        cached.cache_clear()
    with patch.object(bfcl, "_mpmath", _no_layer):
        try:
            made = source.pick((_bfcl, _tau2, _pinchbench, _claw_eval))(source, root)
            assert made.holds(root)
            for _, reader in made.iter_tasks(root):
                try:
                    task = reader()
                except TaskError as error:
                    _short(error)
                    continue
                task.content_hash  # noqa: B018
                json.dumps(dict(task.metadata))
                assert all(not file.path.startswith("/") and ".." not in file.path.split("/") for file in task.inputs)
        except TaskError as error:
            _short(error)
