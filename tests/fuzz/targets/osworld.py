"""Tasks of OSWorld, one JSON file each."""

from __future__ import annotations

from clawgym.errors import TaskError
from clawgym.tasks.formats.osworld import is_file, read_task

from ..source import Source, scratch_folder
from .rows import _short

READS = ("tasks.formats.osworld",)

_LIKE = {
    "id": "o-1",
    "instruction": "Do it.",
    "related_apps": ["os"],
    "source": "x",
    "config": [
        {"type": "download", "parameters": {"files": [{"url": "https://x/a.txt", "path": "/home/user/Desktop/a.txt"}]}},
        {"type": "execute", "parameters": {"command": "mkdir -p ~/Desktop/x && echo a > ~/b.txt; cd x"}},
        {"type": "command", "parameters": {"command": ["bash", "-c", "touch /home/user/c"]}},
        {"type": "open", "parameters": {"path": "/home/user/Desktop/a.txt"}},
        {"type": "launch", "parameters": {"command": ["nautilus", "/home/user"]}},
        {"type": "sleep", "parameters": {"seconds": 1}},
    ],
    "evaluator": {
        "func": ["check_include_exclude", "exact_match", "compare_text_file", "check_list"],
        "conj": "and",
        "postconfig": [{"type": "sleep", "parameters": {}}],
        "result": [
            {"type": "vm_command_line", "command": "cat /home/user/b.txt | grep a 2>/dev/null"},
            {"type": "list_directory", "path": "/home/user"},
            {"type": "vm_file", "path": "/home/user/b.txt", "dest": "b.txt"},
            {"type": "vm_file", "path": "~/c", "dest": "c"},
        ],
        "expected": [
            {"type": "rule", "rules": {"include": ["a"], "exclude": ["b"]}},
            {"type": "rule", "rules": {"expected": "a"}},
            {"type": "cloud_file", "path": "https://x/a.txt", "dest": "a.txt"},
            {"type": "rule", "rules": {"expect": ["a.*"], "unexpect": ["b"]}},
        ],
        "options": [{}, {}, {}, {}],
    },
}


def fuzz(data: bytes) -> None:
    folder = scratch_folder()
    (folder / "task").mkdir(exist_ok=True)
    (folder / "task/a.txt").write_bytes(b"x")
    path = folder / "task.json"
    path.write_bytes(Source(data).json(_LIKE))
    is_file(path)
    try:
        task = read_task(path)
    except TaskError as error:
        _short(error)
        return
    task.content_hash  # noqa: B018
    assert all(not file.path.startswith("/") and ".." not in file.path.split("/") for file in task.inputs)
