"""A Harbor task whose Dockerfile needs a build: unsupported until its image is here, then played in sandboxes."""

from __future__ import annotations

import platform
import re
import shlex
from pathlib import Path

import pytest

from clawgym.evaluation.validate import validate_solution
from clawgym.sandbox import backend
from clawgym.sandbox.images import ImageStore
from clawgym.sandbox.images.build import build_image
from clawgym.tasks.formats import harbor

from ..sandbox.images import make

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the image made here names one architecture")

FILES = {
    "task.toml": "schema_version = '1.0'\n[environment]\nmemory_mb = 512\n",
    "instruction.md": "Write the secret of /opt/secret to /app/out.txt.\n",
    "environment/Dockerfile": 'FROM base:1\nSHELL ["/bin/bash", "-c"]\nWORKDIR /app\n'
    "RUN mkdir /opt && echo $((6 * 7)) > /opt/secret\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat /app/out.txt)" = 42 ] && echo 1 > /logs/verifier/reward.txt || '
    "echo 0 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\ncat /opt/secret > /app/out.txt\n",
}


def written(folder: Path, **changed: str) -> Path:
    for name, text in {**FILES, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def test_variables_of_an_image_load_no_code_of_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = make.oci_archive(tmp_path / "base.tar", [make.root()], {"Env": ["BASH_ENV=/opt/env.sh"]})
    ImageStore().add(str(base), "own/image")
    (tmp_path / "cheat").mkdir()
    config = "schema_version = '1.0'\n[environment]\ndocker_image = 'own/image'\nworkdir = '/app'\n"
    cheat = "#!/bin/bash\nmkdir -p /opt; echo 'cat() { echo 42; }' > /opt/env.sh\n"
    folder = written(tmp_path / "cheat", **{"task.toml": config, "solution/solve.sh": cheat, "environment/given": "1"})
    (folder / "environment/Dockerfile").unlink()
    task = harbor.read_task(folder)
    assert task.unsupported is None
    assert [file.path for file in task.inputs] == ["given"], "Harbor copies the folder into the working folder"
    namespace = backend("namespace")
    try:
        (found,) = await validate_solution(task, namespace, runs=1)
    finally:
        await namespace.aclose()
    assert found.status == "fail", "the agent's function must not be in the verifier's shell"
    assert "workspace" not in found.detail


async def test_it_is_supported_once_its_image_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = written(tmp_path / "secret task", **{"environment/.dockerignore": "*.log\n"})
    store = ImageStore()
    store.add(str(make.oci_archive(tmp_path / "base.tar", [make.root()])), "base:1")
    task = harbor.read_task(folder)
    said = re.search(r"(clawgym images build .*)$", str(task.unsupported))
    assert said, task.unsupported
    _, _, _, where, _, name = shlex.split(said[1])
    assert Path(where) == folder / "environment"
    namespace = backend("namespace")
    try:
        await build_image(Path(where), name, store=store, backend=namespace)
        task = harbor.read_task(folder)
        assert (task.unsupported, task.image, task.workspace) == (None, name, "/app")
        found = await validate_solution(task, namespace)
        assert [(one.rule, one.status) for one in found] == [("oracle", "pass"), ("repeat", "pass")], found
    finally:
        await namespace.aclose()
    (folder / "environment/Dockerfile").write_text("FROM base:1\nRUN true # changed\nWORKDIR /app\n")
    assert "clawgym images build" in str(harbor.read_task(folder).unsupported), "another Dockerfile is another image"
