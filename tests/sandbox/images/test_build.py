"""Images are built from Dockerfiles, in sandboxes."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from clawgym.errors import SandboxError
from clawgym.sandbox import Backend, SandboxSpec, backend
from clawgym.sandbox.images import ImageStore
from clawgym.sandbox.images.build import build_image
from clawgym.sandbox.images.dockerfile import ignored, statements, words

from . import make

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the images made here name one architecture")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.oci_archive(tmp_path_factory.mktemp("base") / "base.tar", [make.root()], {"Env": ["FROM_BASE=yes"]})


@pytest.fixture
def store(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = ImageStore()
    made.add(str(base), "base:1")
    return made


@pytest_asyncio.fixture
async def namespace() -> AsyncIterator[Backend]:
    made = backend("namespace")
    yield made
    await made.aclose()


def context(tmp_path: Path, dockerfile: str, **files: str) -> Path:
    folder = tmp_path / "context"
    folder.mkdir(exist_ok=True)
    for name, text in {"Dockerfile": dockerfile, **files}.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


async def run(of: Backend, image: str, command: str) -> str:
    sandbox = await of.create(SandboxSpec(image=image))
    try:
        return (await sandbox.exec(["bash", "-c", command])).text.strip()
    finally:
        await sandbox.close()


DOCKERFILE = """# syntax=docker/dockerfile:1
ARG TAG=1
FROM base:${TAG} AS made
SHELL ["/bin/bash", "-c"]
ARG WHO=world
ENV HELLO="hello $WHO" OTHER='$WHO'
WORKDIR /made
RUN echo "$HELLO" > greeting && \\
    # a comment in between
    mkdir -p deep/er && touch deep/er/file; rm /usr/bin/readlink
RUN <<EOF
echo one > lines
echo two >> lines
EOF

FROM base:1
COPY --from=made /made /copied/
COPY --from=0 /made/greeting /one/name
COPY src/ /src/
COPY src/a.txt b* flat/
COPY --chmod=755 <<"EOT" /usr/bin/say
#!/bin/bash
echo said $HELLO
EOT
ENV PATH=/usr/bin:/extra
WORKDIR sub/folder
ENTRYPOINT ["/usr/bin/say"]
CMD ["x"]
LABEL a=b
"""


async def test_a_dockerfile_is_built(tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    folder = context(
        tmp_path, DOCKERFILE, src__a="x", **{"src__a.txt": "A", "src__in__b.txt": "B", "b1": "1", "b2": "2"}
    )
    image = await build_image(folder, "built", store=store, backend=namespace, args={"WHO": "you"})
    assert (image.workdir, image.entrypoint, image.command) == ("/sub/folder", ("/usr/bin/say",), ("x",))
    assert dict(image.env) == {"FROM_BASE": "yes", "PATH": "/usr/bin:/extra"}
    found = await run(
        namespace,
        "built",
        "cat /copied/greeting /one/name /copied/lines /src/a.txt /src/in/b.txt /flat/a.txt /flat/b1 /flat/b2; echo;"
        "ls /copied/deep/er /sub; say; readlink /bin; echo $PATH $FROM_BASE",
    )
    assert found.split("\n") == [
        *["hello you", "hello you", "one", "two", "ABA12", "/copied/deep/er:", "file", "", "/sub:", "folder"],
        *["said", "usr/bin", "/usr/bin:/extra yes"],
    ]


async def test_steps_are_done_once(tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    text = 'FROM base:1\nSHELL ["/bin/bash", "-c"]\nCOPY a /a\nRUN echo $RANDOM$RANDOM$RANDOM > /drawn\n'
    folder = context(tmp_path, text, a="1")
    first = await build_image(folder, "one", store=store, backend=namespace)
    again = await build_image(folder, "two", store=store, backend=namespace)
    assert first.digest == again.digest
    (folder / "a").write_text("2")
    other = await build_image(folder, "three", store=store, backend=namespace)
    assert other.layers[:1] == first.layers[:1]
    assert other.layers[-1] != first.layers[-1]
    store.remove("one")
    assert await run(namespace, "two", "cat /drawn")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("RUN true", "line 1: RUN comes before FROM"),
        ("", "has no FROM"),
        ("FROM debian:12", "debian:12: is not on this machine.*clawgym images add docker://debian:12"),
        ("FROM base:1\nUSER app", "line 2: USER app: sandboxes have one user"),
        ("FROM base:1\nONBUILD RUN true", "ONBUILD is not supported"),
        ("FROM base:1\nCOPY ../secret /", "outside the folder"),
        ("FROM base:1\nCOPY link /", "leads out of the folder"),
        ("FROM base:1\nCOPY missing /", "missing: is not there"),
        ("FROM base:1\nCOPY D* /one", "names several files"),
        ("FROM base:1\nADD http://127.0.0.1/x /", "addresses are not fetched"),
        ("FROM base:1\nRUN --mount=type=secret,id=x true", "only caches and tmpfs"),
        ('FROM base:1\nSHELL ["/bin/bash", "-c"]\nRUN echo why; exit 3', "line 3: RUN ended with 3: why"),
        ("FROM base:1\nRUN <<EOF\necho", "here-document EOF has no end"),
        ("FROM base:1\nENV A='x", "quote without an end"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_cannot_be_built_is_named(
    text: str, match: str, tmp_path: Path, store: ImageStore, namespace: Backend
) -> None:
    folder = context(tmp_path, text)
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "D2").write_text("")
    with pytest.raises(SandboxError, match=f"(?s){match}"):
        await build_image(folder, "no", store=store, backend=namespace)
    assert store.find("no") is None


async def test_ignored_files_are_not_copied(tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    rules = {".dockerignore": "# not these\n**/*.log\n/secret\nsrc/*/\n!src/kept\n"}
    files = {"a.log": "", "secret__key": "", "src__a.log": "", "src__a": "", "src__in__b": "", "src__kept__c": "c"}
    folder = context(tmp_path, "FROM base:1\nCOPY . /all\nCOPY src/ /src/\n", **rules, **files)
    await build_image(folder, "part", store=store, backend=namespace)
    assert (await run(namespace, "part", "shopt -s globstar; cd /all; echo **; cat /src/kept/c")).split() == [
        *["Dockerfile", "src", "src/kept", "src/kept/c", "c"]
    ]
    for name, text in (("COPY secret/key /", None), ("COPY src /", "a" + "*b" * 50)):
        (folder / "Dockerfile").write_text(f"FROM base:1\n{name}\n")
        if text is not None:
            (folder / ".dockerignore").write_text(text)
        with pytest.raises(SandboxError, match=r"is not there|dockerignore: line 1"):
            await build_image(folder, "no", store=store, backend=namespace)


@pytest.mark.parametrize(
    ("rules", "out", "stays"),
    [  # the examples of Docker's reference
        ("*/temp*", ["somedir/temporary.txt", "somedir/temp/x"], ["temp", "a/b/temp"]),
        ("*/*/temp*", ["somedir/subdir/temporary.txt"], ["somedir/temporary.txt"]),
        ("temp?", ["tempa", "tempb/x"], ["temp", "tempab"]),
        ("**/*.go", ["a.go", "b/c/a.go"], ["a.gox"]),
        ("/foo/bar", ["foo/bar", "foo/bar/x"], ["bar", "a/foo/bar"]),
        ("*.md\n!README*.md\nREADME-secret.md", ["x.md", "README-secret.md"], ["README.md", "README-1.md"]),
        ("*.md\nREADME-secret.md\n!README*.md", ["x.md"], ["README-secret.md"]),
        ("[^a-c]x", ["dx"], ["ax", "cx"]),
        ("# *\n \n.", [], ["a", "# a"]),
        ("a/**", ["a/b", "a/b/c"], ["b/a"]),
    ],
)
def test_ignored(rules: str, out: list[str], stays: list[str]) -> None:
    leaves_out = ignored(rules)
    assert [path for path in out + stays if leaves_out(path)] == out


FETCH = """import sys, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=20).read().decode())
    except Exception as error:
        print(getattr(error, "code", type(error).__name__))
"""


async def test_run_reaches_allowed_hosts_only(tmp_path: Path, store: ImageStore, namespace: Backend) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\nfetched")
        await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    sandbox = await namespace.create(SandboxSpec())
    from clawgym.sandbox.egress import AllowList, way_out

    urls = [
        f"http://127.0.0.1:{ports[0]}/x",
        f"http://127.0.0.1:{ports[1]}/x",
        "http://127.0.0.2/",
        "https://localhost/",
    ]
    async with way_out(sandbox, AllowList([f"127.0.0.1:{ports[0]}"])) as proxy:
        env = {**proxy, "no_proxy": "", "NO_PROXY": ""}
        found = await sandbox.exec(["python3", "-c", FETCH, *urls], env=env)
    await sandbox.close()
    assert found.text.split() == ["fetched", "403", "403", "URLError"]
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("hosts", "host", "port", "allowed"),
    [
        (["example.org"], "EXAMPLE.org.", 443, True),
        (["example.org"], "example.org", 8080, False),
        (["example.org"], "a.example.org", 443, False),
        (["*.example.org"], "a.b.example.org", 80, True),
        (["*.example.org"], "badexample.org", 80, False),
        (["*.example.org"], "example.org", 80, False),
        (["example.org:8080"], "example.org", 8080, True),
        ([], "example.org", 80, False),
    ],
)
def test_allow_list(hosts: list[str], host: str, port: int, allowed: bool) -> None:
    from clawgym.sandbox.egress import AllowList

    assert AllowList(hosts).allows(host, port) is allowed


@pytest.mark.parametrize("host", ["http://a", "a/b", "", "a b", "*", "a:b"])
def test_no_host(host: str) -> None:
    from clawgym.sandbox.egress import AllowList

    with pytest.raises(SandboxError, match="no host"):
        AllowList([host])


def test_statements() -> None:
    text = "# c\n\nRUN a \\\n  # in between\n\n  b\nCOPY <<A <<-'B' /x/\n$1\nA\n\tin\n\tB\nrun c"
    found = [(s.line, s.keyword, s.rest, [(d.text, d.expands) for d in s.heredocs]) for s in statements(text)]
    assert found == [
        (3, "RUN", "a b", []),
        (7, "COPY", "<<A <<-'B' /x/", [("$1\n", True), ("in\n", False)]),
        (12, "RUN", "c", []),
    ]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a  b", ["a", "b"]),
        (r"a\ b \$X", ["a b", "$X"]),
        ("'$X' \"$X\" $X", ["$X", "1", "1"]),
        ("${X}y ${Y:-d} ${X:+set} ${Y:+set}z", ["1y", "d", "set", "z"]),
        ("''", [""]),
        ("", []),
    ],
)
def test_words(text: str, want: list[str]) -> None:
    assert words(text, {"X": "1"}) == want
