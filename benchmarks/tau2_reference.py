"""Judges conversations of tau2-bench with the set's own evaluator, or with ours. Run by another interpreter.

    python tau2_reference.py theirs FOLDER < cases.jsonl > verdicts.jsonl  # with pydantic and the like
    python -S tau2_reference.py ours FOLDER FORMATS < cases.jsonl > verdicts.jsonl

FOLDER holds the package ``tau2``, FORMATS our ``_tau2_checks.py``. A case has ``task`` (of the set), ``data`` (of our
checker) and ``messages``: role, content and, of either side, ``calls``. Each case is judged in a process of its own,
forked with environments that are loaded already. Clients of models, the set's registry, which imports them, and pandas
are replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from typing import Any

sys.path.insert(0, sys.argv[2])
LOADED = 3
"""Environments that a judgement may use."""


def environments(domain: str) -> Any:
    """A constructor of the domain's environment that hands out what is loaded now."""
    made = importlib.import_module(f"tau2.domains.{domain}.environment").get_environment
    ready = [made() for _ in range(LOADED)]
    return lambda **named: ready.pop()


def theirs(case: dict[str, Any], make: Any) -> float:
    """The reward by the set's own evaluator."""
    from tau2.data_model import message as m  # pyright: ignore[reportMissingImports]
    from tau2.data_model.simulation import TerminationReason  # pyright: ignore[reportMissingImports]
    from tau2.data_model.tasks import Task  # pyright: ignore[reportMissingImports]
    from tau2.evaluator import evaluator  # pyright: ignore[reportMissingImports]

    task = Task.model_validate(case["task"])
    env = make()
    state = task.initial_state
    env.set_state(
        initialization_data=state.initialization_data if state else None,
        initialization_actions=state.initialization_actions if state else None,
        message_history=[],
    )
    trajectory: list[Any] = []
    for number, said in enumerate(case["messages"]):
        kind = m.AssistantMessage if said["role"] == "assistant" else m.UserMessage
        calls = [
            m.ToolCall(id=f"{number}_{n}", name=c["name"], arguments=c["arguments"], requestor=said["role"])
            for n, c in enumerate(said.get("calls", ()))
        ]
        trajectory.append(kind(role=said["role"], content=said["content"] or None, tool_calls=calls or None))
        trajectory += [env.get_response(call) for call in calls]
    evaluator.registry = types.SimpleNamespace(get_env_constructor=lambda domain: make)
    simulation = types.SimpleNamespace(termination_reason=TerminationReason.USER_STOP, messages=trajectory)
    kind = evaluator.EvaluationType.ALL
    return evaluator.evaluate_simulation(simulation, task, kind, False, case["data"]["domain"]).reward


def ours(case: dict[str, Any], make: Any) -> float:
    """The reward by our checker."""
    import math

    checks = sys.modules["tau2_checks"]
    module = importlib.import_module(f"tau2.domains.{case['data']['domain']}.environment")
    module.get_environment = make
    messages = [
        {"role": said["role"], "content": said["content"], "tool_calls": said.get("calls")} for said in case["messages"]
    ]
    calls = [
        {"requestor": said["role"], "name": call["name"], "arguments": call["arguments"]}
        for said in case["messages"]
        for call in said.get("calls", ())
    ]
    found = checks.rewards(case["data"], sys.argv[2], messages, calls)
    return float(math.prod(found.values())) if found else 0.0


def prepared() -> Any:
    """The function that judges."""
    if sys.argv[1] == "theirs":
        for name in ("tau2.utils.llm_utils", "tau2.registry", "pandas"):
            module: Any = types.ModuleType(name)
            module.generate = module.registry = module.DataFrame = None
            sys.modules[name] = module
        return theirs
    for name in ("stand_ins", "tau2_stage", "tau2_checks"):
        spec = importlib.util.spec_from_file_location(name, f"{sys.argv[3]}/_{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    sys.modules["tau2_stage"]._install()
    return ours


def main() -> None:
    """One verdict for each line."""
    judge, made, current = prepared(), None, ""
    for line in sys.stdin:
        case = json.loads(line)
        if case["data"]["domain"] != current:
            current = case["data"]["domain"]
            made = environments(current)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                said: Any = judge(case, made)
            except Exception as error:
                said = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(said), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
