"""The default root: the distribution's part of the host's ``/usr``, read-only; everything else is made here.

It has nothing of the host's /etc, /home, /root, /var or /opt, nor what users put into ``/usr`` (``host_usr.py``). Only
what describes ``/usr`` is derived from the host: alternatives links and, on Debian and its derivatives, names and
versions of the installed packages, so that dpkg and apt can install on top. Prepared once per state folder and content,
then shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clawgym.sandbox.linux import host_usr

__all__ = ["ENV", "FILES", "FOLDERS", "LINKS", "Root", "prepare"]

ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm-256color",
    "TZ": "UTC",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}
"""The clean environment of every sandbox."""

# The synthetic part: folders; files and their texts; links and their targets.
FOLDERS = [
    "dev",
    "proc",
    "sys",
    "run/lock",
    "tmp",
    "home",
    "root",
    "opt",
    "srv",
    "mnt",
    "media",
    "usr",
    "etc/alternatives",
    "etc/apt/apt.conf.d",
    "etc/apt/preferences.d",
    "etc/apt/sources.list.d",
    "etc/apt/trusted.gpg.d",
    "etc/dpkg/dpkg.cfg.d",
    "etc/ld.so.conf.d",
    "etc/ssl/certs",
    "etc/profile.d",
    "etc/skel",
    "var/tmp",
    "var/log/apt",
    "var/spool",
    "var/mail",
    "var/cache/apt/archives/partial",
    "var/cache/ldconfig",
    "var/lib/apt/lists/partial",
    "var/lib/apt/mirrors/partial",
    "var/lib/dpkg/info",
    "var/lib/dpkg/updates",
    "var/lib/dpkg/triggers",
    "var/lib/dpkg/alternatives",
    "var/lib/dpkg/parts",
    "var/lib/misc",
    "var/lib/pam",
]

FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/usr/sbin:/usr/sbin/nologin\n"
    "_apt:x:42:65534::/nonexistent:/usr/sbin/nologin\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ndaemon:x:1:\nadm:x:4:\ntty:x:5:\nmail:x:8:\nshadow:x:42:\nutmp:x:43:\nstaff:x:50:\n"
    "users:x:100:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "etc/hostname": "box\n",
    "etc/resolv.conf": "",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/host.conf": "multi on\n",
    "etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
    "etc/ld.so.conf.d/libc.conf": "/usr/local/lib\n",
    "etc/profile": "PS1='$ '\n",
    "etc/bash.bashrc": "",
    "etc/shells": "/bin/sh\n/bin/bash\n",
    "etc/login.defs": "UID_MIN 1000\nGID_MIN 1000\n",
    "etc/timezone": "Etc/UTC\n",
    "etc/environment": "",
    "etc/fstab": "",
    "etc/mime.types": "",
    # apt must not change to a user that the sandbox does not have
    "etc/apt/apt.conf.d/00box": 'APT::Sandbox::User "root";\nAPT::Install-Recommends "false";\n',
    "etc/apt/sources.list": "",
    "var/lib/dpkg/available": "",
    "var/lib/dpkg/info/format": "1\n",
    "var/lib/dpkg/diversions": "",
    "var/lib/dpkg/statoverride": "",
    "var/lib/dpkg/triggers/File": "",
    "var/lib/dpkg/triggers/Unincorp": "",
    "var/lib/dpkg/triggers/Lock": "",
    "var/lib/dpkg/lock": "",
}

LINKS = {
    "etc/localtime": "/usr/share/zoneinfo/Etc/UTC",
    "etc/os-release": "../usr/lib/os-release",
    "etc/mtab": "/proc/self/mounts",
    "var/run": "/run",
    "var/lock": "/run/lock",
}

_HIDDEN = "hidden"
"""The file of a prepared root that lists the hidden folders."""


@dataclass(frozen=True, slots=True)
class Root:
    """The lower folders of a sandbox's root, bottom first."""

    base: tuple[Path, ...]
    """For ``/``."""
    usr: tuple[Path, ...]
    """For ``/usr``; empty if ``base`` contains it."""
    fingerprint: str
    """Hex digest of what the root was made from, except the requested packages."""
    hidden: tuple[str, ...] = ()
    """Hidden folders of the host's ``/usr``, relative to it."""
    shown: Path = Path()
    """The tree that replaces them, with the requested packages; the last of :attr:`usr`."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables that an image sets."""


def _packages() -> dict[str, str]:
    """A dpkg database of the contents of ``/usr``, without dependencies; nearly empty without dpkg."""
    if not shutil.which("dpkg-query") or not Path("/var/lib/dpkg/status").exists():
        return {"var/lib/dpkg/status": ""}
    fields = "Package: ${Package}\\nStatus: install ok installed\\nPriority: ${Priority}\\nSection: ${Section}\\n"
    fields += "Maintainer: host\\nArchitecture: ${Architecture}\\nMulti-Arch: ${Multi-Arch}\\nVersion: ${Version}\\n"
    fields += "Provides: ${Provides}\\nDescription: part of the sandbox's /usr\\n\\n"
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t" + fields], capture_output=True, text=True, check=True
    )
    blocks: list[str] = []
    lists: dict[str, str] = {}
    for block in done.stdout.split("\n\n"):
        state, _, rest = block.partition("\t")
        if state.strip().endswith("ii") or state.startswith("ii"):
            known = dict(x.split(": ", 1) for x in rest.splitlines() if not x.endswith(": "))
            blocks.append("\n".join(f"{key}: {value}" for key, value in known.items()))
            # dpkg names the list of a co-installable package after its architecture as well
            own = f":{known['Architecture']}" if known.get("Multi-Arch") == "same" else ""
            lists[f"var/lib/dpkg/info/{known['Package']}{own}.list"] = "/.\n"
    return {"var/lib/dpkg/status": "\n\n".join(blocks) + "\n", **lists}


def _alternatives() -> dict[str, str]:
    found: dict[str, str] = {}
    folder = Path("/etc/alternatives")
    for link in sorted(folder.iterdir()) if folder.is_dir() else []:
        if link.is_symlink() and os.readlink(link).startswith("/usr/"):
            found[f"etc/alternatives/{link.name}"] = os.readlink(link)
    return found


def _look_through(hidden: Sequence[str], owner: int) -> tuple[list[str], list[str]]:
    """Find folders of ``/usr``, relative to it.

    Returns those to hide, including all folders of Python packages, and those not owned by ``owner``, which an overlay
    cannot copy up for a sandbox.
    """
    away, foreign = list(hidden), []
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            with os.scandir(f"/usr/{folder}") as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}".lstrip("/")
                    if not entry.is_dir(follow_symlinks=False) or path in hidden:
                        continue
                    if entry.name in host_usr.PACKAGES:
                        away.append(path)
                        continue
                    info = entry.stat(follow_symlinks=False)
                    if info.st_uid != owner or (owner == 0 and info.st_gid != 0):
                        foreign.append(path)
                    stack.append(path)
        except OSError:
            continue
    return sorted(away), sorted(foreign)


def _build(target: Path, packages: dict[str, str], links: dict[str, str], hidden: Sequence[str]) -> None:
    base, skeleton = target / "base", target / "usr"
    for name in FOLDERS:
        (base / name).mkdir(parents=True, exist_ok=True)
    for name, text in {**FILES, **packages}.items():
        (base / name).write_text(text)
    for name, to in {**LINKS, **links}.items():
        (base / name).symlink_to(to)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if Path("/", name).is_symlink():
            (base / name).symlink_to(os.readlink(f"/{name}"))
    for name in ("tmp", "var/tmp", "run/lock"):
        (base / name).chmod(0o1777)
    (base / "root").chmod(0o700)
    skeleton.mkdir()
    away, foreign = _look_through(hidden, os.geteuid())
    for folder in foreign:
        (skeleton / folder).mkdir(parents=True, exist_ok=True)
    (target / _HIDDEN).write_text(json.dumps(away))
    for folder in away:
        (skeleton / folder).parent.mkdir(parents=True, exist_ok=True)
        _hide(skeleton / folder)


def _hide(path: Path) -> None:
    """Make ``path`` a whiteout, which hides the same path in the lower layers of an overlay. Raises OSError."""
    try:
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
    except OSError:  # an overlay (in a container) allows no whiteouts but attributes; an older tmpfs has no attributes
        path.mkdir()
        os.setxattr(path, "user.overlay.opaque", b"y")


def _once(target: Path, build: Callable[[Path], None]) -> None:
    """Have ``build`` fill the folder ``target``, unless it exists."""
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # another process may have finished first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@cache
def _code() -> str:
    """A digest of the code that makes roots: another version makes another root."""
    sources = (Path(__file__), Path(host_usr.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def prepare(state: Path, packages: Sequence[str] = ()) -> Root:
    """Build the default root below ``state`` if it does not exist, and describe it.

    ``packages`` are Debian packages shown in addition to those that always are; packages not installed here are
    ignored. Raises OSError if the host's root is not merged into /usr (``/bin`` is not a link).
    """
    if not Path("/bin").is_symlink():
        raise OSError("this host keeps programs outside /usr (/bin is not a link to usr/bin)")
    try:
        stamp = os.stat("/var/lib/dpkg/status").st_mtime_ns
    except OSError:
        stamp = os.stat("/usr/bin").st_mtime_ns
    links, hidden = _alternatives(), host_usr.hidden()
    made_from = json.dumps([_code(), links, hidden, stamp, os.stat("/usr").st_ino, os.geteuid()])
    fingerprint = hashlib.sha256(made_from.encode()).hexdigest()
    target = state / "roots" / fingerprint[:16]
    _once(target, lambda folder: _build(folder, _packages(), links, hidden))
    away: list[str] = json.loads((target / _HIDDEN).read_text())
    names = sorted({*host_usr.ALWAYS, *packages})
    shown = target.with_name(f"{target.name}-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}")
    _once(shown, lambda folder: host_usr.build(folder, away, names))
    return Root((target / "base",), (Path("/usr"), target / "usr", shown), fingerprint, tuple(away), shown)
