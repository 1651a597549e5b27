"""Agents: what decides."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from clawgym.agents.noop import NoopAgent
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.protocol import Agent, AgentContext, AgentReport
from clawgym.agents.replay import ReplayAgent
from clawgym.agents.script import ScriptAgent
from clawgym.agents.sloppy import SloppyAgent
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import Budget, Engine, OpenAIEngine, Prices, RateLimits, Sampling
from clawgym.errors import AgentError

if TYPE_CHECKING:
    from clawgym.gateway.server import Gateway

__all__ = [
    "NAMES",
    "Agent",
    "AgentContext",
    "AgentReport",
    "NoopAgent",
    "OracleAgent",
    "ReplayAgent",
    "ScriptAgent",
    "SloppyAgent",
    "ToolLoopAgent",
    "make_agent",
]

NAMES = ("noop", "openclaw", "openclaw-dense", "oracle", "pi", "replay", "script", "sloppy", "tool-loop")
"""What :func:`make_agent` makes."""


def make_agent(
    name: str,
    *,
    source: str | Path | None = None,
    model: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    engine: Engine | None = None,
    gateway: Gateway | None = None,
    protocol: Literal["tools", "text"] | None = None,
    sampling: Sampling | None = None,
    prices: Prices | None = None,
    budget: Budget | None = None,
    limits: RateLimits | None = None,
    version: str | None = None,
    prompt: Literal["reference", "slim"] | None = None,
    image: str | None = None,
) -> Agent:
    """The agent called ``name`` (see :data:`NAMES`), or that the class ``package.module:Class`` says how to run.

    ``replay`` takes ``source``: a run folder, or a file of JSON lines; ``script`` takes ``source``: a bash
    script. ``tool-loop``, ``openclaw`` and ``pi`` take a ``model`` behind an OpenAI-compatible ``base_url`` (or any
    ``engine``), and the rest, and so does ``openclaw-dense``, which is one OpenClaw for all tasks (weaker isolation:
    docs/openclaw.md); ``protocol`` is the tool loop's, ``prompt`` is OpenClaw's, and ``version`` is OpenClaw's
    for ``pi`` too, which is a part of it. Programs (all but ``tool-loop``) also take a running ``gateway`` instead of a
    model, whose pool then has their episodes. A class is a :class:`~clawgym.agents.blackbox.Claw` that is made without
    arguments; it takes what ``pi`` does but a version, and its module is imported, so name none that you do not trust.

    Raises :class:`~clawgym.errors.AgentError` for an unknown name, and for an option the agent does not take.
    """
    given = {key: value for key, value in locals().items() if key != "name" and value is not None}
    if ":" in name:
        make, takes = partial(_make_claw, name), _CLAW
    elif name in _MAKERS:
        make, takes = _MAKERS[name]
    else:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AgentError(f"there is no agent {name!r}.{hint} Agents: {', '.join(NAMES)}, or package.module:Class")
    if refused := sorted(given.keys() - takes):
        what = f"it takes {', '.join(sorted(takes))}" if takes else "it takes no options"
        raise AgentError(f"agent {name!r} does not take {', '.join(refused)}: {what}")
    return make(given)


def _make_replay(given: dict[str, Any]) -> Agent:
    if "source" not in given:
        raise AgentError("agent 'replay' needs source=: a run folder, or a file of JSON lines of commands")
    return ReplayAgent.from_path(given["source"])


def _make_script(given: dict[str, Any]) -> Agent:
    if "source" not in given:
        raise AgentError("agent 'script' needs source=: a bash script")
    path = Path(given["source"])
    try:
        return ScriptAgent(path.read_bytes())
    except OSError as error:
        raise AgentError(f"{path}: the script cannot be read ({error.strerror}): check the path") from error


def _engine_of(name: str, given: dict[str, Any]) -> Any:
    """The engine that was given, or one of the endpoint that was."""
    engine = given.pop("engine", None)
    if engine is None:
        if "model" not in given:
            raise AgentError(f"agent {name!r} needs model= (and base_url= unless it is OpenAI's), or engine=")
        return OpenAIEngine(**given)
    if given:
        raise AgentError(f"engine= already says {', '.join(sorted(given))}: leave one of the two out")
    return engine


def _make_tool_loop(given: dict[str, Any]) -> Agent:
    loop = {key: given.pop(key) for key in ("protocol", "sampling") if key in given}
    return ToolLoopAgent(_engine_of("tool-loop", given), **loop)


def _make_claw(path: str, given: dict[str, Any]) -> Agent:
    """A black box of the Claw at ``path``. Raises AgentError."""
    from clawgym.agents.blackbox import BlackBoxAgent

    module, _, name = path.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise AgentError(
            f"agent {path!r} was not found ({error}): write package.module:Class, and let Python find the module "
            "(PYTHONPATH=folder)"
        ) from error
    if not (isinstance(kind, type) and all(hasattr(kind, part) for part in ("spec", "start", "receipt"))):
        raise AgentError(f"agent {path!r} is no Claw: give it spec(), start() and receipt() (docs/new-agent.md)")
    claw = kind(**{key: given.pop(key) for key in ("version", "prompt", "image") if key in given})
    sampling, gateway = given.pop("sampling", None), given.pop("gateway", None)
    if gateway is None:
        return BlackBoxAgent(claw, _engine_of(claw.name, given), sampling=sampling)
    if given:
        raise AgentError(f"gateway= has a model already: leave {', '.join(sorted(given))} out")
    return BlackBoxAgent(claw, gateway=gateway, sampling=sampling)


_MODEL = frozenset({"model", "base_url", "api_key", "engine", "sampling", "prices", "budget", "limits"})
_CLAW = _MODEL | {"gateway"}
_MAKERS: dict[str, tuple[Callable[[dict[str, Any]], Agent], frozenset[str]]] = {
    "noop": (lambda given: NoopAgent(), frozenset()),
    "oracle": (lambda given: OracleAgent(), frozenset()),
    "replay": (_make_replay, frozenset({"source"})),
    "script": (_make_script, frozenset({"source"})),
    "sloppy": (lambda given: SloppyAgent(), frozenset()),
    "openclaw": (partial(_make_claw, "clawgym.agents.openclaw.claw:OpenClaw"), _CLAW | {"version", "prompt", "image"}),
    "openclaw-dense": (
        partial(_make_claw, "clawgym.agents.openclaw.dense:DenseOpenClaw"),
        _CLAW | {"version", "prompt"},
    ),
    "pi": (partial(_make_claw, "clawgym.agents.pi:Pi"), _CLAW | {"version"}),
    "tool-loop": (_make_tool_loop, _MODEL | {"protocol"}),
}
