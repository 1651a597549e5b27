"""All commands use the same option for the same thing, and each option says what it is for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import typer.main

from clawgym.cli import app
from clawgym.cli._options import named_values

NOT_NAMES = {
    "--backend": "--sandbox",
    "--dest": "--out, or DEST",
    "--endpoint": "--base-url",
    "--first": "--limit",
    "--jobs": "--concurrency",
    "--number": "--limit, --sample or --count",
    "--output": "--out",
    "--parallel": "--concurrency",
    "--settings": "--set",
    "--tasks": "--task, repeated",
    "--to": "--out, or DEST",
    "--upstream-url": "--base-url",
    "--url": "--base-url",
    "--workers": "--concurrency",
    "-n": "--limit, --sample or --count",
}
"""Name that a command must not use -> the name that the others use for it."""
OWN_MEANING = {
    "--dir": "of a service, or of its trainer on another machine",
    "--format": "the formats of tasks and of pools differ",
    "--outcome": "of what is exported, or how a session ended",
    "--model": "eval takes several models, the gateway one or a folder",
    "--sandbox": "some commands default to all sandboxes, or to that of the run",
    "--version": "of OpenClaw, of a package, of this library",
}
"""Options whose help differs between commands, and why."""


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands(below, (*path, name))
        return
    yield " ".join(path), command


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_command_and_parameter_has_help(name: str) -> None:
    assert ALL[name].help, f"clawgym {name} has no help"
    missing = [parameter.name for parameter in ALL[name].params if not getattr(parameter, "help", None)]
    assert not missing, f"clawgym {name}: no help for {missing}"


@pytest.mark.parametrize("name", ALL)
def test_no_command_uses_another_name_for_a_shared_option(name: str) -> None:
    used = {option for parameter in ALL[name].params for option in parameter.opts}
    assert not {option: NOT_NAMES[option] for option in used & NOT_NAMES.keys()}


def test_shared_options_are_the_same_in_all_commands() -> None:
    """Names, kind and help: what `clawgym/cli/_options.py` declares once."""
    found: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command in ALL.items():
        for parameter in command.params:
            if parameter.param_type_name != "option":
                continue
            for option in parameter.opts:
                told = (tuple(sorted(parameter.opts)), parameter.is_flag, parameter.multiple, parameter.help)
                found[option][told].append(name)
    unlike = {option: dict(kinds) for option, kinds in found.items() if len(kinds) > 1 and option not in OWN_MEANING}
    assert not unlike


def test_positional_arguments_have_known_names() -> None:
    known = {
        "TASKSET",
        "RUN",
        "RUN...",
        "POOL",
        "POOL|FILE",
        "FILE",
        "SESSION...",
        "ROUTE...",
        "SOURCE",
        "DEST",
        "NAME",
        "TASK",
        "FOLDER",
    }
    known |= {"SESSION", "VERSION", "[VERSION]", "PACKAGE", "KIND", "[RUN|PID]", "TASK_ID", "URL", "rl|sft|prm"}
    known |= {"BOARD", "ENTRY|BOARD", "POOL|RUN", "REPO", "RUN...|BOARD", "[PATH]..."}
    shown = {
        (name, argument.metavar or argument.name.upper())
        for name, command in ALL.items()
        for argument in command.params
        if argument.param_type_name == "argument"
    }
    assert {(name, metavar) for name, metavar in shown if metavar not in known} == set()


def test_options_of_agents_and_engines_are_name_value_pairs() -> None:
    given = ["prompt=slim", "max-malformed=3", "text=a=b"]
    assert named_values(given, "--agent-option") == {"prompt": "slim", "max_malformed": "3", "text": "a=b"}
    assert named_values(None, "--agent-option") == {}
    for wrong in (["prompt"], ["=slim"], ["a=1", "a=2"]):
        with pytest.raises(typer.BadParameter):
            named_values(wrong, "--agent-option")
