"""The agent programs that can be installed by name, with the checksums of every package that they need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clawgym.errors import AgentError

__all__ = ["LOCKS", "OPENCLAW", "OPENCLAW_VERSION", "RELEASES", "Release", "openclaw_release", "release_of"]

LOCKS = Path(__file__).parent / "locks"


@dataclass(frozen=True, slots=True)
class Release:
    """One version of a program.

    A program comes from npm, with a Node of its own if ``node`` is given, or from a Python package index, with a copy
    of this machine's Python if ``python`` is given.
    """

    program: str
    version: str
    title: str
    """The name of the program in messages."""
    entry: str
    """The file that is started, in the installation. ``{machine}`` stands for ``x64`` or ``arm64``, ``{cpu}`` for
    ``x86_64`` or ``aarch64``. With ``python`` it is the name of a module."""
    lock: Path | None = None
    """A gzipped package-lock of npm, with the SHA-512 of every package, or requirements of pip with SHA-256; neither
    has URLs. None: the newest dependencies that npm finds."""
    node: str | None = None
    """Version of Node."""
    python: str | None = None
    """Version of Python, such as ``3.12``."""
    dependencies: Mapping[str, str] = field(default_factory=dict)
    """Without a lock: packages of npm and their versions."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """npm's overrides."""
    check: tuple[str, ...] = ("--version",)
    """Arguments with which the program prints its version."""
    default: bool = True
    """Whether it is the version that is installed if none is named."""

    @property
    def runtime(self) -> str | None:
        """``node`` or ``python``, if the installation has one."""
        return "node" if self.node else "python" if self.python else None


def _npm(program: str, version: str, title: str, entry: str, node: str | None = None) -> Release:
    return Release(program, version, title, entry, LOCKS / f"{program}-{version}.json.gz", node)


def _pip(program: str, version: str, title: str, module: str, check: str = "--version") -> Release:
    return Release(
        program, version, title, module, LOCKS / f"{program}-{version}.txt.gz", python="3.12", check=(check,)
    )


RELEASES: Mapping[str, Release] = {
    release.program: release
    for release in (
        _npm("claude-code", "2.1.332", "Claude Code", "node_modules/@anthropic-ai/claude-code-linux-{machine}/claude"),
        _npm(
            "codex",
            "0.171.0",
            "Codex CLI",
            "node_modules/@openai/codex-linux-{machine}/vendor/{cpu}-unknown-linux-musl/bin/codex",
        ),
        _npm("gemini-cli", "0.61.0", "Gemini CLI", "node_modules/@google/gemini-cli/bundle/gemini.js", node="22.23.3"),
        _npm("opencode", "1.18.33", "OpenCode", "node_modules/opencode-linux-{machine}-baseline/bin/opencode"),
        _npm("qwen-code", "0.24.4", "Qwen Code", "node_modules/@qwen-code/qwen-code/cli.js", node="22.23.3"),
        _pip("aider", "0.86.2", "Aider", "aider"),
        _pip("mini-swe-agent", "2.4.6", "mini-swe-agent", "minisweagent.run.mini", check="--help"),
        _pip("openhands", "1.16.0", "OpenHands", "openhands_cli.entrypoint"),
        _pip("terminus", "0.26.0", "Harbor (Terminus 2)", "harbor.cli.main"),
    )
}
"""Program -> its release. OpenClaw has several: :data:`OPENCLAW`."""


OPENCLAW_VERSION = "2026.4.1"
"""The version of OpenClaw that is installed if none is named."""
_NODE_OF_UNTESTED = "24.21.0"  # in the range of every release of OpenClaw so far
_OVERRIDES = {"linkedom": "0.18.12"}  # later versions need a package that the registry does not have


def _openclaw(version: str, node: str, lock: Path | None) -> Release:
    return Release(
        "openclaw",
        version,
        "OpenClaw",
        "node_modules/openclaw/openclaw.mjs",
        lock,
        node,
        dependencies={} if lock else {"openclaw": version},
        overrides=_OVERRIDES,
        default=version == OPENCLAW_VERSION,
    )


def openclaw_release(version: str, node: str, lock: Path | None) -> Release:
    """Return the release of a tested version of OpenClaw; ``lock``: by default the one of this library."""
    return _openclaw(version, node, lock or LOCKS / f"openclaw-{version}.json.gz")


OPENCLAW: dict[str, Release] = {
    version: openclaw_release(version, node, None)
    for version, node in ((OPENCLAW_VERSION, "22.23.3"), ("2026.9.6", "24.21.0"))
}
"""Tested version of OpenClaw -> its release."""


def release_of(program: str, version: str | None = None) -> Release:
    """Return the release of ``program``, by default the tested one.

    OpenClaw has a release for any exact version. Raises :class:`~clawgym.errors.AgentError` for an unknown program, and
    for another version.
    """
    if program == "openclaw":
        version = OPENCLAW_VERSION if version is None else version
        if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", version):
            raise AgentError(f"OpenClaw version {version!r}: give an exact one, such as {OPENCLAW_VERSION}")
        return OPENCLAW.get(version) or _openclaw(version, _NODE_OF_UNTESTED, None)
    release = RELEASES.get(program)
    if release is None:
        raise AgentError(
            f"no program {program!r} can be installed: choose of {', '.join(sorted([*RELEASES, 'openclaw']))}"
        )
    if version not in (None, release.version):
        raise AgentError(
            f"{release.title} {version} has no checksums here: leave --version out, or give {release.version}"
        )
    return release
