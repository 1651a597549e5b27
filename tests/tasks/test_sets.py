"""Task sets by name: where they are looked for, what is said when they are not there."""

from __future__ import annotations

import builtins
import types
import zipfile
from pathlib import Path

import platformdirs
import pytest

from clawgym import registry
from clawgym.errors import DownloadError, MissingDependency, TaskError, TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.records.manifest import make_manifest
from clawgym.tasks import _hub, available, layers, load, names, packs, write
from clawgym.tasks.formats.rows import write_row
from clawgym.tasks.scaffold import starter
from clawgym.tasks.sets import PUBLISHED, Published

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """No data folder, an empty cache, no Hub."""
    monkeypatch.delenv("CLAWGYM_DATA", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *a, **k: str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: pytest.fail("the Hub was asked"))


def fake_hub(monkeypatch, files: dict[str, bytes], asked: list[tuple] | None = None):
    class Api:
        def dataset_info(self, repo, revision=None):
            if asked is not None:
                asked.append((repo, revision))
            return types.SimpleNamespace(sha=SHA, siblings=[types.SimpleNamespace(rfilename=name) for name in files])

    def download(repo, filename, *, repo_type, revision, local_dir):
        assert (repo_type, revision) == ("dataset", SHA)
        Path(local_dir).mkdir(parents=True)
        (Path(local_dir) / filename).write_bytes(files[filename])

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)


def rows(*ids: str) -> bytes:
    return b"".join(write_row(starter(task_id)) for task_id in ids)


@pytest.mark.parametrize("below", ["", "data", "RL/data"])
def test_data_folder_may_be_given_at_any_level(tmp_path, monkeypatch, below):
    write([starter("a"), starter("b")], tmp_path / "root" / below / "clawgym_eval")
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path / "root"))
    tasks = load("ClawGym-Bench")
    assert (tasks.name, [task.id for task in tasks.tasks]) == ("ClawGym-Bench", ["a", "b"])
    assert available("ClawGym-Bench").startswith("in ")
    assert load(f"ClawGym-Bench@{tasks.content_hash[:8]}").version == tasks.content_hash


def test_local_copy_of_another_version_is_not_used(tmp_path, monkeypatch):
    write([starter("a")], tmp_path / "clawgym_eval")
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path))
    fake_hub(monkeypatch, {"bench.jsonl": rows("h")})
    assert [task.id for task in load("ClawGym-Bench@feedbeef").tasks] == ["h"]


def test_version_of_a_clone_is_its_commit(tmp_path, monkeypatch):
    write([starter("a")], tmp_path / "root/RL/data/clawgym_eval")
    (tmp_path / "root/.git/refs/heads").mkdir(parents=True)
    (tmp_path / "root/.git/HEAD").write_text("ref: refs/heads/main\n")
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path / "root"))
    assert load("ClawGym-Bench").version == ""
    (tmp_path / "root/.git/packed-refs").write_text(f"# pack-refs\n{SHA} refs/heads/main\n")
    assert load("ClawGym-Bench").version == SHA
    (tmp_path / "secret").write_text(SHA)
    for hostile in ("../../secret", "refs/link", str(tmp_path / "secret"), "refs/heads/words"):
        (tmp_path / "root/.git/HEAD").write_text(f"ref: {hostile}\n")
        (tmp_path / "root/.git/refs/heads/words").write_text("words of another file")
        (tmp_path / "root/.git/refs/link").unlink(missing_ok=True)
        (tmp_path / "root/.git/refs/link").symlink_to(tmp_path / "secret")
        assert load("ClawGym-Bench").version == "", hostile
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path / "root/RL/data"))
    assert load("ClawGym-Bench").version == "", "a clone around the data folder may be anything"


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A set ``Packaged`` in the wheel of its own package, and the addresses that were asked for it."""
    fetched: list[str] = []
    path = tmp_path / "a_set-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a_set/tasks.jsonl", rows("a", "b"))

    def fetch(project, filename, sha256):
        fetched.append(f"{project} {filename} {sha256[:4]}")
        return path

    monkeypatch.setattr(layers, "fetch", fetch)
    wheel = layers.Wheel("a-set", "1.2", path.name, "ab" * 32)
    entry = Published("two tasks", "a_set/tasks.jsonl", wheel=wheel, home="https://a.set", license="MIT")
    monkeypatch.setitem(PUBLISHED, "Packaged", entry)
    return fetched


def test_set_of_a_package_is_read_from_its_pinned_wheel(packaged):
    assert available("Packaged") == "not here: downloaded at first use"
    tasks = load("Packaged")
    assert ([task.id for task in tasks.tasks], tasks.version, tasks.license) == (["a", "b"], "1.2", "MIT")
    assert available("Packaged") == "downloaded, version 1.2"
    assert load("Packaged@1.2").content_hash == tasks.content_hash
    assert packaged == ["a-set a_set-1.2-py3-none-any.whl abab"]
    about = make_manifest("eval", tasks).task_set
    assert (about["version"], about["license"]) == ("1.2", "MIT")


def test_set_of_a_package_that_is_not_here_says_what_to_do(packaged, tmp_path, monkeypatch):
    with pytest.raises(TaskSetNotFound, match=r"pinned to a-set 1\.2.*go online once, or set CLAWGYM_DATA.*a\.set$"):
        load("Packaged@2")

    def offline(*args):
        raise DownloadError("no route")

    monkeypatch.setattr(layers, "fetch", offline)
    with pytest.raises(TaskSetNotFound, match=r"^Packaged is not here \(.*no route"):
        load("Packaged")
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path))
    (tmp_path / "a_set").mkdir()
    (tmp_path / "a_set/tasks.jsonl").write_bytes(rows("c"))
    assert [task.id for task in load("Packaged").tasks] == ["c"], "a local copy comes first"


def test_hub_is_asked_last_and_cached(tmp_path, monkeypatch):
    asked: list[tuple] = []
    fake_hub(monkeypatch, {"syn_task.jsonl": rows("a", "b"), "other.jsonl": b""}, asked)
    tasks = load("ClawGym-Task")
    assert (tasks.version, len(tasks)) == (SHA, 2)
    assert asked == [("RUC-AIBOX/ClawGym-Task", None)]
    assert [p.name for p in (tmp_path / "cache/tasksets/ClawGym-Task").iterdir()] == [SHA]
    assert load("ClawGym-Task").content_hash == tasks.content_hash
    assert load(f"ClawGym-Task@{SHA[:7]}").version == SHA
    assert len(asked) == 1
    assert SHA[:12] in available("ClawGym-Task")
    load("ClawGym-Task@main")
    assert asked[1] == ("RUC-AIBOX/ClawGym-Task", "main")


def test_failed_download_leaves_nothing(tmp_path, monkeypatch):
    fake_hub(monkeypatch, {"syn_task.jsonl": rows("a")})

    def cut(*args, local_dir, **kwargs):
        Path(local_dir).mkdir(parents=True)
        (Path(local_dir) / "syn_task.jsonl").write_bytes(b"{")
        raise OSError("connection lost")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", cut)
    with pytest.raises(TaskSetNotFound, match="connection lost"):
        load("ClawGym-Task")
    assert list((tmp_path / "cache/tasksets/ClawGym-Task").iterdir()) == []


def test_offline_error_names_all_locations_and_remedy(tmp_path, monkeypatch):
    class Api:
        def dataset_info(self, *args, **kwargs):
            raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(TaskSetNotFound) as error:
        load("ClawGym-Bench")
    places = ("$CLAWGYM_DATA is not set", str(tmp_path / "cache"), "RUC-AIBOX/ClawGym-Bench")
    for part in (*places, "no route", "go online"):
        assert part in str(error.value)
    assert str(error.value).startswith("ClawGym-Bench is not here")
    with pytest.raises(TaskSetNotFound, match=r"^ClawGym-Bench@abc is not here"):
        load("ClawGym-Bench@abc")
    monkeypatch.setenv("CLAWGYM_DATA", str(tmp_path))
    with pytest.raises(TaskSetNotFound, match="has no clawgym_train"):
        load("ClawGym-Train")


def test_hub_data_set_with_several_jsonl_files_raises(monkeypatch):
    fake_hub(monkeypatch, {"a.jsonl": b"", "b.jsonl": b""})
    with pytest.raises(TaskSetNotFound, match="not exactly one"):
        load("ClawGym-Bench")


def test_missing_huggingface_hub_names_the_extra(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependency, match=r"clawgym\[hub\]"):
        load("ClawGym-Task")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("clawgym-bnch", "ClawGym-Bench"), ("ClawGym-bench", "ClawGym-Bench"), ("terminal_basic", "terminal-basic")],
)
def test_did_you_mean(wrong, right):
    with pytest.raises(TaskSetNotFound, match=f"Did you mean '{right}'"):
        load(wrong)


def test_unknown_name_lists_known_sets():
    with pytest.raises(TaskSetNotFound) as error:
        load("qqq")
    assert all(name in str(error.value) for name in names())


def test_limit_and_ids(tmp_path):
    write([starter(name) for name in "abcd"], tmp_path / "set")
    where = str(tmp_path / "set")
    assert [task.id for task in load(where, limit=2).tasks] == ["a", "b"]
    assert [task.id for task in load(where, ids=["d", "b"]).tasks] == ["d", "b"]
    assert [task.id for task in load(where, ids=["d", "b"], limit=1).tasks] == ["d"]
    with pytest.raises(TaskSetNotFound, match="no task 'abc'"):
        load(where, ids=["abc"])


def test_unreadable_task_raises_its_problem(tmp_path):
    write([starter("a"), starter("b")], tmp_path / "set")
    (tmp_path / "set/b/reward/reward.sh").unlink()
    with pytest.raises(TaskError, match=r"reward\.sh"):
        load(str(tmp_path / "set"), ids=["b"])


@pytest.mark.parametrize("format", ["clawgym", "rows", "harbor"])
def test_path_is_detected(tmp_path, format):
    dest = tmp_path / ("set.jsonl" if format == "rows" else "set")
    expected = [starter("a"), starter("b")]
    assert write(expected, dest, format) == 2
    tasks = load(str(dest))
    assert tasks.content_hash == TaskSet("x", tuple(expected)).content_hash
    assert (tasks.name, tasks.problems) == ("set", {})
    if format != "rows":
        assert [task.id for task in load(str(dest / "b")).tasks] == ["b"]


def test_missing_path_raises(tmp_path):
    with pytest.raises(TaskError, match="does not exist"):
        load(str(tmp_path / "nope"))


def test_writing_is_atomic(tmp_path):
    def tasks():
        yield starter("a")
        raise RuntimeError("interrupted")

    for dest, format in ((tmp_path / "set", "clawgym"), (tmp_path / "set.jsonl", "rows")):
        with pytest.raises(RuntimeError):
            write(tasks(), dest, format)
    assert list(tmp_path.iterdir()) == [] or [p.name for p in tmp_path.iterdir()] == ["cache"]
    write([starter("a")], tmp_path / "set")
    with pytest.raises(TaskError, match="already exists"):
        write([starter("b")], tmp_path / "set")
    assert [task.id for task in load(str(tmp_path / "set")).tasks] == ["a"]


def test_packs_have_splits_and_versions(monkeypatch):
    calls: list[str] = []

    def pack_load(split="heldout", seeds=None):
        calls.append(split)
        return TaskSet(f"p:{split}", (starter("a"),), version="1")

    monkeypatch.setitem(registry.packs._here, "p-pack", lambda: types.SimpleNamespace(version="1", load=pack_load))
    for name in ("p-pack", "p-pack:train", "p-pack@1", "p-pack@1:train", "p-pack:heldout"):
        assert len(load(name)) == 1
    assert calls == ["heldout", "train", "heldout", "train", "heldout"]
    for name, message in (("p-pack@2", "version 1"), ("p-pack:dev", "no split 'dev'")):
        with pytest.raises(TaskSetNotFound, match=message):
            load(name)


def test_terminal_basic_is_a_pack():
    tasks = load("terminal-basic", limit=3)
    assert (tasks.version, len(tasks)) == (packs.pack("terminal-basic").version, 3)
    assert all(task.solution and task.unsupported is None for task in tasks.tasks)


def test_cache_is_per_set():
    assert _hub.cache_folder("A") != _hub.cache_folder("B")
    assert _hub.cached("A", None) is None


def test_unfinished_download_is_not_in_the_cache():
    (_hub.cache_folder("A") / ".scratch").mkdir(parents=True)
    (_hub.cache_folder("A") / ".scratch/x.jsonl").write_text("{")
    assert _hub.cached("A", None) is None
