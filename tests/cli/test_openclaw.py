"""``clawgym agents install openclaw`` and ``clawgym openclaw image``: what a person sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.agents.openclaw.install import install
from clawgym.agents.programs.install import Installation
from clawgym.agents.programs.releases import OPENCLAW

from ..agents.openclaw.images import bare_programs, openclaw_layer
from ..agents.openclaw.releases import OFFLINE, make_release
from ..sandbox.images.make import layer, oci_folder

CLAWGYM = str(Path(sys.executable).with_name("clawgym"))


def clawgym(*words: object, **env: str) -> tuple[int, str, str]:
    argv = [CLAWGYM, *(str(word) for word in words)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **OFFLINE, **env}, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """A small release, installed as the default version."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(OPENCLAW, "2026.4.1", make_release(tmp_path / "packages", "2026.4.1", extra=1))
    return install("2026.4.1")


def test_installed_copy_is_reported_and_checked(copy: Installation) -> None:
    code, out, err = clawgym("agents", "install", "openclaw", "--check")
    assert (code, err) == (0, "comparing files\n")
    assert out == (f"OpenClaw 2026.4.1 on Node {copy.runtime}, every file verified: {copy.folder}\n")
    assert clawgym("agents", "install", "openclaw")[:2] == (0, out)
    copy.entry.chmod(0o755)
    copy.entry.write_text("other")
    code, out, err = clawgym("agents", "install", "openclaw", "--check")
    assert (code, out) == (2, "")
    assert "node_modules/openclaw/openclaw.mjs: was changed): clawgym agents install openclaw\n" in err


def test_missing_installation_is_reported_with_the_command(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    code, _, err = clawgym("agents", "install", "openclaw", "--check", **cache)
    assert code == 2
    assert err.strip().endswith(
        f"is not installed ({tmp_path}/clawgym/openclaw/2026.4.1): clawgym agents install openclaw"
    )
    code, _, err = clawgym("agents", "install", "openclaw", "--version", "latest", **cache)
    assert (code, err) == (2, "clawgym: OpenClaw version 'latest': give an exact one, such as 2026.4.1\n")


def test_image_is_prepared_and_missing_parts_are_reported(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    image = oci_folder(tmp_path / "image", [layer(*bare_programs(), *openclaw_layer())])
    code, out, err = clawgym("openclaw", "image", image, "made", **cache)
    assert (code, err) == (0, f"unpacking {image}\n")
    assert out == "OpenClaw 1.2.3 (/usr/local/bin/node /app/openclaw.mjs) in the image made\n"
    assert clawgym("images", "list", **cache)[1].startswith("made: 2 layers, ")
    code, _, err = clawgym("openclaw", "image", tmp_path / "packages", "made", DOCKER_HOST="unix:///no.sock", **cache)
    assert code == 2
    assert "see `clawgym doctor`" in err
    assert sorted(os.listdir(tmp_path)) == ["cache", "image"]
