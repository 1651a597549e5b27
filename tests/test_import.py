"""``import clawgym`` is fast and works on every platform."""

from __future__ import annotations

import subprocess
import sys

import pytest

import clawgym

HEAVY = [
    "torch",
    "docker",
    "transformers",
    "aiohttp",
    "fastapi",
    "openai",
    "huggingface_hub",
    "pydantic",
    "rich",
    "typer",
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_heavy_is_imported() -> None:
    loaded = run("import sys, clawgym; print(*sorted(m.partition('.')[0] for m in sys.modules))").split()
    assert not set(loaded) & set(HEAVY)


def test_an_environment_needs_no_extra() -> None:
    code = """
import sys
import gymnasium, clawgym
env = gymnasium.make("ClawGym/terminal-v0")
env.reset(seed=0)
env.step("submit")
env.close()
print(*sorted(m.partition(".")[0] for m in sys.modules))
"""
    extras = {"aiohttp", "anthropic", "docker", "httpx", "huggingface_hub", "mcp", "orjson", "pyarrow", "sqlalchemy"}
    extras |= {"torch", "transformers", "openai"}
    assert not set(run(code).split()) & extras


def test_environment_is_registered() -> None:
    assert run("import clawgym, gymnasium as g; print('ClawGym/terminal-v0' in g.registry)").strip() == "True"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_import_works_on_other_platforms_and_first_use_names_docker(platform: str) -> None:
    """Without Linux's own modules; a stand-in for the other platforms' interpreters."""
    code = f"""
import asyncio, gymnasium, multiprocessing, subprocess, sys
for name in ("fcntl", "resource", "termios") if {platform!r} == "win32" else ():
    sys.modules[name] = None
sys.platform = {platform!r}
if {platform!r} == "win32":
    import os
    del os.geteuid
import clawgym
from clawgym.errors import SandboxUnavailable
try:
    clawgym.backend("namespace")
except SandboxUnavailable as error:
    print(error)
clawgym.backend("docker")
print("docker made")
"""
    said = run(code)
    assert "use the Docker backend" in said
    assert "docker made" in said


def test_public_names_exist_and_are_few() -> None:
    assert len(clawgym.__all__) <= 30
    for name in clawgym.__all__:
        assert getattr(clawgym, name) is not None
