"""What a sandbox sees of the machine: the distribution's programs, but no installed packages and little of
``/proc``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.sandbox import Backend, Sandbox, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = os.geteuid() == 0
_REPOSITORY = Path(__file__).resolve().parents[2]
_UID = 54322

# -- /proc

_HELD = r"""
exec 2>/dev/null
for name in $(ls /proc | grep -v '^[0-9]'); do
  if [ -d /proc/$name ]; then [ -n "$(ls -A /proc/$name)" ]; else [ -n "$(head -c 1 /proc/$name | tr '\0' x)" ]; fi \
    && echo $name
done; true
"""


async def test_proc_shows_only_the_allow_list(shared: Sandbox) -> None:
    if not shared.isolation.features["proc"]:
        pytest.skip("no /proc here")
    held = (await shared.exec(["sh", "-c", _HELD])).text.split()
    needed = {"cpuinfo", "filesystems", "loadavg", "meminfo", "mounts", "net", "self", "stat", "sys", "uptime"}
    assert needed <= set(held)
    assert set(held) <= needed | {"swaps", "thread-self", "version", "vmstat"}
    settings = (await shared.exec(["sh", "-c", "cd /proc/sys; ls -d */*"])).text.split()
    assert {path.partition("/")[0] for path in settings} == {"fs", "kernel", "net", "user", "vm"}
    assert (await shared.exec(["sh", "-c", "ls -A /sys 2>/dev/null"])).text == ""


@pytest.mark.parametrize("program", ["ps aux", "top -bn1", "free", "vmstat", "nproc", "uptime", "df /tmp", "mount"])
async def test_programs_that_read_proc_work(shared: Sandbox, program: str) -> None:
    if not shared.isolation.features["proc"]:
        pytest.skip("no /proc here")
    if not shutil.which(program.split()[0], path="/usr/bin"):
        pytest.skip("not installed on this machine")
    done = await shared.exec(program.split())
    assert done.exit_code == 0, done.text
    assert done.text.strip()


# -- packages


def _installed(package: str) -> bool:
    asked = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", package]
    if not shutil.which("dpkg-query"):
        return False
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.startswith("ii")


_YAML = ["python3", "-B", "-c", "import yaml; print(yaml.safe_load('[1]'))"]


@pytest.mark.skipif(not _installed("python3-yaml"), reason="python3-yaml is not installed on this machine")
async def test_packages_are_asked_for_by_name(backend: Backend, shared: Sandbox) -> None:
    assert "No module named 'yaml'" in (await shared.exec(_YAML)).text
    sandbox = await backend.create(SandboxSpec("default:python3-yaml"))
    assert (await sandbox.exec(_YAML)).text == "[1]\n"
    assert (await sandbox.exec(["python3", "-c", "import apt_pkg"])).exit_code, "nobody asked for that one"
    snapshot = await sandbox.snapshot()
    fork = await backend.fork(snapshot, SandboxSpec("default:python3-yaml", pristine_tools=True))
    assert (await fork.exec([*fork.tool("python3"), *_YAML[1:]])).text == "[1]\n"
    await fork.close()
    await backend.drop(snapshot)
    await sandbox.close()


async def test_a_package_that_is_not_installed_is_not_shown(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec("default:python3-no-such-package"))
    assert (await sandbox.exec(["true"])).exit_code == 0
    await sandbox.close()


@pytest.mark.skipif(not _installed("python3-pip"), reason="python3-pip is not installed on this machine")
async def test_pip_is_always_shown(shared: Sandbox) -> None:
    done = await shared.exec(["python3", "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"])
    names = {line.partition("==")[0] for line in done.text.splitlines()}
    assert "pip" in names
    assert names <= {"pip", "setuptools", "wheel"}


# -- what was installed on the machine


def _wheel(folder: Path) -> Path:
    """A wheel with the name of ClawGym's distribution, and a file that Python runs at every start."""
    path = folder / "clawgym-0.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("clawgym/tasks/packs/secret/checker.py", "ANSWER = 42\n")
        out.writestr("clawgym_private.pth", "import sys; sys.found_by_pth = True\n")
        info = "clawgym-0.0.0.dist-info/"
        out.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: clawgym\nVersion: 0.0.0\n")
        out.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(info + "entry_points.txt", "[console_scripts]\nclawgym = clawgym.cli:app\n")
        out.writestr(info + "RECORD", "")
    return path


_PLANTED = (
    "local/bin/clawgym-admin",
    "local/etc/clawgym-token",
    "local/lib/node_modules/clawgym/index.js",
    "local/share/clawgym/answers.json",
    "src/clawgym/tasks.py",
    "clawgym/tasks.py",
    "lib/node_modules/clawgym/index.js",
    "lib/python3/dist-packages/clawgym_plugin/solution.py",
    "lib/python3/dist-packages/clawgym_plugin.pth",
    "lib/python3.99/site-packages/clawgym/solution.py",
    "share/somewhere/venv/lib/python3/site-packages/clawgym/solution.py",
)
"""Below a throw-away ``/usr``, beside what pip puts there."""

# In a mount namespace of its own: nobody else sees the throw-away /usr.
_SET_UP = """
set -e
mount --make-rprivate /
mount --bind "$1" /usr
mkdir -p /var/cache/clawgym && mount -t tmpfs tmpfs /var/cache/clawgym
/usr/bin/python3 -I -m pip install -q --break-system-packages --no-index --no-deps --root-user-action=ignore "$2"
find /usr -name '*clawgym*' | sort
echo ---
shift 2
exec "$@"
"""

_LOOK = """
import asyncio
from clawgym.sandbox import SandboxSpec, backend

async def main():
    sandboxes = backend("namespace")
    sandbox = await sandboxes.create(SandboxSpec(pristine_tools=True))
    look = "find / /usr /.pristine/usr -xdev \\\\( -name '*clawgym*' -o -name '*.pth' \\\\) -print 2>/dev/null; "
    look += "ls -A /usr/src /usr/local/bin /usr/local/lib /usr/local/etc | grep -v : ; "
    look += "python3 -c 'import sys; print(hasattr(sys, \\"found_by_pth\\"))'; "
    look += "python3 -c 'import clawgym' 2>&1 | tail -1; python3 -m pip --version | cut -c1-4"
    print((await sandbox.exec(["sh", "-c", look])).text)
    await sandbox.close()
    await sandboxes.aclose()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def throw_away_usr() -> Iterator[Path]:
    """A copy of ``/usr`` made of hard links, into which more was put. Files that were there are nobody's to change."""
    device = os.stat("/usr").st_dev
    places = [place for place in (tempfile.gettempdir(), "/var/tmp") if os.stat(place).st_dev == device]
    if not ROOT or not places or not shutil.which("unshare"):
        pytest.skip("needs root, unshare, and room for hard links beside /usr")
    folder = Path(tempfile.mkdtemp(prefix="clawgym-usr-", dir=places[0]))
    folder.chmod(0o755)
    try:
        subprocess.run(["cp", "-al", "/usr", folder / "usr"], check=True)
        for name in _PLANTED:
            (folder / "usr" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "usr" / name).write_text("print('secret')\n")
        yield folder / "usr"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not _installed("python3-pip"), reason="python3-pip is not installed on this machine")
@pytest.mark.parametrize("uid", [0, _UID])
async def test_packages_installed_on_the_machine_are_hidden(uid: int, throw_away_usr: Path, tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="clawgym-home-"))
    os.chown(home, uid, uid)
    look = [sys.executable, "-c", _LOOK]
    if uid:
        look = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "/usr/bin/python3", "-c", _LOOK]
    packages = [p for p in sys.path if p.endswith("-packages")]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(_REPOSITORY), *packages])
    argv = ["unshare", "--mount", "bash", "-c", _SET_UP, "bash", str(throw_away_usr), str(_wheel(tmp_path)), *look]
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-2000:]
    there, _, seen = done.stdout.partition("---\n")
    assert len(there.splitlines()) >= len(_PLANTED) + 3, "the machine has it all, and pip's own"
    assert "clawgym_private.pth" in there
    lines = list(filter(None, seen.split("\n")))
    assert lines == ["False", "ModuleNotFoundError: No module named 'clawgym'", "pip "], seen
