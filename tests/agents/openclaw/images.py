"""Small images in the layout of the official one: programs of this machine, and a shell script as node."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ...sandbox.images.make import Entry

PROGRAMS = ("bash", "cat", "id", "ls", "python3", "sh", "tar", "tr")
SAYS = '#!/bin/sh\necho "started $@"\n'


def small_system() -> list[Entry]:
    """Programs of this machine, with the libraries that they load."""
    chosen = [os.path.realpath(f"/usr/bin/{name}") for name in PROGRAMS]
    text = subprocess.run(["ldd", *chosen], capture_output=True, text=True, check=True).stdout
    libraries = sorted(set(re.findall(r"(/\S+\.so\S*) \(", text)))
    made: list[Entry] = [(name, None) for name in ("usr/bin", "etc", "tmp", "root", "usr/lib", "dev")]
    made += [(name, f"->usr/{name}") for name in ("bin", "lib", "lib64")]
    for path in chosen:
        made.append((f"usr/bin/{os.path.basename(path)}", Path(path).read_bytes()))
    for name in PROGRAMS:
        target = os.path.basename(os.path.realpath(f"/usr/bin/{name}"))
        if target != name:
            made.append((f"usr/bin/{name}", f"->{target}"))
    for library in libraries:
        made.append((f"usr/{library.removeprefix('/usr').lstrip('/')}", Path(library).read_bytes()))
    made += _python()
    return [*made, ("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\n"), ("etc/group", b"root:x:0:\n")]


def _python() -> list[Entry]:
    """The standard library of /usr/bin/python3, without its large modules."""
    ask = "import os; print(os.path.dirname(os.__file__))"
    done = subprocess.run(["/usr/bin/python3", "-I", "-S", "-c", ask], capture_output=True, text=True, check=True)
    top = Path(done.stdout.strip())
    skipped = {"test", "__pycache__", "idlelib", "ensurepip", "lib2to3", "dist-packages", "site-packages", "pydoc_data"}
    made: list[Entry] = []
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            path = Path(folder, name)
            if path.is_file() and not name.endswith(".a"):
                made.append((str(path).lstrip("/"), path.read_bytes()))
    return made


def openclaw_layer(version: str = "1.2.3", *, changes: Mapping[str, str] = {}) -> list[Entry]:
    """OpenClaw as in the official image: ``/app``, and node from its base."""
    files = {
        "app/package.json": json.dumps({"name": "openclaw", "version": version}),
        "app/openclaw.mjs": "",
        "app/dist/index.js": "",
        "usr/local/bin/node": SAYS,
        **changes,
    }
    return [(name, text.encode()) for name, text in files.items() if text != "-"]


def bare_programs() -> list[Entry]:
    """The programs that an image needs, all empty: for inspection only."""
    return [*((f"usr/bin/{name}", b"") for name in ("sh", "bash", "python3", "tar")), ("bin", "->usr/bin")]
