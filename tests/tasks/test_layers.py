"""Layers are the wheels that the lock pins, whole or not at all, from whatever index the user has."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym import package_index
from clawgym.errors import DownloadError, MissingDependency, TaskError
from clawgym.sandbox import Backend, SandboxSpec
from clawgym.tasks import layers
from clawgym.tasks.layers import Lock, Wheel

from .local_index import Index, serving, wheel

DIGITS = st.text("0123456789abcdef", min_size=64, max_size=64)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A loopback index that the library asks, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(tmp_path) as made:
        monkeypatch.setenv("PIP_INDEX_URL", made.address)
        yield made


def add(index: Index, name: str, files: dict[str, str | bytes], version: str = "1.0") -> Wheel:
    filename, data = wheel(name, version, files)
    return Wheel(name, version, filename, index.add(name, filename, data))


def test_layer_contains_files_of_wheels(index: Index):
    one = add(index, "one", {"one/__init__.py": "X = 1\n", "one-1.0.data/purelib/extra.py": "Y = 2\n"})
    two = add(index, "two", {"two.py": "import one\n", "two-1.0.data/scripts/two": "#!/bin/sh\n"})
    lock = Lock("test", (one, two))
    assert layers.cached(lock) is None
    seen = []
    made = layers.prepare(lock, progress=lambda what, done, total: seen.append(what))
    assert made == layers.cached(lock)
    assert made.digest == lock.digest
    names = sorted(p.relative_to(made.folder).as_posix() for p in made.folder.rglob("*.py"))
    assert names == ["extra.py", "one/__init__.py", "two.py"]
    assert {"fetching test", "unpacking test"} <= set(seen)
    for path in (made.folder, *made.folder.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o222 == 0, path
        assert mode & 0o444 == 0o444, path
    assert layers.lock_of_layer(made).digest == lock.digest
    before = len(index.asked)
    assert layers.prepare(lock) == made
    assert len(index.asked) == before


async def test_sandbox_imports_from_layer(index: Index, backend: Backend):
    made = layers.prepare(Lock("test", (add(index, "one", {"one/__init__.py": "X = 41\n"}),)))
    box = await backend.create(
        SandboxSpec(env={"PYTHONPATH": "/opt/layers/site"}, mounts={"/opt/layers/site": made.folder})
    )
    try:
        done = await box.exec(["python3", "-c", "import one; print(one.X + 1)"])
        assert done.text.strip() == "42"
        assert (await box.exec(["touch", "/opt/layers/site/new"])).exit_code != 0
    finally:
        await box.close()


@given(st.lists(st.tuples(st.from_regex(r"[a-z]{1,8}", fullmatch=True), DIGITS), min_size=1, max_size=6), st.randoms())
def test_digest_depends_on_files_only(rows, dice):
    wheels = [Wheel(name, "1", f"{name}-1-py3-none-any.whl", digest) for name, digest in rows]
    lock = Lock("a", tuple(wheels))
    dice.shuffle(wheels)
    again = layers.read_lock(json.dumps(Lock("b", tuple(wheels)).as_dict()))
    assert again.digest == lock.digest
    changed = dataclasses.replace(wheels[0], sha256=wheels[0].sha256[::-1])
    if changed != wheels[0]:
        assert Lock("a", (changed, *wheels[1:])).digest != lock.digest


def _lock(filename: str, sha256: str = "0" * 64) -> str:
    wheel = {"project": "x", "version": "1", "filename": filename, "sha256": sha256}
    return json.dumps({"name": "a", "wheels": [wheel]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "'name'"),
        ('{"name": 1, "wheels": [{}]}', "'name'"),
        ('{"wheels": [{}]}', "'name'"),
        ('{"name": "a"}', "'wheels'"),
        ('{"name": "a", "wheels": {}}', "'wheels'"),
        ('{"name": "a", "wheels": "x"}', "'wheels'"),
        ('{"name": "a", "wheels": []}', "no wheels"),
        ('{"name": "a", "wheels": [{"project": "x"}]}', r"wheels\[0\]"),
        (_lock("x-1.tar.gz"), "not a pure-Python wheel"),
        (_lock("x-1-cp311-cp311-linux_x86_64.whl"), "not a pure-Python wheel"),
        (_lock("../x-1-py3-none-any.whl"), "not a pure-Python wheel"),
        (_lock("x-1-py3-none-any.whl", "AB"), "64 hexadecimal"),
    ],
)
def test_invalid_locks_raise(text: str, said: str):
    with pytest.raises(TaskError, match=said):
        layers.read_lock(text)


def test_wrong_digest_raises(index: Index):
    one = add(index, "one", {"one.py": ""})
    index.files["one"][one.filename] += b"more"
    with pytest.raises(DownloadError, match="not the pinned file"):
        layers.prepare(Lock("test", (one,)))
    assert [p for p in layers.cache_folder("packages").iterdir() if not p.name.startswith(".")] == []


def test_missing_package_is_named(index: Index):
    one = add(index, "one", {"one.py": ""})
    with pytest.raises(DownloadError, match="no such package"):
        package_index.fetch("nowhere", "nowhere-1-py3-none-any.whl", "0" * 64)
    with pytest.raises(DownloadError, match=r"has no one-2\.0-py3-none-any\.whl"):
        package_index.fetch("one", "one-2.0-py3-none-any.whl", one.sha256)


def test_offline_error_has_remedy(index: Index, monkeypatch: pytest.MonkeyPatch):
    one = add(index, "one", {"one.py": ""})
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:1/simple/")
    with pytest.raises(DownloadError, match="go online, or set PIP_INDEX_URL") as caught:
        layers.prepare(Lock("test", (one,)))
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///somewhere/simple")
    with pytest.raises(DownloadError, match="not an http"):
        layers.prepare(Lock("test", (one,)))
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.address.rstrip("/"))
    assert layers.prepare(Lock("test", (one,))).name == "test"


def test_missing_extra_is_named(index: Index, monkeypatch: pytest.MonkeyPatch):
    one = add(index, "one", {"one.py": ""})
    monkeypatch.setitem(sys.modules, "pypi_simple", None)
    with pytest.raises(MissingDependency, match=r"pip install 'clawgym\[packages\]'"):
        layers.prepare(Lock("test", (one,)))


def _zip(entries: list[tuple[zipfile.ZipInfo | str, bytes]]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return out.getvalue()


def _link() -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo("link.py")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_zip([("../evil.py", b"")]), "not a plain relative path"),
        (_zip([("/evil.py", b"")]), "not a plain relative path"),
        (_zip([(_link(), b"/etc/passwd")]), "not a plain file"),
        (b"no archive", "is damaged"),
    ],
)
def test_hostile_wheels_leave_nothing(index: Index, tmp_path: Path, data: bytes, said: str):
    filename = "bad-1.0-py3-none-any.whl"
    bad = Wheel("bad", "1.0", filename, index.add("bad", filename, data))
    with pytest.raises(TaskError, match=said):
        layers.prepare(Lock("test", (bad,)))
    assert [p for p in layers.cache_folder("layers").iterdir() if p.is_dir()] == []
    assert not list(tmp_path.rglob("evil.py"))


def test_two_wheels_with_the_same_file_raise(index: Index):
    with pytest.raises(TaskError, match=r"same\.py is in one-1\.0-py3-none-any\.whl too"):
        layers.prepare(Lock("t", (add(index, "one", {"same.py": "1"}), add(index, "two", {"same.py": "2"}))))


_PREPARE = "import sys; from clawgym.tasks import layers; print(layers.prepare(layers.read_lock(sys.argv[1])).folder)"


def test_concurrent_builders_make_one_layer(index: Index):
    lock = Lock("test", (add(index, "one", {f"one/m{i}.py": f"X = {i}\n" for i in range(50)}),))
    command = [sys.executable, "-c", _PREPARE, json.dumps(lock.as_dict())]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {worker.communicate(timeout=60)[0].strip() for worker in workers}
    assert found == {str(layers.prepare(lock).folder)}
    assert len([path for path in index.asked if path.startswith("/files/")]) == 1


def test_interrupted_build_is_repeated(index: Index, monkeypatch: pytest.MonkeyPatch):
    lock = Lock("test", (add(index, "one", {"one.py": ""}),))
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_compile", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            layers.prepare(lock)
    assert layers.cached(lock) is None
    (layers.cache_folder("layers") / f".{lock.digest[:32]}.new").mkdir()  # of one that was killed
    assert layers.prepare(lock).folder.is_dir()


def test_index_configured_in_pip_is_used(tmp_path: Path):
    """``pip config`` is asked where no variable says it."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/simple\n")
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")}
    done = subprocess.run(
        [sys.executable, "-c", "from clawgym import package_index; print(package_index._address())"],
        env={**env, "XDG_CONFIG_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "http://127.0.0.1:9/simple\n"), done.stderr
