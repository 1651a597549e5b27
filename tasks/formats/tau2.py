"""Reader of tau2-bench: conversations with customers of an airline, a shop and a telephone company.

The path is the folder ``tau2`` of a package with the set's code and data. A task is a dialogue with the user
``customer``; the tools are the set's own, whose code is mounted from the package and runs in sandboxes only
(:mod:`clawgym.tasks.formats._tau2_stage`). The comparison is in :mod:`clawgym.tasks.formats._tau2_checks`. Tasks that
are not in the split ``base``, from which the set's leaderboard is made, are left out.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from clawgym.errors import TaskError
from clawgym.records import Dialogue, Limits, Task, TaskFile, ToolServer, VerifierSpec
from clawgym.registry import formats
from clawgym.tasks.formats._files import check_task_id, malformed_as_task_error, parse_json, read_text, walk
from clawgym.tasks.formats.protocol import Reader, TaskFormat
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["Tau2Format"]

_DOMAINS = ("airline", "retail", "telecom")
_DATA = "data/tau2/domains"
_CODE = ("__init__.py", "config.py", "utils", "data_model", "environment", "domains/__init__.py")
_STOPS = ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"]
_GREETING = "Hi! How can I help you today?"
_INSTRUCTION = """\
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only."""
_BASIS = ["DB", "COMMUNICATE"]
"""What counts in a task that does not say."""

_CHECK_PY = '''\
"""Grades one conversation: prints the reward as a JSON object."""

import contextlib
import json
import math
import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import tau2_checks

with open(os.path.join(FOLDER, "answers.json"), encoding="utf-8") as file:
    data = json.load(file)
with contextlib.redirect_stdout(sys.stderr):
    log = os.path.join(sys.argv[1], "calls.jsonl")
    calls = tau2_checks.logged(log) if os.path.exists(log) else []
    found = tau2_checks.rewards(data, FOLDER, tau2_checks.transcript(), calls)
print(found, file=sys.stderr)
print(json.dumps({"reward": float(math.prod(found.values())) if found else 0.0}))
'''


@formats.register("tau2")
class Tau2Format(TaskFormat):
    """tau2-bench: the folder ``tau2`` of a package with its code and data."""

    def holds(self, path: Path) -> bool:
        return (path / _DATA / "airline/tasks.json").is_file()

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        for domain in _DOMAINS:
            with malformed_as_task_error(f"{domain}/split_tasks.json", "split of tau2-bench"):
                base = set(parse_json(read_text(path / _DATA, f"{domain}/split_tasks.json"), domain)["base"])
            for number, value in enumerate(_listed(path, f"{domain}/tasks.json")):
                where = f"{domain}/tasks.json:{number}"
                if not isinstance(value, dict) or str(value.get("id")) in base:
                    yield where, partial(_task, path, domain, value, where)


def _listed(path: Path, name: str) -> list[Any]:
    """The list in a JSON file of the data."""
    found = parse_json(f'{{"tasks": {read_text(path / _DATA, name)}}}', name).get("tasks")
    if not isinstance(found, list):
        raise TaskError(f"{name}: holds no list of tasks: restore the package's data")
    return found


def _task(path: Path, domain: str, value: Any, where: str) -> Task:
    with malformed_as_task_error(where, "task of tau2-bench"):
        criteria, scenario = value["evaluation_criteria"] or {}, value["user_scenario"]
        start = (value.get("initial_state") or {}).get("initialization_actions") or []
        if (value.get("initial_state") or {}).get("initialization_data") or (value.get("initial_state") or {}).get(
            "message_history"
        ):
            raise TaskError(f"{where}: begins with data or messages, which is not supported: leave the task out")
        task_id = check_task_id(_name(domain, str(value["id"])), where)
        actions = criteria.get("actions")
        solution, script = _reference(actions or [], criteria.get("communicate_info") or [], scenario)
        prompt = _prompt(path, domain, scenario)
        system = f"<instructions>\n{_INSTRUCTION}\n</instructions>\n<policy>\n{_policy(path, domain)}\n</policy>"
        dialogue = Dialogue(
            (("system", system), ("assistant", _GREETING)),
            "customer",
            {"prompt": prompt, "stops": _STOPS, "script": script},
            private="user_",
        )
        data = {
            "domain": domain,
            "start": start,
            "actions": actions,
            "assertions": criteria.get("env_assertions"),
            "communicate": criteria.get("communicate_info"),
            "basis": criteria.get("reward_basis", _BASIS),
        }
    here = Path(__file__)
    package = _package(path, domain)
    stage = [TaskFile(f"{name}.py", here.with_name(f"_{name}.py")) for name in ("tau2_stage", "stand_ins")]
    served = (
        TaskFile("server.py", here.with_name("_tau2_server.py")),
        TaskFile("tool_server.py", here.with_name("_tool_server.py")),
        TaskFile("start.json", json.dumps({"domain": domain, "calls": start}).encode()),
        *stage,
        *package,
    )
    graded = (
        TaskFile("reward.sh", standard_reward_sh(), executable=True),
        TaskFile("check.py", _CHECK_PY.encode()),
        TaskFile("answers.json", json.dumps(data, ensure_ascii=False).encode()),
        TaskFile("tau2_checks.py", here.with_name("_tau2_checks.py")),
        *stage,
        *package,
    )
    return Task(
        id=task_id,
        instruction=f"Serve a customer ({domain}) who writes to you, by the policy.",
        verifier=VerifierSpec("reward_sh", graded),
        tools=(ToolServer("tau2", ("python3", "-E", "-s", "-S", "-B", "/tools/tau2/server.py"), served),),
        dialogue=dialogue,
        metadata={"category": domain},
        limits=Limits(max_steps=100, setup_seconds=180.0, verify_seconds=180.0),
        solution=(TaskFile("solve.json", json.dumps(solution, ensure_ascii=False).encode()),),
        origin=where,
    )


def _name(domain: str, given: str) -> str:
    """An id that can name a folder."""
    name = f"{domain}-{given}".translate(str.maketrans({"[": "", "]": "-", "|": "+", ":": "-", "/": "-"}))
    return name if len(name) <= 100 else f"{name[:90]}-{hashlib.sha256(given.encode()).hexdigest()[:8]}"


def _reference(
    actions: list[dict[str, Any]], information: list[str], scenario: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The agent's calls and messages, and what the customer says and does, for the reference actions in their order."""
    turns: list[tuple[list[Any], list[Any]]] = [([], [])]
    for action in actions:
        mine = (action.get("requestor") or "assistant") == "assistant"
        if mine and turns[-1][1]:
            turns.append(([], []))
        turns[-1][0 if mine else 1].append({"name": action["name"], "arguments": action["arguments"]})
    told = {"name": "submit", "arguments": {"message": " ".join(["Done.", *information])}}
    calls = [one for made, _ in turns for one in (*made, told)]
    reason = scenario["instructions"]
    script: list[dict[str, Any]] = [{"text": reason if isinstance(reason, str) else reason["reason_for_call"]}]
    script += [{"text": "Done.", "calls": done} for _, done in turns]
    script[-1]["text"] = _STOPS[0]
    return calls, script


def _prompt(path: Path, domain: str, scenario: Mapping[str, Any]) -> str:
    """The prompt of the model that plays the customer: the set's guidelines and the scenario."""
    tools = domain == "telecom"
    guidelines = read_text(path / "data/tau2/user_simulator", f"simulation_guidelines{'_tools' * tools}.md")
    lines = []
    if scenario.get("persona") is not None:
        lines += ["Persona:", textwrap.indent(scenario["persona"], "\t")]
    asked = scenario["instructions"]
    if not isinstance(asked, str):
        parts = [f"Domain: {asked['domain']}"]
        for key, title in (
            ("reason_for_call", "Reason for call"),
            ("known_info", "Known info"),
            ("unknown_info", "Unknown info"),
            ("task_instructions", "Task instructions"),
        ):
            if asked.get(key) is not None:
                parts.append(f"{title}:\n{textwrap.indent(asked[key], chr(9))}")
        asked = "\n".join(parts)
    lines += ["Instructions:", textwrap.indent(asked, "\t")]
    scenario_text = "\n".join(lines)
    return f"{guidelines}\n\n<scenario>\n{scenario_text}\n</scenario>"


@cache
def _policy(path: Path, domain: str) -> str:
    """The policy of the agent, as the domain's environment puts it together."""
    folder = path / _DATA / domain
    if domain != "telecom":
        return read_text(folder, "policy.md")
    main, manual = read_text(folder, "main_policy.md"), read_text(folder, "tech_support_manual.md")
    return f"<main_policy>\n{main}\n</main_policy>\n<tech_support_policy>\n{manual}\n</tech_support_policy>"


@cache
def _package(path: Path, domain: str) -> tuple[TaskFile, ...]:
    """What an environment needs of the package: code, databases and policies; no tasks."""
    found: list[TaskFile] = []
    for part in (*_CODE, f"domains/{domain}"):
        whole = path / part
        files = walk(whole) if whole.is_dir() else (TaskFile(part, whole, within=path),)
        prefix = f"{part}/" if whole.is_dir() else ""
        found += [
            TaskFile(f"tau2/{prefix}{f.path}", f.source, within=f.within) for f in files if f.path.endswith(".py")
        ]
    data = path / _DATA / domain
    kept = [f for f in walk(data) if "/" not in f.path and (f.path.endswith(".md") or "db." in f.path)]
    found += [TaskFile(f"tau2/{_DATA}/{domain}/{f.path}", f.source, within=f.within) for f in kept]
    return tuple(found)
