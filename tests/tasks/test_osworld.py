"""Tasks in OSWorld's JSON: what is carried, what is named as missing, what is graded, and how."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from clawgym.agents import ScriptAgent
from clawgym.cli.tasks import app
from clawgym.errors import TaskError
from clawgym.records import Outcome, Task
from clawgym.sandbox import Backend
from clawgym.tasks.formats import clawgym, osworld, read, read_task
from clawgym.tasks.formats._osworld_checks import METRICS
from clawgym.tasks.formats._osworld_setup import HOME, NotSupported, Setup, check_reading

from ..rollouts import episode_of

EXAMPLE: dict[str, Any] = {
    "id": "11111111-note",
    "snapshot": "os",
    "instruction": "Write milk into note.txt on the desktop.",
    "source": "by hand",
    "config": [
        {"type": "download", "parameters": {"files": [{"url": "http://x/a?id=1", "path": f"{HOME}/Desktop/note.txt"}]}},
        {"type": "execute", "parameters": {"command": "echo 'password' | sudo -S mkdir ~/Desktop/done", "shell": True}},
        {
            "type": "execute",
            "parameters": {"command": ["python", "-c", "import pyautogui; pyautogui.click(960, 540);"]},
        },
        {"type": "sleep", "parameters": {"seconds": 1}},
        {"type": "open", "parameters": {"path": f"{HOME}/Desktop/note.txt"}},
    ],
    "related_apps": ["os"],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": f"[ -d ~/Desktop/done ] && cat {HOME}/Desktop/note.txt"},
        "expected": {"type": "rule", "rules": {"expected": "milk"}},
    },
}


def written(folder: Path, **changes: Any) -> Path:
    """EXAMPLE with these changes, and beside it what it downloads."""
    body = copy.deepcopy(EXAMPLE) | changes
    path = folder / "os" / f"{body['id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body))
    (folder / "os" / body["id"]).mkdir(exist_ok=True)
    (folder / "os" / body["id"] / "note.txt").write_text("bread")
    return path


def evaluated(folder: Path, func: Any, result: Any = None, expected: Any = None, **more: Any) -> Path:
    evaluator = {"func": func, "result": result, "expected": expected, **more}
    return written(folder, evaluator={name: value for name, value in evaluator.items() if value is not None})


def test_task_is_read(tmp_path: Path):
    task = osworld.read_task(written(tmp_path))
    assert task.unsupported is None
    assert (task.id, task.workspace) == ("11111111-note", HOME)
    assert [(f.path, f.read()) for f in task.inputs] == [("Desktop/done/.gitkeep", b""), ("Desktop/note.txt", b"bread")]
    assert task.desktop is not None
    assert (task.desktop.width, task.desktop.programs) == (1920, (("xfwrite", "Desktop/note.txt"),))


def test_folders_and_single_files_are_detected(tmp_path: Path):
    path = written(tmp_path / "examples")
    written(tmp_path / "examples", id="other")
    (tmp_path / "examples" / "os" / "stray.json").write_text("{}")
    (tmp_path / "test_all.json").write_text('{"os": []}')
    for folder in (tmp_path, tmp_path / "examples", tmp_path / "examples" / "os"):
        found = read(folder)
        assert sorted(task.id for task in found.tasks) == ["11111111-note", "other"]
        assert [name.rpartition("/")[2] for name in found.problems] == ["stray.json"]
    assert read(path).tasks[0].id == "11111111-note"


def test_import_command_keeps_hash(tmp_path: Path):
    written(tmp_path / "set")
    written(tmp_path / "set", id="other", related_apps=["picard"])
    done = CliRunner().invoke(app, ["import", str(tmp_path / "set"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for task in read(tmp_path / "set").tasks:
        again = read_task(tmp_path / "out" / task.id)
        assert (again.content_hash, again.unsupported) == (task.content_hash, task.unsupported)


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program of OSWorld's tasks is on this machine."""
    monkeypatch.setattr("clawgym.tasks.formats._osworld_programs.shutil.which", lambda name: None)


@pytest.fixture
def all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs of OSWorld's tasks are on this machine."""
    monkeypatch.setattr("clawgym.tasks.formats._osworld_programs.shutil.which", lambda name: f"/usr/bin/{name}")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"related_apps": ["os", "gimp"]}, "image not here: it needs the program 'gimp': install gimp"),
        ({"related_apps": ["os", "picard"]}, "platform: it needs the app 'picard'"),
        ({"config": [{"type": "chrome_open_tabs", "parameters": {}}]}, "network: its config opens pages"),
        ({"config": [{"type": "launch", "parameters": {"command": ["vlc", "a.mp4"]}}]}, "image not here: it needs"),
        ({"config": [{"type": "launch", "parameters": {"command": ["eog", "a.png"]}}]}, "platform: it starts"),
        ({"config": [{"type": "open", "parameters": {"path": "~/a.docx"}}]}, "a.docx"),
        ({"config": [{"type": "googledrive", "parameters": {}}]}, "network: its config has a step"),
        ({"config": [{"type": "update_browse_history", "parameters": {}}]}, "ours: its config has a step"),
        ({"instruction": "Look at https://x/y."}, "network: its agent works with pages"),
        ({"proxy": True}, "network: its agent works with pages"),
        ({"config": [{"type": "execute", "parameters": {"command": "gsettings set a b", "shell": True}}]}, "gsettings"),
        ({"config": [{"type": "execute", "parameters": {"command": "mkdir /srv/x"}}]}, "/srv/x, which is outside of"),
        ({"config": [{"type": "execute", "parameters": {"command": "mkdir ~/../x"}}]}, "outside of"),
        (
            {
                "config": [
                    {
                        "type": "execute",
                        "parameters": {"command": ["python", "-c", "import pyautogui; pyautogui.dragTo(1, 2)"]},
                    }
                ]
            },
            "pyautogui",
        ),
        (
            {"config": [{"type": "download", "parameters": {"files": [{"url": "http://x/y", "path": "~/b.txt"}]}}]},
            "'b.txt': put the file into",
        ),
    ],
)
@pytest.mark.usefixtures("no_programs")
def test_unsupported_feature_is_named(tmp_path: Path, changes: dict[str, Any], named: str):
    task = osworld.read_task(written(tmp_path, **changes))
    assert task.unsupported is not None
    assert task.unsupported.partition(":")[0] in osworld.REASONS
    assert named in task.unsupported


RULE = {"type": "rule", "rules": {"expected": "x"}}
FILE = {"type": "vm_file", "path": "~/a.txt", "dest": "a.txt"}


@pytest.mark.parametrize(
    ("evaluator", "named"),
    [
        (("compare_audios", FILE, RULE), "ours: its evaluator is 'compare_audios'"),
        (
            ("exact_match", {"type": "vm_terminal_output"}, RULE),
            "platform: its evaluator looks at 'vm_terminal_output'",
        ),
        (("exact_match", {"type": "active_tab_info"}, RULE), "network: its evaluator looks at 'active_tab_info'"),
        (("exact_match", {"type": "cache_file", "path": "x"}, RULE), "which it does not make"),
        (("exact_match", {"type": "vm_file", "path": "/etc/passwd"}, RULE), "/etc/passwd"),
        (("exact_match", {"type": "vm_command_line", "command": "timedatectl status"}, RULE), "timedatectl"),
        (("exact_match", FILE, {"type": "rule_relativeTime"}), "rule_relativeTime"),
        (("compare_text_file", FILE, {"type": "cloud_file", "path": "http://x/y", "dest": "gold.txt"}), "gold.txt"),
    ],
)
def test_unsupported_evaluator_is_named(tmp_path: Path, evaluator: tuple[Any, ...], named: str):
    task = osworld.read_task(evaluated(tmp_path, *evaluator))
    assert task.unsupported is not None
    assert named in task.unsupported


def test_postconfig_becomes_closing_steps(tmp_path: Path):
    saved = ["python", "-c", "import pyautogui; import time; pyautogui.hotkey('ctrl', 's'); time.sleep(0.5); "]
    steps = [
        {"type": "activate_window", "parameters": {"window_name": "a.txt - Editor", "strict": True}},
        {"type": "sleep", "parameters": {"seconds": 3}},
        {"type": "execute", "parameters": {"command": saved}},
        {"type": "execute", "parameters": {"command": "cp a.txt b.txt", "shell": True}},
        {"type": "launch", "parameters": {"command": ["pkill", "chrome"]}},
        {"type": "launch", "parameters": {"command": ["google-chrome"]}},
    ]
    task = osworld.read_task(evaluated(tmp_path, "exact_match", FILE, RULE, postconfig=steps))
    assert task.unsupported is None
    assert task.desktop is not None
    focus, save, copy, kill = task.desktop.closing
    assert focus.words == ("a.txt - Editor",)
    assert json.loads(save.words[0]) == {"action": "key", "keys": ["ctrl", "s"]}
    assert copy.words == ("bash", "-c", "cp a.txt b.txt")
    assert (kill.kind, kill.words[-1]) == ("run", "chromium")


def test_file_of_the_evaluator_is_not_among_the_inputs(tmp_path: Path):
    steps = [
        {"type": "download", "parameters": {"files": [{"url": "http://x/eval.sh", "path": "eval.sh"}]}},
        {"type": "execute", "parameters": {"command": "chmod +x eval.sh", "shell": True}},
    ]
    rules = {"type": "rule", "rules": {"include": ["ok"]}}
    path = evaluated(
        tmp_path,
        "check_include_exclude",
        {"type": "vm_command_line", "command": "bash eval.sh"},
        rules,
        postconfig=steps,
    )
    (path.with_suffix("") / "eval.sh").write_text("echo ok")
    task = osworld.read_task(path)
    assert task.unsupported is None
    assert "eval.sh" not in [file.path for file in task.inputs]
    assert b"echo ok" in [file.read() for file in task.verifier.files]
    assert task.desktop is not None
    assert not task.desktop.closing


@pytest.mark.usefixtures("all_programs")
def test_config_becomes_opening_steps(tmp_path: Path):
    config = [
        *EXAMPLE["config"][:1],
        {"type": "execute", "parameters": {"command": "tar -xf ~/a.tar", "shell": True}},
        {"type": "launch", "parameters": {"command": ["google-chrome", "--remote-debugging-port=1337"]}},
        {"type": "launch", "parameters": {"command": ["socat", "tcp-listen:9222,fork", "tcp:localhost:1337"]}},
        {
            "type": "launch",
            "parameters": {"command": "VLC_VERBOSE=-1 vlc --no-audio '/home/user/a b.mp4'", "shell": True},
        },
        {"type": "activate_window", "parameters": {"window_name": "VLC"}},
        {
            "type": "execute",
            "parameters": {"command": ["python", "-c", "import pyautogui; pyautogui.hotkey('ctrl', 'alt', 't')"]},
        },
    ]
    task = osworld.read_task(written(tmp_path, config=config, related_apps=["os", "vlc"]))
    assert task.unsupported is None
    assert task.desktop is not None
    run, chrome, vlc, focus, terminal = task.desktop.opening
    assert run.words == ("bash", "-c", "tar -xf ~/a.tar")
    assert (chrome.kind, chrome.words[0]) == ("start", "chromium")
    assert vlc.words[-2:] == ("--no-audio", "/home/user/a b.mp4")
    assert (focus.kind, focus.words) == ("focus", ("VLC",))
    assert terminal.words[0] == "lxterminal"
    assert ".config/vlc/vlcrc" in [file.path for file in task.inputs]
    clawgym.write_task(task, tmp_path / task.id)
    again = read_task(tmp_path / task.id)
    assert again.desktop == task.desktop
    assert again.content_hash == task.content_hash


def test_published_files_are_found_in_a_copy_of_the_cache(tmp_path: Path):
    url = "https://x/datasets/y/resolve/main/os/11111111-note/a%20b.txt"
    config = [{"type": "download", "parameters": {"files": [{"url": url, "path": "~/c.txt"}]}}]
    path = written(tmp_path / "examples", config=config)
    assert "put the file into" in str(osworld.read_task(path).unsupported)
    copy = tmp_path / osworld.CACHE / "os" / "11111111-note" / "a b.txt"
    copy.parent.mkdir(parents=True)
    copy.write_text("found")
    assert [(f.path, f.read()) for f in osworld.read_task(path).inputs if f.path == "c.txt"] == [("c.txt", b"found")]


def test_only_listed_tasks_are_read(tmp_path: Path):
    for name in ("one", "two"):
        written(tmp_path / "examples", id=name)
    (tmp_path / "test_all.json").write_text('{"os": ["two"]}')
    assert [task.id for task in read(tmp_path).tasks] == ["two"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": "a/b"}, "field id"),
        ({"instruction": " "}, "field instruction"),
        ({"config": {}}, "field config"),
        ({"config": [{"parameters": {}}]}, "field config.0.type"),
        ({"config": [{"type": "download", "parameters": {"files": 3}}]}, "config.0.parameters.files"),
        ({"config": [{"type": "download", "parameters": {"files": [{"path": "x"}]}}]}, "parameters.files.0.url"),
        ({"config": [{"type": "execute", "parameters": {}}]}, "config.0.parameters.command"),
        ({"evaluator": {"func": ""}}, "field evaluator.func"),
        ({"evaluator": {"func": "exact_match", "result": FILE}}, "evaluator.expected"),
        ({"evaluator": {"func": "exact_match", "result": FILE, "expected": {"type": "rule"}}}, "expected.rules"),
        (
            {"evaluator": {"func": ["exact_match"] * 2, "result": [FILE] * 2, "expected": [RULE]}},
            "evaluator.expected: has 1 entries for 2",
        ),
        ({"evaluator": {"func": "exact_match", "conj": "xor"}}, "evaluator.conj"),
    ],
)
def test_invalid_file_names_the_field(tmp_path: Path, changes: dict[str, Any], field: str):
    path = written(tmp_path, **({"id": "x"} | changes if "/" not in changes.get("id", "") else {}))
    path.write_text(json.dumps(copy.deepcopy(EXAMPLE) | changes))
    with pytest.raises(TaskError) as error:
        osworld.read_task(path)
    assert field in str(error.value)
    assert str(path) in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
places = st.sampled_from(
    [
        *(("id",), ("config",), ("config", 0), ("config", 0, "parameters"), ("config", 0, "parameters", "files")),
        *(("config", 1, "parameters", "command"), ("config", 4, "parameters", "path"), ("related_apps",)),
        *(("evaluator",), ("evaluator", "func"), ("evaluator", "result"), ("evaluator", "result", "command")),
        *(("evaluator", "expected"), ("evaluator", "expected", "rules"), ("instruction",), ("config", 2, "type")),
    ]
)
words = st.sampled_from(
    [
        *("mkdir", "touch", "echo", "cd", "chmod", "sudo", "-S", "-p", "~", "~/a", "a", "..", "/", ">", ">>", "&&"),
        *(";", "|", "'", '"', "$x", "*", "(", "\\", "#", "\n"),
    ]
)
scripts = st.lists(words, max_size=8).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(place=places, value=json_values | scripts)
def test_any_json_is_a_task_or_a_task_error(place: tuple[Any, ...], value: Any, tmp_path_factory: Any):
    path = written(tmp_path_factory.mktemp("set"))
    body = copy.deepcopy(EXAMPLE)
    inner: Any = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(body))
    with suppress(TaskError):
        task = osworld.read_task(path)
        assert all(".." not in file.path.split("/") for file in task.inputs)


@settings(max_examples=60, deadline=None)
@given(names=st.lists(st.sampled_from("abc"), min_size=1, max_size=3), texts=st.lists(st.text("xy ><;&'", max_size=6)))
def test_interpreted_commands_match_bash(names: list[str], texts: list[str], tmp_path_factory: Any):
    folder = tmp_path_factory.mktemp("home")
    lines = [f"mkdir -p {'/'.join(names)} && touch {names[0]}/t"]
    lines += [f"echo {shlex.quote(text)} >> {names[0]}/t" for text in texts]
    setup = Setup(folder, folders=set())
    setup.step("execute", {"command": "\n".join(lines)}, "here")
    if setup.opening:  # quoted, it might be taken for a part of the command
        assert any(set(text) & set("<>;&'") for text in texts)
        return
    subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, check=True)
    assert setup.files[f"{names[0]}/t"].read() == (folder / names[0] / "t").read_bytes()
    assert all((folder / name).is_dir() for name in setup.folders)


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p a/b; cd a && touch x && cd b && touch y; cd ..; echo z > z",
        "mkdir a\ntouch a/x; chmod 755 a/x; chmod -R 700 a",
        "echo -n one > f && echo two >> f && touch f && echo three > g",
    ],
)
def test_interpreted_scripts_match_bash(command: str, tmp_path: Path):
    setup = Setup(tmp_path, folders=set())
    setup.step("execute", {"command": command}, "here")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    left = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: file.read() for path, file in setup.files.items()} == left


@pytest.mark.parametrize("command", ["cd", "cd -P a", "cd a b", "mkdir -m 700 a", "touch -d now a", "echo a | tee b"])
def test_other_scripts_run_in_the_sandbox(command: str, tmp_path: Path):
    setup = Setup(tmp_path, folders=set())
    setup.step("execute", {"command": command}, "here")
    assert [step.words for step in setup.opening] == [("bash", "-c", command)]
    assert not setup.files


@pytest.mark.parametrize(
    "command",
    ["if [ -f ~/a ]; then echo yes; else echo no; fi", "grep -c x ~/a 2>/dev/null | wc -l", "ls -R ~", "a=$(cat ~/b)"],
)
def test_read_only_commands_are_supported(command: str):
    check_reading(command)


@pytest.mark.parametrize(
    "command",
    [
        "python3 ~/a.py",
        "cat $(which x)",
        "echo $SHELL",
        "bash eval.sh",
        "cat /etc/passwd",
        "echo a > b",
        "ps -ef",
        "x=$(rm ~/a)",
    ],
)
def test_other_commands_are_unsupported(command: str):
    with pytest.raises(NotSupported):
        check_reading(command)


@pytest.mark.parametrize(
    ("func", "got", "expected", "options", "right"),
    [
        ("exact_match", "a\n", {"expected": "a\n"}, {}, True),
        ("exact_match", "a", {"expected": "a\n"}, {}, False),
        ("literal_match", "A", {"expected": "a"}, {"ignore_case": True}, True),
        ("literal_match", "A", {"expected": "a"}, {}, False),
        ("is_in_list", ["a", "b"], {"expected": "b"}, {}, True),
        ("check_include_exclude", "a b", {"include": ["a"], "exclude": ["c"]}, {}, True),
        ("check_include_exclude", "a c", {"include": ["a"], "exclude": ["c"]}, {}, False),
        ("check_list", "one\ntwo", {"expect": ["^t"], "unexpect": ["x"]}, {}, True),
        ("check_list", "one\ntwo", {"expect": ["^n"]}, {}, False),
        ("compare_text_file", "a \n b", "a b", {"ignore_blanks": True}, True),
        ("compare_text_file", "a \n b", "a b", {}, False),
        ("check_moved_jpgs", ["b", "a"], {"expected": ["a", "b"]}, {}, True),
        ("check_moved_jpgs", ["b", "a", "c"], {"expected": ["a", "b"]}, {}, False),
    ],
)
def test_metrics(func: str, got: Any, expected: Any, options: dict[str, Any], right: bool):
    assert METRICS[func](got, expected, options) is right


def actions(*given: dict[str, Any]) -> ScriptAgent:
    return ScriptAgent(json.dumps([{"name": "computer_use", "arguments": action} for action in given]).encode())


WRITES = (
    *({"action": "left_click", "coordinate": [600, 500]}, {"action": "key", "keys": ["ctrl", "a"]}),
    *({"action": "type", "text": "milk"}, {"action": "key", "keys": ["ctrl", "s"]}),
)
DONE, FAIL = {"action": "done"}, {"action": "fail"}


async def solved(task: Task, backend: Backend, *given: dict[str, Any]) -> bool:
    episode = await episode_of(task, actions(*given), backend)
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED), (episode.cause, episode.error)
    assert episode.result is not None
    assert episode.result.official == episode.result.strict
    return episode.outcome is Outcome.SOLVED


@pytest.fixture
def programs() -> None:
    if missing := [name for name in ("Xvfb", "openbox", "xfwrite", "xfe") if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)} here: make system")


@pytest.mark.usefixtures("programs")
async def test_solution_passes_and_noop_fails(tmp_path: Path, backend: Backend):
    task = osworld.read_task(written(tmp_path))
    assert await solved(task, backend, *WRITES, DONE)
    assert not await solved(task, backend, DONE)
    assert not await solved(task, backend, *WRITES, FAIL)


@pytest.mark.usefixtures("programs")
async def test_infeasible_task_passes_on_fail_only(tmp_path: Path, backend: Backend):
    path = written(tmp_path, config=[], evaluator={"func": "infeasible"})
    clawgym.write_task(osworld.read_task(path), tmp_path / "11111111-note")
    task = read_task(tmp_path / "11111111-note")
    assert await solved(task, backend, FAIL)
    assert not await solved(task, backend, DONE)


@pytest.mark.usefixtures("programs")
async def test_tests_are_combined_by_any_or_all(tmp_path: Path, backend: Backend):
    (tmp_path / "os" / "11111111-note").mkdir(parents=True)
    (tmp_path / "os" / "11111111-note" / "gold.txt").write_text("MILK\n")
    gold = {"type": "cloud_file", "path": "http://x/y", "dest": "gold.txt"}
    note = {"type": "vm_file", "path": f"{HOME}/Desktop/note.txt", "dest": "note.txt"}
    folder = {"type": "list_directory", "path": "~/Desktop"}
    names = {"type": "rule", "rules": {"expected": ["done", "no such file"]}}
    options = [{"ignore_blanks": True, "ignore_case": True}, {}]
    for conj, paid in (("or", True), ("and", False)):
        funcs = ["compare_text_file", "check_moved_jpgs"]
        path = evaluated(tmp_path, funcs, [note, folder], [gold, names], options=options, conj=conj)
        task = osworld.read_task(path)
        assert task.unsupported is None
        assert await solved(task, backend, *WRITES, DONE) is paid


def test_published_examples_are_read():
    """``CLAWGYM_OSWORLD`` is a copy of the published folder ``evaluation_examples``."""
    root = os.environ.get("CLAWGYM_OSWORLD")
    if not root:
        pytest.skip("CLAWGYM_OSWORLD does not point at a copy of OSWorld's evaluation_examples")
    found = read(Path(root))
    listed = {name for names in json.loads((Path(root) / "test_all.json").read_text()).values() for name in names}
    tasks = [task for task in found.tasks if task.id in listed]
    kinds = Counter(str(task.unsupported).partition(":")[0] for task in tasks)
    print(len(listed), "listed,", len(tasks), "read,", kinds.pop("None"), "run here;", dict(kinds))
    assert len(tasks) == len(listed)
    assert set(kinds) <= set(osworld.REASONS)
    assert kinds["ours"] <= len(tasks) / 20
    assert all(task.instruction and task.desktop for task in tasks)
