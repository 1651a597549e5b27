"""OpenClaw as a black-box agent: its own gateway process runs in the sandbox and is used through its chat API."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, get_args

from clawgym.agents.blackbox.http import request
from clawgym.agents.blackbox.loopback import SUPPORT_FOLDER, node_options, preload
from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.openclaw.config import ENV, Prompt, configuration
from clawgym.agents.openclaw.image import Layout, inspect_image, rootfs_of_environment
from clawgym.agents.openclaw.install import DEFAULT_VERSION, installed
from clawgym.agents.programs.install import Installation
from clawgym.errors import AgentError, InfraError, SandboxError
from clawgym.records import TaskFile, packages_of
from clawgym.registry import agents
from clawgym.sandbox.protocol import ExecResult, Sandbox, SandboxSpec
from clawgym.tars import open_tar

__all__ = ["OpenClaw", "RunningOpenClaw"]

PORT = 18789
FOLDER = "/opt/openclaw"
HOME = "/root"
_MEMORY_MB, _PIDS, _DISK_MB = 1024, 64, 64
"""What OpenClaw needs in addition to the limits of the task."""
_BOOT_SECONDS = 120.0
_POLL_SECONDS = 0.05
_FOREVER = 7 * 86400.0
_LEAST_CONTEXT = 16_000
_SMALL_HEAP, _LONG_CONTEXT = ["--max-old-space-size=256", "--max-semi-space-size=4"], 256_000
"""Options of Node that save a third of the memory, for context windows of at most 256,000 tokens. Tested with a
conversation of 1.5 MB, about 390,000 tokens."""


@agents.register("openclaw")
class OpenClaw:
    """An unmodified OpenClaw that runs in the sandbox of each task (:class:`~clawgym.agents.blackbox.protocol.Claw`).

    Args:
        version: the installed version to use; by default the one that ``clawgym agents install openclaw`` installs.
        prompt: ``reference``, OpenClaw's default prompt, or ``slim``, a shorter one (docs/how-to/openclaw.md).
        image: a sandbox image that contains OpenClaw, instead of an installation; by default ``$OPENCLAW_ROOTFS``.

    Raises:
        AgentError: OpenClaw is not installed, or the image does not contain it.
    """

    name = "openclaw"

    def __init__(self, version: str | None = None, *, prompt: Prompt = "reference", image: str | None = None) -> None:
        if prompt not in get_args(Prompt):
            raise AgentError(f"unknown prompt {prompt!r}: use {' or '.join(get_args(Prompt))}")
        self.prompt: Prompt = prompt
        self.image = image or rootfs_of_environment()
        self.installation: Installation | None = None
        if self.image is None:
            self.installation = installation = installed(version or DEFAULT_VERSION)
            entry = f"{FOLDER}/node_modules/openclaw/openclaw.mjs"
            self.layout = Layout(f"{FOLDER}/node/bin/node", entry, installation.version)
        elif version is None:
            self.layout = inspect_image(self.image)
        else:
            raise AgentError(
                f"image {self.image} determines the version of OpenClaw: leave out version={version!r}, or the image"
            )
        self.version = self.layout.version

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`."""
        image, mounts = spec.image, dict(spec.mounts)
        if self.installation is not None:
            mounts[FOLDER] = self.installation.folder
        elif self.image is not None and packages_of(image) is not None:
            image = self.image
        else:
            raise AgentError(
                f"the task has image {image} of its own and cannot use the OpenClaw of image {self.image}: install "
                "OpenClaw (`clawgym agents install openclaw`)"
            )
        return replace(
            spec,
            image=image,
            limits=spec.limits.plus(memory_mb=_MEMORY_MB, pids=_PIDS, disk_mb=_DISK_MB),
            mounts=mounts,
            readonly={**spec.readonly, SUPPORT_FOLDER: (preload(), TaskFile("plugins/.none", b""))},
        )

    async def start(self, sandbox: Sandbox, link: ModelLink) -> RunningOpenClaw:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`.

        Raises:
            AgentError: the context window of the model is too small for OpenClaw.
        """
        if link.context_window < _LEAST_CONTEXT:
            raise AgentError(
                f"OpenClaw needs a context window of at least {_LEAST_CONTEXT} tokens, and this model has "
                f"{link.context_window}: give another model, or use the agent tool-loop or pi"
            )
        token = secrets.token_urlsafe(24)
        config = self.config(link, token, sandbox.spec.workdir, sandbox.spec.limits.agent_seconds)
        await sandbox.put([TaskFile("openclaw.json", json.dumps(config, indent=1).encode())], f"{HOME}/.openclaw")
        await _write_python_path(sandbox)
        running = RunningOpenClaw(sandbox, token, self.argv(link), self.env())
        await self.wait(running)
        return running

    async def wait(self, running: RunningOpenClaw) -> None:
        """Wait until ``running`` accepts messages. If it does not, close it and raise :class:`InfraError`."""
        try:
            async with asyncio.timeout(_BOOT_SECONDS):
                await running.ready()
        except TimeoutError:
            await running.aclose()
            raise InfraError(
                f"OpenClaw {self.version} was not ready within {_BOOT_SECONDS:g} s: lower --concurrency"
            ) from None
        except BaseException:
            await running.aclose()
            raise

    def config(self, link: ModelLink, token: str, workspace: str, seconds: float) -> dict[str, Any]:
        """Return the content of ``openclaw.json``."""
        links = {"clawgym": link}
        return configuration(links, port=PORT, token=token, workspace=workspace, seconds=seconds, prompt=self.prompt)

    def argv(self, link: ModelLink) -> list[str]:
        """Return the command line."""
        node = [self.layout.node, *(_SMALL_HEAP if link.context_window <= _LONG_CONTEXT else ())]
        return [*node, *node_options(link), self.layout.entry, "gateway", "--bind", "loopback", "--port", f"{PORT}"]

    def env(self) -> dict[str, str]:
        """Return the environment variables that are added to those of the sandbox."""
        return {**ENV, "HOME": HOME, "OPENCLAW_BUNDLED_PLUGINS_DIR": f"{SUPPORT_FOLDER}/plugins", "TMPDIR": "/tmp"}

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`."""
        config = self.config(ModelLink("", ""), "", "", 1)
        copy = self.installation
        return {
            **({"image": self.image} if copy is None else {"node": copy.runtime, "sha256": copy.digest}),
            "prompt": self.prompt,
            "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        }


async def _write_python_path(sandbox: Sandbox) -> None:
    """Write the task's ``PYTHONPATH`` into a ``.pth`` file of the user's site folder.

    OpenClaw removes ``PYTHONPATH`` from the environment of its agent's commands.
    """
    folders = sandbox.spec.env.get("PYTHONPATH", "")
    if folders:
        program = "import site; print(site.getusersitepackages())"
        done = await sandbox.exec(["python3", "-c", program], env={"HOME": HOME, "PYTHONPATH": ""}, stdout_only=True)
        if done.exit_code == 0:
            lines = "".join(f"{folder}\n" for folder in folders.split(":") if folder)
            await sandbox.put([TaskFile("clawgym.pth", lines.encode())], done.text.strip())


class RunningOpenClaw:
    """An OpenClaw gateway, started with ``argv`` in ``sandbox`` (:class:`~clawgym.agents.blackbox.Running`)."""

    def __init__(self, sandbox: Sandbox, token: str, argv: list[str], env: Mapping[str, str]) -> None:
        self._sandbox = sandbox
        self._headers = {"authorization": f"Bearer {token}"}
        self._process: asyncio.Task[ExecResult] = asyncio.ensure_future(
            sandbox.exec(argv, env=env, timeout=_FOREVER, max_output=64 * 1024)
        )

    @property
    def ended(self) -> bool:
        """See :class:`~clawgym.agents.blackbox.protocol.Running`."""
        return self._process.done()

    async def ready(self) -> None:
        """Wait until the gateway answers. Raises :class:`InfraError` if it ends instead."""
        while True:
            try:
                status, _ = await request(self._sandbox, PORT, "GET", "/health")
                if status == 200:
                    return
            except ClawStopped:
                pass
            if self._process.done():
                why = self.why()
                raise InfraError(f"OpenClaw ended during its start ({why}): run `clawgym agents install openclaw`")
            await asyncio.sleep(_POLL_SECONDS)

    async def ask(self, message: str, *, agent: str = "main") -> str:
        """See :class:`~clawgym.agents.blackbox.protocol.Running`. ``agent`` is the id of one of OpenClaw's agents."""
        # Requests with the same session key continue one conversation.
        conversation = {**self._headers, "x-openclaw-session-key": f"agent:{agent}:clawgym"}
        model = "openclaw" if agent == "main" else f"openclaw/{agent}"
        body = {"model": model, "messages": [{"role": "user", "content": message}]}
        status, answer = await request(
            self._sandbox, PORT, "POST", "/v1/chat/completions", headers=conversation, body=body
        )
        if status != 200:
            raise ClawStopped(f"OpenClaw answered {status}: {answer[:300]!r}", cause=f"agent-{status}")
        try:
            content = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ClawStopped(f"OpenClaw's answer is not a chat completion: {answer[:300]!r}") from None
        return content if isinstance(content, str) else ""

    async def files(self, agent: str = "") -> Mapping[str, bytes]:
        """Return OpenClaw's own session transcripts (of one ``agent``, or of all), and its output if it has ended."""
        top = PurePosixPath("agents", agent)
        found: dict[str, bytes] = {}
        try:
            archive = await self._sandbox.get_archive(f"{HOME}/.openclaw/{top}", max_bytes=32 * 2**20, max_files=500)
            with open_tar(archive.tar) as tar:
                for member in tar:
                    if member.isfile() and PurePosixPath(member.name).suffix == ".jsonl":
                        content = tar.extractfile(member)
                        found[str(top / member.name)] = content.read() if content else b""
        except SandboxError:
            pass
        if self._process.done():
            found["openclaw.log"] = self.why().encode()
        return found

    async def aclose(self) -> None:
        """See :class:`~clawgym.agents.blackbox.protocol.Running`."""
        self._process.cancel()
        await asyncio.gather(self._process, return_exceptions=True)

    def why(self) -> str:
        """Return the exit code and the last output, once the process has ended."""
        if self._process.cancelled():
            return "it was stopped"
        error = self._process.exception()
        if error is not None:
            return str(error)
        done = self._process.result()
        return f"exit code {done.exit_code}: {done.text.strip()[-4000:]}"
