"""The documentation site: built without a warning, and readable without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link or an anchor that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [str(Path(sys.executable).with_name("properdocs")), "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_another_site(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=.?(?:https?:)?//[^ >]+", page.read_text())
        linked = re.findall(
            r"<link[^>]* rel=.?(?:stylesheet|preconnect)[^>]* href=.?(?:https?:)?//[^ >]+", page.read_text()
        )
        assert not loaded + linked, page


def test_diagrams_are_drawn_by_a_local_script(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if 'class="mermaid"' in page.read_text()]
    assert len(pages) >= 10
    assert all("assets/mermaid.min.js" in page.read_text() for page in pages)
    assert (site / "assets/mermaid.min.js").stat().st_size > 1e6


def test_site_documents_each_public_name(site: Path) -> None:
    import clawgym

    text = (site / "reference/api/clawgym.html").read_text()
    missing = [name for name in set(clawgym.__all__) - {"__version__"} if f'id="clawgym.{name}"' not in text]
    assert not missing
