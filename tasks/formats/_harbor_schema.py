"""The fields of Harbor's ``task.toml``, schema 1.0 to 1.4. Those of type Any have no effect on a score.

Deprecated names (``version``, ``memory``, ``storage``, ``allow_internet``) are accepted. Unknown keys are ignored, as
in Harbor.
"""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from clawgym.errors import TaskError
from clawgym.records import Limits

__all__ = ["HarborConfig"]

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _megabytes(value: Any) -> Any:
    """``"2G"`` -> 2048, the form of Harbor's deprecated ``memory`` and ``storage``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if not match:
        raise ValueError("must be a size like '512M' or '2G'")
    return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()])


Size = Annotated[int, BeforeValidator(_megabytes)]


class _Network(_Section):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: Any = None

    def network(self, where: str) -> list[str]:
        if self.network_mode in ("public", "allowlist"):
            return [f"needs the network ([{where}] network_mode is {self.network_mode!r})"]
        return []


def _resolved(env: dict[str, str], where: str) -> tuple[dict[str, str], list[str]]:
    """Variables, with ``${NAME:-default}`` replaced by the default; and reasons for those that need the host's
    environment."""
    found, missing = {}, []
    for name, value in env.items():
        match = re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value)
        if match and match[2] is None:
            missing.append(f"needs the host's variable {match[1]} ([{where}.env] {name})")
        else:
            found[name] = match[2] if match else value
    return found, missing


class EnvironmentTable(_Network):
    build_timeout_sec: Any = None
    docker_image: str | None = None
    os: str = "linux"
    cpus: int | float | None = None
    memory_mb: int | None = None
    memory: Size | None = None
    storage_mb: int | None = None
    storage: Size | None = None
    gpus: int | None = None
    gpu_types: Any = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None
    allow_internet: bool | None = None

    def variables(self) -> tuple[dict[str, str], list[str]]:
        return _resolved(self.env, "environment")

    def needs(self) -> list[str]:
        reasons = self.network("environment")
        if self.allow_internet and self.network_mode is None:
            reasons.append("needs the network ([environment] allow_internet is true)")
        wants = {
            f"the operating system {self.os}": self.os.lower() != "linux",
            "a GPU ([environment] gpus)": bool(self.gpus),
            "a TPU ([environment] tpu)": self.tpu is not None,
            "MCP servers ([environment] mcp_servers)": bool(self.mcp_servers),
            "a skills folder ([environment] skills_dir)": bool(self.skills_dir),
            "a running service ([environment] healthcheck)": self.healthcheck is not None,
        }
        return reasons + [f"needs {what}" for what, wanted in wants.items() if wanted]


class HarborAgent(_Network):
    timeout_sec: Seconds | None = None
    user: str | int | None = None


class Verifier(_Network):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Any = None
    collect: list[Any] = []

    def variables(self) -> tuple[dict[str, str], list[str]]:
        return _resolved(self.env, "verifier")


class Solution(_Section):
    env: dict[str, str] = {}


class HarborStep(_Section):
    """One of several steps, which only Harbor itself runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    agent: HarborAgent = HarborAgent()
    verifier: Verifier = Verifier()
    min_reward: Any = None
    healthcheck: Any = None
    artifacts: Any = None


class Package(_Section):
    name: str
    version: Any = None
    authors: Any = None
    description: str = ""
    keywords: list[str] = []


class HarborConfig(_Section):
    """``task.toml``."""

    schema_version: str | None = None
    version: str | None = None
    task: Package | None = None
    metadata: dict[str, Any] = {}
    environment: EnvironmentTable = EnvironmentTable()
    agent: HarborAgent = HarborAgent()
    verifier: Verifier = Verifier()
    solution: Solution = Solution()
    source: Any = None
    steps: list[HarborStep] | None = None
    multi_step_reward_strategy: Any = None
    artifacts: Any = None

    def model_post_init(self, context: Any, /) -> None:
        version = self.schema_version or self.version or "1.0"
        if version not in VERSIONS:
            raise ValueError(f"schema_version {version!r} is not one of {', '.join(VERSIONS)}")

    def unsupported(self) -> list[str]:
        """Reasons in ``task.toml`` why this task is not supported."""
        reasons = self.environment.needs()
        if self.steps:
            reasons.append(f"has {len(self.steps)} steps")
        for name, section in (("agent", self.agent), ("verifier", self.verifier)):
            reasons += section.network(name)
        reasons += self.users()
        if self.verifier.environment_mode == "separate" or self.verifier.environment is not None:
            reasons.append("needs a second image for its verifier ([verifier] environment)")
        if self.verifier.collect:
            reasons.append("needs commands in running services ([[verifier.collect]])")
        if self.solution.env:
            reasons += _resolved(self.solution.env, "solution")[1]
        return reasons + self.environment.variables()[1] + self.verifier.variables()[1]

    def users(self) -> list[str]:
        """A reason for each user other than root."""
        parts = [("", self), *((f"steps {step.name} ", step) for step in self.steps or ())]
        return [
            f"needs the user {section.user!r} ([{where}{name}] user)"
            for where, part in parts
            for name, section in (("agent", part.agent), ("verifier", part.verifier))
            if section.user not in (None, "root", 0, "0")
        ]

    def limits(self, where: str) -> Limits:
        """The default limits, changed by those in the file. Raises :class:`TaskError` for one that is not positive."""
        environment, given = self.environment, {}
        for name, values in {
            "cpus": (environment.cpus,),
            "memory_mb": (environment.memory_mb, environment.memory),
            "disk_mb": (environment.storage_mb, environment.storage),
            "agent_seconds": (self.agent.timeout_sec,),
            "verify_seconds": (self.verifier.timeout_sec,),
        }.items():
            if chosen := [value for value in values if value is not None]:
                given[name] = chosen[0]
        try:
            return Limits(**given)
        except (TaskError, ValidationError) as error:
            raise TaskError(f"{where}: [environment] {error}") from error

    def package(self) -> dict[str, Any]:
        """Name, description, tags and level, for :attr:`~clawgym.records.Task.metadata`."""
        known: dict[str, Any] = {}
        if self.task:
            known = {"harbor_name": self.task.name, "description": self.task.description, "tags": self.task.keywords}
        if isinstance(level := self.metadata.get("difficulty"), str):
            known["level"] = level
        return {key: value for key, value in known.items() if value}


def jsonable(value: Any) -> Any:
    """``value`` with TOML dates, at any depth, as ISO text. All other TOML values are JSON values."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value
