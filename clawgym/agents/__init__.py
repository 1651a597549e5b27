"""Agents: each works on one task in one sandbox. :func:`make_agent` makes one by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym.agents.gullible import GullibleAgent
from clawgym.agents.noop import NoopAgent
from clawgym.agents.oracle import OracleAgent
from clawgym.agents.protocol import Agent, AgentContext, AgentReport
from clawgym.agents.replay import ReplayAgent
from clawgym.agents.script import ScriptAgent
from clawgym.agents.sloppy import SloppyAgent
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import Engine, OpenAIEngine, Sampling
from clawgym.engines.packaged import PACKAGED
from clawgym.errors import AgentError, MissingDependency
from clawgym.registry import agents

if TYPE_CHECKING:
    from clawgym.gateway.server import Gateway

__all__ = [
    "Agent",
    "AgentContext",
    "AgentReport",
    "GullibleAgent",
    "NoopAgent",
    "OracleAgent",
    "ReplayAgent",
    "ScriptAgent",
    "SloppyAgent",
    "ToolLoopAgent",
    "make_agent",
]

_ENDPOINT = ("model", "base_url", "api_key", "api_key_env", "prices", "budget", "limits")
"""Options of :class:`~clawgym.engines.openai.OpenAIEngine` that :func:`make_agent` takes instead of an engine."""


def make_agent(
    name: str,
    *,
    engine: Engine | None = None,
    gateway: Gateway | None = None,
    sampling: Sampling | None = None,
    **options: Any,
) -> Agent:
    """Make the agent called ``name``: built in, an entry point of the group ``clawgym.agents``, or
    ``package.module:Class``.

    ``clawgym list agents NAME`` shows the options of an agent. A class implements
    :class:`~clawgym.agents.protocol.Agent`, or :class:`~clawgym.agents.blackbox.Claw` if it runs a program in the
    sandbox. The module of the class is imported, which runs its code: name only modules that you trust.

    Args:
        name: one of ``clawgym list agents``, or ``package.module:Class``.
        engine: the engine that an agent with a model samples from. Instead of it, ``model`` and the other options of
            :class:`~clawgym.engines.openai.OpenAIEngine` name an OpenAI-compatible endpoint.
        gateway: a running gateway instead of an engine, for programs in the sandbox. Their episodes are stored in its
            pool.
        sampling: sampling parameters of an agent with a model.
        options: the agent's own options. None counts as not given.

    Raises:
        AgentError: for an unknown name, an option that the agent does not take, or a class that is not an agent.
    """
    own = {key: value for key, value in options.items() if value is not None}
    thing = agents.get(name)
    is_program = isinstance(thing, type) and not hasattr(thing, "run")
    if is_program and not all(hasattr(thing, part) for part in ("spec", "start", "identity")):
        raise AgentError(
            f"agent {name!r} is not an agent: give it run(), identity() and aclose(), or for a program spec(), start() "
            "and identity() (docs/how-to/agents.md)"
        )
    takes = {option.name for option in agents.options(name)}
    if sampling is not None and not is_program and "sampling" not in takes:
        raise AgentError(f"agent {name!r} does not sample from a model: leave temperature and max_tokens out")
    model = {"engine": engine, "gateway": gateway, "sampling": sampling}
    model = {key: value for key, value in model.items() if value is not None}
    if not is_program and "engine" not in takes:
        made = agents.make(name, **own, **model)
    else:
        endpoint = {key: own.pop(key) for key in _ENDPOINT if key in own}
        own = agents.validated(name, thing, own, partial=True)
        if is_program:
            made = _program(name, own, endpoint, **model)
        elif gateway is not None:
            raise AgentError(f"agent {name!r} does not take gateway: give engine=, or model= and base_url=")
        else:
            model["engine"] = _engine_of(name, endpoint, engine)
            made = agents.make(name, **own, **model)
    if not isinstance(made, Agent):
        raise AgentError(
            f"agent {name!r} is not an agent but {type(made).__name__}: give it name, version, run(), identity() and "
            "aclose() (docs/how-to/agents.md)"
        )
    return made


def _program(
    name: str,
    own: dict[str, Any],
    endpoint: dict[str, Any],
    *,
    engine: Any = None,
    gateway: Gateway | None = None,
    sampling: Sampling | None = None,
) -> Agent:
    """Make an agent from the :class:`~clawgym.agents.blackbox.Claw` called ``name``."""
    from clawgym.agents.blackbox import BlackBoxAgent

    claw = agents.make(name, **own)
    if gateway is None:
        return BlackBoxAgent(claw, _engine_of(claw.name, endpoint, engine), sampling=sampling)
    if given := sorted({*endpoint, *(("engine",) if engine is not None else ())}):
        raise AgentError(f"gateway= has a model already: leave {', '.join(given)} out")
    return BlackBoxAgent(claw, gateway=gateway, sampling=sampling)


def _engine_of(name: str, endpoint: dict[str, Any], engine: Any) -> Any:
    """Return ``engine``, or make an engine from the options of ``endpoint``."""
    if engine is None:
        if "model" not in endpoint:
            raise AgentError(
                f"agent {name!r} needs a model: give --model ({', '.join(PACKAGED)} runs here), and --base-url unless "
                "it is at OpenAI (in Python: model= and base_url=, or engine=)"
            )
        if _is_local(endpoint):
            try:
                from clawgym.gateway.local_engine import LocalEngine

                return LocalEngine(endpoint["model"])
            except ImportError as error:
                raise MissingDependency(
                    f"model {endpoint['model']} runs in this process, which needs more packages ({error}): "
                    "pip install 'clawgym[local]', or give --base-url"
                ) from error
        return OpenAIEngine(**endpoint)
    if endpoint:
        raise AgentError(f"engine= already sets {', '.join(sorted(endpoint))}: leave one of the two out")
    return engine


def _is_local(endpoint: dict[str, Any]) -> bool:
    """Whether the model runs in this process: a packaged model or a folder, and no endpoint is named."""
    model = str(endpoint["model"])
    return "base_url" not in endpoint and (model in PACKAGED or Path(model).expanduser().is_dir())


@agents.register("replay")
def replay_agent(source: Path) -> ReplayAgent:
    """Repeats recorded tool calls, without a model.

    Args:
        source: a run folder, or a file of JSON lines ``{"task_id": ..., "commands": [...]}``.
    """
    return ReplayAgent.from_path(source)


@agents.register("script")
def script_agent(source: Path) -> ScriptAgent:
    """Runs one given bash script, whatever the task.

    Args:
        source: path of the script; for tasks with tools of their own, of a JSON list of calls.
    """
    try:
        return ScriptAgent(source.read_bytes())
    except OSError as error:
        raise AgentError(f"{source}: the script cannot be read ({error.strerror}): check the path") from error
