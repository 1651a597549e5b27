"""Folders of tasks, of ours and of Harbor's, with their Dockerfile."""

from __future__ import annotations

import shutil
from pathlib import Path

from clawgym.errors import TaskError
from clawgym.tasks.formats import clawgym, harbor

from ..source import Source, scratch_folder
from .rows import _OURS, _short

READS = ("tasks.formats.clawgym", "tasks.formats.harbor", "tasks.formats._files", "tasks.formats._dockerfile")

_ENTRY = {
    "task_id": "task_1", "user_query": "Make out.json.", "metadata": {"category": "x", "y": [1]},
    "input_mount_dir": "/root/workspace",
    "clawgym": {**{k: v for k, v in _OURS["clawgym"].items() if k not in ("metadata", "workspace")},
        "workspace": "/root/workspace", "layers": {}, "tools": [], "desktop": None},
}  # fmt: skip
_SERVED = {
    "layers": {"/opt/x": {"name": "l", "wheels": [
        {"project": "p", "version": "1", "filename": "p-1-py3-none-any.whl", "sha256": "a" * 64}]}},
    "tools": [{"name": "s", "argv": ["python3", "s.py"], "env": {"A": "b"}}],
}  # fmt: skip
_DESKTOP = {"desktop": {"width": 800, "height": 600, "programs": [["xfe"]], "page": "/", "site": {"argv": ["a"]}}}
_CALLS = [{"name": "f", "arguments": {"x": 1}}]
_CONFIG = {
    "schema_version": '"1.4"', "version": '"1.0"',
    "metadata": {"author": '"a"', "clawgym": {"protocol": '"harbor"', "workspace": '"/app"', "mode": '"fork"'}},
    "agent": {"timeout_sec": "60.0"}, "verifier": {"timeout_sec": "60.0", "env": {"A": '"${B:-c}"'}},
    "environment": {"network_mode": '"no-network"', "memory": '"2G"', "cpus": "1", "storage_mb": "100",
                    "docker_image": '"python:3.12"', "workdir": '"/app"', "env": {"A": '"b"'}, "gpus": "0"},
    "task": {"name": '"o/n"', "keywords": '["a"]'}, "steps": '[{name = "a"}]',
}  # fmt: skip
_STATEMENTS = (
    *("FROM python:3.12-slim", "FROM ubuntu:24.04", "WORKDIR /app", "ENV A=1 B=$A", "ARG X=1", "COPY a.txt /app/"),
    *("COPY inputs/ ./", 'COPY ["a.txt", "/app/"]', "RUN mkdir -p x && touch x/y", "RUN apt-get install -y bash", "ADD a.txt x"),
    *("USER root", "CMD x", "# syntax=x", "RUN chmod +x a.txt", "COPY --chmod=755 *.txt ./", 'RUN ["mkdir", "x"]', "\\"),
    *("COPY --chown=a:b a.txt", "ENV A", "RUN rm -rf /var/lib/apt/lists/*", "RUN set -eux; mkdir ~", "WORKDIR ${A:-/b}"),
)  # fmt: skip


def fuzz(data: bytes) -> None:
    source = Source(data)
    folder = scratch_folder() / "task"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if source.byte() & 1:
            _harbor(source, folder)
            harbor.read_task(folder).content_hash  # noqa: B018
        else:
            _ours(source, folder)
            clawgym.read_locks(folder)
            clawgym.read_task(folder).content_hash  # noqa: B018
    except TaskError as error:
        _short(error)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _ours(source: Source, folder: Path) -> None:
    kind = source.number(0, 2)
    extra = ({}, _SERVED, _DESKTOP)[kind]
    entry = {**_ENTRY, "clawgym": {**_ENTRY["clawgym"], **extra}}
    files = {
        "data_entry.json": source.json(entry),
        "input_files/a.txt": b"x",
        "reward/reward.sh": b"python3 /reward/check.py",
    }
    files["reward/check.py"] = source.bytes(200) or b"print(1)"
    if kind:
        files["tools/s/s.py" if kind == 1 else "site/s.py"] = b""
        files |= {"solution/solve.json": source.json(_CALLS), "wrong/a.json": source.json(_CALLS)}
    else:
        files |= {"solution/solve.sh": b"true", "wrong/a.sh": source.bytes(20) or b"true"}
    _write(folder, files)


def _harbor(source: Source, folder: Path) -> None:
    config = source.rest() if source.byte() == 255 else _toml(source).encode("utf-8", "surrogateescape")
    statements = [source.pick(_STATEMENTS) for _ in range(source.number(0, 8))]
    if source.byte() > 127:
        statements.append(source.bytes(80).decode("utf-8", "replace"))
    dockerfile = "\n".join(["FROM python:3.12-slim-bookworm", *statements])
    files = {"task.toml": config, "instruction.md": source.bytes(30) or b"Do it.", "tests/test.sh": b"true"}
    files |= {"environment/a.txt": b"x", "environment/inputs/b.txt": b"", "solution/solve.sh": b"true"}
    _write(folder, files | {"environment/Dockerfile": dockerfile.encode()})


_ODD = (
    "1",
    '"x"',
    "[]",
    "{}",
    "1e400",
    "nan",
    "-1",
    "9" * 400,
    "true",
    "1979-05-27",
    '"\\u0000"',
    "[" * 3000,
    '"a/../b"',
)


def _toml(source: Source) -> str:
    lines: list[str] = []

    def value(given: str) -> str:
        return source.pick(_ODD) if source.change() == 1 else given

    def table(name: str, entries: dict) -> None:  # type: ignore[type-arg]
        lines.append(f"[{name}]" if name else "")
        below = []
        for key, given in entries.items():
            if source.change() == 2:
                continue
            if isinstance(given, dict):
                below.append((f"{name}.{key}" if name else key, given))
            else:
                lines.append(f"{key} = {value(given)}")
        for inner, given in below:
            table(inner, given)

    entries: dict = {key: given for key, given in _CONFIG.items() if key not in ("steps", "docker_image")}  # type: ignore[type-arg]
    if source.byte() > 200:
        entries = {"steps": _CONFIG["steps"], **entries}
    table("", entries)
    return "\n".join(lines)
