"""The root is writable, on a private layer, so packages can be installed."""

from __future__ import annotations

import io
import os
import shutil
import zipfile

import pytest

from clawgym.records import TaskFile
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

from .conftest import Traits

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def traits() -> Traits:
    """Only here: the base of a container is read-only."""
    return Traits("namespace", private_usr=os.geteuid() == 0)


DEB = r"""
set -e
mkdir -p p/DEBIAN p/usr/local/bin p/usr/share/hello-sandbox
printf 'Package: hello-sandbox\nVersion: 1.0\nArchitecture: all\nMaintainer: x <x@x>\n' > p/DEBIAN/control
printf 'Depends: libc6, bash\nDescription: x\n' >> p/DEBIAN/control
printf '#!/bin/sh\necho hello from a package\n' > p/usr/local/bin/hello-sandbox
printf '#!/bin/sh\nset -e\nldconfig\n' > p/DEBIAN/postinst
chmod 755 p/usr/local/bin/hello-sandbox p/DEBIAN/postinst
dpkg-deb --build p hello.deb
"""


def wheel() -> TaskFile:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        out.writestr("hello_sandbox.py", "TEXT = 'hello from a wheel'\n")
        info = "hello_sandbox-1.0.dist-info/"
        out.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: hello-sandbox\nVersion: 1.0\n")
        out.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(info + "RECORD", "")
    return TaskFile("hello_sandbox-1.0-py3-none-any.whl", buffer.getvalue())


@pytest.mark.skipif(not shutil.which("apt-get"), reason="no apt on this host, so none in its sandboxes")
async def test_apt_installs_a_local_file_and_removes_it(sandbox: Sandbox, backend: Backend) -> None:
    assert (await sandbox.exec(["bash", "-c", DEB], cwd="/tmp")).exit_code == 0
    done = await sandbox.exec(["apt-get", "install", "-y", "/tmp/hello.deb"], timeout=60)
    assert done.exit_code == 0, done.text
    assert "assuming package has no files" not in done.text
    assert (await sandbox.exec(["hello-sandbox"])).text == "hello from a package\n"
    done = await sandbox.exec(["apt-get", "remove", "-y", "hello-sandbox"], timeout=60)
    assert done.exit_code == 0, done.text
    assert (await sandbox.exec(["hello-sandbox"])).exit_code == 127
    other = await backend.create(SandboxSpec())
    assert (await other.exec(["hello-sandbox"])).exit_code == 127
    await other.close()


async def test_pip_installs_a_local_file(sandbox: Sandbox, backend: Backend) -> None:
    if (await sandbox.exec(["python3", "-m", "pip", "--version"])).exit_code:
        pytest.skip("this host's python3 has no pip, so sandboxes have none")
    await sandbox.put([wheel()], "/tmp/w")
    done = await sandbox.exec(
        ["python3", "-m", "pip", "install", "/tmp/w/hello_sandbox-1.0-py3-none-any.whl"], timeout=60
    )
    assert done.exit_code == 0, done.text
    show = ["python3", "-c", "import hello_sandbox; print(hello_sandbox.TEXT)"]
    assert (await sandbox.exec(show)).text == "hello from a wheel\n"
    snapshot = await sandbox.snapshot()
    fork = await backend.fork(snapshot)
    assert (await fork.exec(show)).text == "hello from a wheel\n"
    await fork.close()
    await backend.drop(snapshot)


async def test_files_of_the_image_can_be_changed_in_one_sandbox_only(
    traits: Traits, sandbox: Sandbox, backend: Backend
) -> None:
    if not traits.private_usr:
        pytest.skip("an ordinary user's sandboxes add files to /usr and cannot edit those of root")
    script = "echo '# mine' >> /usr/lib/python3*/this.py; rm /usr/bin/sort; mkdir /usr/share/new; echo x > /etc/hosts"
    assert (await sandbox.exec(["bash", "-c", script])).exit_code == 0
    assert (await sandbox.exec(["bash", "-c", "command -v sort"])).exit_code == 1
    other = await backend.create(SandboxSpec())
    seen = await other.exec(["bash", "-c", "command -v sort; ls -d /usr/share/new; tail -1 /usr/lib/python3*/this.py"])
    await other.close()
    assert seen.text.startswith("/usr/bin/sort\n")
    assert "No such file" in seen.text
    assert "# mine" not in seen.text
