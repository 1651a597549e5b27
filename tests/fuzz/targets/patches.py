"""Unified diffs of rows and of agents."""

from __future__ import annotations

from clawgym.tasks.swe.patching import BadPatch, apply

from ..source import Source

READS = ("tasks.swe.patching",)

_LINES = (
    *(b"diff --git a/x b/x", b"--- a/x", b"+++ b/x", b"@@ -1,2 +1,2 @@", b"@@ -1 +1 @@", b" a", b"-b", b"+c", b"+++ /dev/null"),
    *(b"--- /dev/null", b"rename from x", b"rename to y", b"new file mode 100755", b"new file mode", b"old mode 100644"),
    *(b"new mode x", b"deleted file mode 100644", b'--- "a/\\303\\251"', b'+++ "b/x', b"\\ No newline at end of file", b""),
    *(b"GIT binary patch", b"copy from x", b"diff --git ", b'diff --git "a/x" "b/x"', b'diff --git "', b"@@ -9999999999999 +1 @@"),
    *(b"rename to ../x", b"+++ b//etc/passwd", b'+++ "\\777"', b"-a"),
)  # fmt: skip


def fuzz(data: bytes) -> None:
    source = Source(data)
    patch = b""
    while source.left > 1 and source.byte() < 250:
        patch += source.pick(_LINES) + (b"\n" if source.byte() < 250 else b"")
    patch += source.rest()
    try:
        made = apply(patch, {"x": b"a\nb\n", "y": b""}.get)
    except BadPatch:
        return
    for path in made:
        assert path
        assert not path.startswith("/")
        assert ".." not in path.split("/")
