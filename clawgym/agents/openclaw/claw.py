"""OpenClaw as a black box: its own gateway process in the box, asked through its own chat API."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import secrets
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, get_args

from clawgym.agents.blackbox.http import request
from clawgym.agents.blackbox.loopback import OURS, node_options, preload
from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.openclaw.config import ENV, Prompt, configuration
from clawgym.agents.openclaw.image import Layout, inspect_image, rootfs_of_environment
from clawgym.agents.openclaw.install import DEFAULT_VERSION, Installation, installed
from clawgym.errors import AgentError, InfraError, SandboxError
from clawgym.records import TaskFile, packages_of
from clawgym.registry import agents
from clawgym.sandbox.protocol import ExecResult, Sandbox, SandboxSpec

__all__ = ["OpenClaw", "RunningOpenClaw"]

PORT = 18789
FOLDER = "/opt/openclaw"
HOME = "/root"
_MEMORY_MB, _PIDS, _DISK_MB = 1024, 64, 64
"""What OpenClaw uses beside its task."""
_BOOT_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_FOREVER = 7 * 86400.0
_LEAST_CONTEXT = 16_000
_SMALL_HEAP, _LONG_CONTEXT = ["--max-old-space-size=256", "--max-semi-space-size=4"], 256_000
"""A third less memory. Seen to hold a conversation of 1.5 MB, some 390,000 tokens; more than that is not known."""


@agents.register("openclaw")
class OpenClaw:
    """OpenClaw as its users have it: a program in the sandbox (:class:`~clawgym.agents.blackbox.protocol.Claw`).

    Raises :class:`~clawgym.errors.AgentError` if it is not there.

    Args:
        version: the installed version to use; the one that ``clawgym openclaw install`` installs by default.
        prompt: ``reference``, as OpenClaw's users have it, or ``slim`` (docs/openclaw.md).
        image: of sandboxes, with OpenClaw in it, instead of an installation; ``$OPENCLAW_ROOTFS`` by default.
    """

    name = "openclaw"

    def __init__(self, version: str | None = None, *, prompt: Prompt = "reference", image: str | None = None) -> None:
        if prompt not in get_args(Prompt):
            raise AgentError(f"there is no prompt {prompt!r}: use {' or '.join(get_args(Prompt))}")
        self.prompt: Prompt = prompt
        self.image = image or rootfs_of_environment()
        self.installation: Installation | None = None
        if self.image is None:
            self.installation = there = installed(version or DEFAULT_VERSION)
            entry = f"{FOLDER}/node_modules/openclaw/openclaw.mjs"
            self.layout = Layout(f"{FOLDER}/node/bin/node", entry, there.version)
        elif version is None:
            self.layout = inspect_image(self.image)
        else:
            raise AgentError(f"which version it is, image {self.image} says: leave {version} out, or the image")
        self.version = self.layout.version

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`."""
        image, mounts = spec.image, dict(spec.mounts)
        if self.installation is not None:
            mounts[FOLDER] = self.installation.folder
        elif self.image is not None and packages_of(image) is not None:
            image = self.image
        else:
            raise AgentError(f"a task in image {image} cannot have the OpenClaw of image {self.image}: install one")
        return replace(
            spec,
            image=image,
            limits=spec.limits.plus(memory_mb=_MEMORY_MB, pids=_PIDS, disk_mb=_DISK_MB),
            mounts=mounts,
            readonly={**spec.readonly, OURS: (preload(), TaskFile("plugins/.none", b""))},
        )

    async def start(self, box: Sandbox, link: ModelLink) -> RunningOpenClaw:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`. Raises :class:`~clawgym.errors.AgentError` for a model
        that OpenClaw refuses."""
        if link.context_window < _LEAST_CONTEXT:
            raise AgentError(
                f"OpenClaw works with no model of fewer than {_LEAST_CONTEXT} tokens, and this one has "
                f"{link.context_window}: give another model, or use the agent tool-loop or pi"
            )
        token = secrets.token_urlsafe(24)
        config = self.config(link, token, box.spec.workdir, box.spec.limits.agent_seconds)
        await box.put([TaskFile("openclaw.json", json.dumps(config, indent=1).encode())], f"{HOME}/.openclaw")
        await _lead_python(box)
        running = RunningOpenClaw(box, token, self.argv(link), self.env())
        await self.wait(running)
        return running

    async def wait(self, running: RunningOpenClaw) -> None:
        """Until it can be asked. Raises :class:`InfraError` if that never comes; then it is let go of."""
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
        """Its ``openclaw.json``."""
        return configuration(link, port=PORT, token=token, workspace=workspace, seconds=seconds, prompt=self.prompt)

    def argv(self, link: ModelLink) -> list[str]:
        """Its command line."""
        node = [self.layout.node, *(_SMALL_HEAP if link.context_window <= _LONG_CONTEXT else ())]
        return [*node, *node_options(link), self.layout.entry, "gateway", "--bind", "loopback", "--port", f"{PORT}"]

    def env(self) -> dict[str, str]:
        """Its environment, beside the box's own."""
        return {**ENV, "HOME": HOME, "OPENCLAW_BUNDLED_PLUGINS_DIR": f"{OURS}/plugins", "TMPDIR": "/tmp"}

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`."""
        config = self.config(ModelLink("", ""), "", "", 1)
        there = self.installation
        return {
            **({"image": self.image} if there is None else {"node": there.node_version, "sha256": there.digest}),
            "prompt": self.prompt,
            "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        }


async def _lead_python(box: Sandbox) -> None:
    """OpenClaw keeps ``PYTHONPATH`` from the commands of its agent: where a task sets it, a ``.pth`` file of the user's
    site folder says the same."""
    folders = box.spec.env.get("PYTHONPATH", "")
    if folders:
        program = "import site; print(site.getusersitepackages())"
        done = await box.exec(["python3", "-c", program], env={"HOME": HOME, "PYTHONPATH": ""}, stdout_only=True)
        if done.exit_code == 0:
            lines = "".join(f"{folder}\n" for folder in folders.split(":") if folder)
            await box.put([TaskFile("clawgym.pth", lines.encode())], done.text.strip())


class RunningOpenClaw:
    """An OpenClaw gateway that was started with ``argv`` in ``box`` (:class:`~clawgym.agents.blackbox.Running`)."""

    def __init__(self, box: Sandbox, token: str, argv: list[str], env: Mapping[str, str]) -> None:
        self._box = box
        self._headers = {"authorization": f"Bearer {token}"}
        self._process: asyncio.Task[ExecResult] = asyncio.ensure_future(
            box.exec(argv, env=env, timeout=_FOREVER, max_output=64 * 1024)
        )

    @property
    def ended(self) -> bool:
        """See :class:`~clawgym.agents.blackbox.protocol.Running`."""
        return self._process.done()

    async def ready(self) -> None:
        """Wait until it answers. Raises :class:`InfraError` if it ends instead."""
        while True:
            try:
                status, _ = await request(self._box, PORT, "GET", "/health")
                if status == 200:
                    return
            except ClawStopped:
                pass
            if self._process.done():
                raise InfraError(f"OpenClaw ended as it started ({self.why()}): run `clawgym openclaw install`")
            await asyncio.sleep(_LOOK_SECONDS)

    async def ask(self, message: str, *, agent: str = "main") -> str:
        """See :class:`~clawgym.agents.blackbox.protocol.Running`; ``agent`` is one of OpenClaw's."""
        # Every request of one key is a turn of one conversation; without it each would be a new one.
        conversation = {**self._headers, "x-openclaw-session-key": f"agent:{agent}:clawgym"}
        model = "openclaw" if agent == "main" else f"openclaw/{agent}"
        body = {"model": model, "messages": [{"role": "user", "content": message}]}
        status, answer = await request(self._box, PORT, "POST", "/v1/chat/completions", headers=conversation, body=body)
        if status != 200:
            raise ClawStopped(f"OpenClaw answered {status}: {answer[:300]!r}", cause=f"agent-{status}")
        try:
            content = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ClawStopped(f"OpenClaw answered in no known form: {answer[:300]!r}") from None
        return content if isinstance(content, str) else ""

    async def files(self, agent: str = "") -> Mapping[str, bytes]:
        """OpenClaw's own session transcripts (of one ``agent``, or of all), and its output once it has ended."""
        top = PurePosixPath("agents", agent)
        found: dict[str, bytes] = {}
        try:
            archive = await self._box.get_archive(f"{HOME}/.openclaw/{top}", max_bytes=32 * 2**20, max_files=500)
            with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
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
        """What it said last, once it has ended."""
        if self._process.cancelled():
            return "it was stopped"
        error = self._process.exception()
        if error is not None:
            return str(error)
        done = self._process.result()
        return f"exit code {done.exit_code}: {done.text.strip()[-4000:]}"
