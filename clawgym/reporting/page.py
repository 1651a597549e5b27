"""The page of ``clawgym view``, and the same page as one file that can be mailed.

Invariants: the page loads nothing but its own script and style. In the file, its Content-Security-Policy allows these
by their hashes only. The texts of tasks, agents and verifiers are data, with control and format characters as visible
escapes; the page never makes markup of them.

The sources of the page are in ``web/`` of the repository; its answers have the types of ``web/src/api.ts``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from clawgym.visible import visible_lines

__all__ = ["asset", "mailable", "plain", "shell", "source_answer", "source_id", "to_json"]

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""


def plain(value: Any) -> Any:
    """``value`` as JSON data that a page may show: visible text, and null for NaN and infinite numbers."""
    if isinstance(value, str):
        return visible_lines(value)
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {visible_lines(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return visible_lines(str(value))


def to_json(answer: Any) -> str:
    """An answer as compact JSON (:func:`plain`)."""
    return json.dumps(plain(answer), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def source_id(name: str, path: Path | str) -> str:
    """The id of a source: its name, and a hash of its path. Safe in the path of a URL as it is."""
    slug = re.sub(r"[^a-z0-9_]+", "-", name.lower())[:40].strip("-") or "source"
    return f"{slug}-{hashlib.sha256(str(path).encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def source_answer(id: str, kind: str, name: str, path: str, **more: Any) -> dict[str, Any]:
    """``Source`` of the answers."""
    return {
        "id": id,
        "kind": kind,
        "name": name,
        "path": path,
        "state": "unknown",
        "problem": "",
        "changed": 0.0,
        "label": "",
        "parent": None,
        "run": None,
        "training": None,
        "indexed": None,
    } | more


def asset(name: str) -> str:
    """The text of ``app.js`` or ``app.css``."""
    return resources.files("clawgym.reporting").joinpath("web", name).read_text("utf-8")


def shell() -> str:
    """The HTML of the served page, whose script and style are at ``/app.js`` and ``/app.css``."""
    return (
        f'{_HEAD}<title>ClawGym</title>\n<link rel="stylesheet" href="/app.css">\n</head>\n'
        '<body>\n<div id="root"></div>\n<script src="/app.js"></script>\n</body>\n</html>\n'
    )


def mailable(title: str, home: str, answers: Mapping[str, Any]) -> str:
    """The page as one file.

    Args:
        title: of the page.
        home: the place that it opens with, such as ``/runs/ID``.
        answers: address, without ``/api/`` and without a query -> answer. ``sources`` must be there.
    """
    script, style = asset("app.js"), asset("app.css")
    if "</script" in script.lower() or "</style" in style.lower():
        raise ValueError("app.js or app.css closes its own element: build them again (make web)")
    data = to_json({"home": home, "answers": answers})
    # JSON that cannot close its element.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    named = visible_lines(title)[:200].replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'{_HEAD}<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{named}</title>\n'
        f'<style>{style}</style>\n</head>\n<body>\n<div id="root"></div>\n<noscript>This page needs JavaScript.'
        f'</noscript>\n<script type="application/json" id="clawgym-data">{data}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
