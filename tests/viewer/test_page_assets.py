"""The committed script and style sheet of the pages."""

from __future__ import annotations

import subprocess
from pathlib import Path

from clawgym.agents.programs._npm import npm_command

from .made import WEB


def test_assets_are_those_of_the_sources(node_modules: Path) -> None:
    """Byte by byte: run `make web` after a change of web/."""
    built = node_modules.parent / "clawgym/reporting/web"
    done = subprocess.run(
        [*npm_command(), "run", "build"], cwd=node_modules, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in built.iterdir()) == sorted(path.name for path in WEB.iterdir())
    for path in WEB.iterdir():
        assert (built / path.name).read_bytes() == path.read_bytes(), f"{path.name} is not from web/: run make web"


def test_assets_can_be_embedded_and_load_nothing() -> None:
    script, style = (WEB / "app.js").read_text(), (WEB / "app.css").read_text()
    assert len(script) + len(style) < 640_000, "a mailed report contains both"
    assert "</script" not in script
    assert "<!--" not in script
    assert "</style" not in style
    assert "sourceMappingURL" not in script + style
    assert "@import" not in style
    assert "url(" not in style.replace("url(#", "")
