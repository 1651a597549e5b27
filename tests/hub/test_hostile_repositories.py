"""Repositories of the Hub that attack whoever pulls them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("huggingface_hub")

from clawgym import snapshots
from clawgym.cli import app
from clawgym.errors import ClawGymError, DownloadError, TaskError
from clawgym.snapshots import Remote, check_paths
from clawgym.tasks import load
from clawgym.tasks.packed import pack_rows, unpack

from .runs import train_run
from .server import USER, Hub, Repo

NAME = f"{USER}/evil"


def pull(kind: str, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["pull", kind, NAME, "--out", str(out), *more])


def refused(kind: str, out: Path, *more: str) -> str:
    """The message of a pull that fails. Nothing may be at ``out``."""
    done = pull(kind, out, *more)
    assert isinstance(done.exception, ClawGymError), (done.output, done.exception)
    assert not os.path.lexists(out)
    return str(done.exception)


@pytest.fixture
def evil(hub: Hub, model_folder: Path, tmp_path: Path) -> Repo:
    """A model's repository, as it was pushed."""
    run = train_run(tmp_path / "evil", model_folder)
    assert CliRunner().invoke(app, ["push", "checkpoint", str(run)]).exit_code == 0
    return hub.repos[NAME]


@pytest.fixture
def evil_set(hub: Hub) -> Repo:
    made = hub.repos[f"datasets/{NAME}"] = Repo(False)
    made.put("data/test.jsonl", rows())
    return made


def rows(change: Callable[[dict[str, Any]], object] = lambda row: None) -> bytes:
    made = [json.loads(line) for line in pack_rows(load("terminal-basic", limit=2))]
    change(made[0])
    return b"".join(json.dumps(row).encode() + b"\n" for row in made)


# -- paths

BAD_PATHS = [
    *("../outside", "episodes/../../outside", "/etc/passwd", "a//b", "./a", "a/.", "a\\b", "C:/x", ".git/config"),
    *("a/.GIT/hooks/post-checkout", "x\ny", "x\x00y", "a:b", "trailing. ", "n" * 201, "/".join("abcdefghijklmnopqr")),
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(DownloadError, match="not allowed"):
        check_paths([path])


@pytest.mark.parametrize("paths", [["a", "A"], ["a", "a/b"], ["a/b", "A"], ["x/y", "X/z"]], ids=str)
def test_paths_that_are_one_file_on_some_systems_are_refused(paths: list[str]) -> None:
    for order in (paths, paths[::-1]):
        with pytest.raises(DownloadError, match=r"would be one file|lies below a file"):
            check_paths(order)


@given(st.lists(st.text(alphabet="ab/.\\ A", max_size=8), max_size=4))
def test_allowed_paths_stay_below_the_folder(paths: list[str]) -> None:
    try:
        check_paths(paths)
    except DownloadError:
        return
    for path in paths:
        whole = os.path.normpath(os.path.join("/top/folder", path))
        assert whole.startswith("/top/folder/")


def test_listed_path_out_of_the_folder_is_not_written(
    hub: Hub, evil: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a kind would let it through."""
    import re

    from clawgym.hub import _pull

    evil.put("../../outside.safetensors", b"x")
    monkeypatch.setitem(_pull.PULLABLE, "checkpoint", _pull._Kind("model", re.compile(".*"), lambda folder: []))
    assert "not allowed" in refused("checkpoint", tmp_path / "in" / "out")
    assert not list(tmp_path.rglob("outside*"))
    assert hub.downloads == []


def test_only_files_of_a_checkpoint_are_asked_for(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    for path in ("optimizer.pt", "pytorch_model.bin", "tokenizer.py", "x/config.json", "../config.json", "hub.json"):
        evil.put(path, b"\x80\x04")
    assert pull("checkpoint", tmp_path / "out").exit_code == 0
    asked = {path for path, _ in hub.downloads}
    assert not asked & {"README.md", "curve.svg"}
    assert all(path.endswith((".json", ".safetensors")) and "/" not in path for path in asked)
    assert "hub.json" not in asked


# -- bytes


def test_wrong_bytes_of_the_right_length_are_refused(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    for path in ("model.safetensors", "config.json"):
        data = evil.files[path]
        hub.swap = {path: data[:-1] + bytes([data[-1] ^ 1])}
        assert "does not have the hash" in refused("checkpoint", tmp_path / path)
    hub.swap = {}
    assert pull("checkpoint", tmp_path / "out").exit_code == 0


def test_file_that_is_longer_than_listed_is_cut_off(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    hub.swap = {"config.json": b"x" * 50_000_000}
    assert "is larger than the" in refused("checkpoint", tmp_path / "out")
    assert max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10_000_000


def test_limits_hold_before_the_first_byte(
    hub: Hub, evil: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil.put(
        "model-00001-of-00002.safetensors", b"x", size=10**13, lfs={"oid": "0" * 64, "size": 10**13, "pointerSize": 1}
    )
    assert "more than the limit of 20 GiB" in refused("checkpoint", tmp_path / "out")
    monkeypatch.setattr(snapshots, "MAX_FILES", 3)
    assert "more than 3 files" in refused("checkpoint", tmp_path / "out")
    monkeypatch.setattr(snapshots, "_MAX_ENTRIES", 2)
    assert "more than 2 entries" in refused("checkpoint", tmp_path / "out")
    assert hub.downloads == []


@pytest.mark.parametrize(
    "listed",
    [{"size": -1}, {"size": "7"}, {"lfs": {"oid": "../x", "size": 7, "pointerSize": 1}, "size": 7},
     {"lfs": {"oid": "0" * 64, "size": 8, "pointerSize": 1}, "size": 7}],
    ids=str,
)  # fmt: skip
def test_listing_with_strange_sizes_or_hashes_is_refused(
    hub: Hub, evil: Repo, tmp_path: Path, listed: dict[str, Any]
) -> None:
    evil.put("generation_config.json", b"{}  {}\n", **listed)
    refused("checkpoint", tmp_path / "out")
    assert hub.downloads == []


def test_pointer_in_place_of_a_file_is_refused(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"
    evil.put("config.json", pointer)
    assert "pointer of Git LFS" in refused("checkpoint", tmp_path / "out")


def test_link_in_the_repository_becomes_a_plain_file(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    evil.put("generation_config.json", b"/etc/passwd")  # what the Hub sends of a link
    assert pull("checkpoint", tmp_path / "out").exit_code == 0
    assert not (tmp_path / "out/generation_config.json").is_symlink()
    assert (tmp_path / "out/generation_config.json").read_bytes() == b"/etc/passwd"


def test_link_beside_the_folder_is_not_followed(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    assert "exists and is not this download" in str(pull("checkpoint", tmp_path / "out").exception)
    (tmp_path / "out").unlink()
    (tmp_path / f".out.{evil.commits[-1][:12]}.part").symlink_to(tmp_path / "elsewhere")
    refused("checkpoint", tmp_path / "out")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_interrupted_pull_resumes_in_the_middle_of_a_file(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    size = len(evil.files["model.safetensors"])
    hub.cut = {"model.safetensors": size // 2}
    assert "run the same command again" in refused("checkpoint", tmp_path / "out")
    first = [path for path, _ in hub.downloads]
    assert pull("checkpoint", tmp_path / "out").exit_code == 0
    again = hub.downloads[len(first) :]
    assert again[0][0] == "model.safetensors"
    assert 0 < again[0][1] <= size // 2
    assert not {path for path, _ in again} & set(first) - {"model.safetensors"}
    assert (tmp_path / "out/model.safetensors").read_bytes() == evil.files["model.safetensors"]
    assert not list(tmp_path.glob(".out.*"))


def test_forged_part_of_an_interrupted_pull_is_found(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    hub.cut = {"model.safetensors": 100}
    refused("checkpoint", tmp_path / "out")
    (part,) = tmp_path.glob(".out.*/.parts/*")
    part.write_bytes(b"y" * 100)
    assert "does not have the hash" in refused("checkpoint", tmp_path / "out")
    assert pull("checkpoint", tmp_path / "out").exit_code == 0


# -- what the files say


def test_index_that_names_a_file_elsewhere_is_refused(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    evil.put("model.safetensors.index.json", json.dumps({"weight_map": {"a": "../../secret.bin"}}).encode())
    assert "which is not there" in refused("checkpoint", tmp_path / "out")


def test_weights_that_are_no_safetensors_are_refused(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    evil.put("model.safetensors", b"\x80\x04pickle" * 10)
    assert "no whole safetensors file" in refused("checkpoint", tmp_path / "out")


def test_code_of_the_repository_is_reported(hub: Hub, evil: Repo, tmp_path: Path) -> None:
    config = json.loads(evil.files["config.json"]) | {"auto_map": {"AutoModel": "evil.Model"}}
    evil.put("config.json", json.dumps(config).encode())
    assert "code of the repository" in pull("checkpoint", tmp_path / "out").output


HOSTILE_ROWS: dict[str, Callable[[dict[str, Any]], object]] = {
    "not allowed": lambda row: row["files"].append(
        {"path": "../../evil", "text": "x", "base64": None, "executable": False}
    ),
    "absolute, not allowed": lambda row: row["files"].append(
        {"path": "/tmp/evil", "text": "x", "base64": None, "executable": True}
    ),
    "there twice": lambda row: row["files"].append(row["files"][0]),
    "lies below a file": lambda row: row["files"].append(
        {"path": row["files"][0]["path"] + "/x", "text": "x", "base64": None, "executable": False}
    ),
    "is not the task": lambda row: row.update(content_hash="0" * 64),
    "cannot be decoded": lambda row: row["files"].append(
        {"path": "reward/x", "text": None, "base64": "???", "executable": False}
    ),
    "is no packed task": lambda row: row["files"].append({"path": "reward/x", "text": "x", "base64": None}),
    "both, is no packed task": lambda row: row["files"][0].update(base64="eA==", text="x"),
    "more than 2000 files": lambda row: row["files"].extend(
        {"path": f"input_files/{n}", "text": "", "base64": None, "executable": False} for n in range(2001)
    ),
    "verifier, is not the task": lambda row: next(
        file for file in row["files"] if file["path"] == "reward/check.py"
    ).update(text="print('{\"x\": 1.0}')"),
}


@pytest.mark.parametrize("found", HOSTILE_ROWS)
def test_hostile_rows_of_a_task_set_are_refused(hub: Hub, evil_set: Repo, tmp_path: Path, found: str) -> None:
    evil_set.put("data/test.jsonl", rows(HOSTILE_ROWS[found]))
    assert found.rpartition(", ")[2] in refused("tasks", tmp_path / "out")
    with pytest.raises(ClawGymError):
        load(f"hf://{NAME}")
    assert not Path("/tmp/evil").exists()


@given(st.binary(max_size=200))
def test_any_bytes_as_rows_are_a_task_error(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.jsonl").write_bytes(data)
        try:
            unpack(Path(folder, "x.jsonl"), Path(folder, "out"))
        except TaskError:
            return
        assert not data.strip()


def test_task_that_names_code_of_this_machine_is_refused(hub: Hub, evil_set: Repo, tmp_path: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        row["files"] = [file for file in row["files"] if not file["path"].startswith("reward/")]
        entry = next(file for file in row["files"] if file["path"] == "data_entry.json")
        body = json.loads(entry["text"])
        body.setdefault("clawgym", {})["grader"] = "os:system"
        entry["text"] = json.dumps(body)

    evil_set.put("data/test.jsonl", rows(change))
    assert "os:system" in refused("tasks", tmp_path / "out")


def test_results_with_scripts_become_a_page_of_ours(hub: Hub, evaluated: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["push", "results", str(evaluated), "--repo", "evil"]).exit_code == 0
    repo = hub.repos[f"datasets/{NAME}"]
    repo.put("report.html", b"<script>alert(1)</script>")
    repo.put("summary.json", b'{"scores": {"strict": {"value": 1.0}}, "attempts": 6}')
    repo.put("verification.json", b'{"agrees": true}')
    repo.put("README.md", b"<script>alert(1)</script>")
    assert pull("results", tmp_path / "out").exit_code == 0
    assert "alert(1)" not in (tmp_path / "out/report.html").read_text()
    assert not (tmp_path / "out/README.md").exists()
    assert not (tmp_path / "out/verification.json").exists()
    assert json.loads((tmp_path / "out/summary.json").read_text())["scores"]["strict"]["value"] < 1


HOSTILE_RESULTS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "an edited line": lambda rows: rows[0].update(outcome="solved", seed=1),
    "no outcome": lambda rows: rows[0].pop("outcome"),
    "a list for a result": lambda rows: rows[0].update(result=[1]),
    "no sample": lambda rows: rows[0].pop("sample"),
    "a task id that leads upwards": lambda rows: rows[0].update(task_id="../../x", key="../../x#0"),
    "a number too large": lambda rows: rows[0].update(usage={"prompt_tokens": 10**400}),
}


@pytest.mark.parametrize("name", HOSTILE_RESULTS)
def test_damaged_results_are_refused(hub: Hub, evaluated: Path, tmp_path: Path, name: str) -> None:
    assert CliRunner().invoke(app, ["push", "results", str(evaluated), "--repo", "evil"]).exit_code == 0
    repo = hub.repos[f"datasets/{NAME}"]
    lines = [json.loads(line) for line in repo.files["results.jsonl"].splitlines()]
    HOSTILE_RESULTS[name](lines)
    repo.put("results.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    refused("results", tmp_path / "out")


def test_swapped_workspace_of_results_is_refused(hub: Hub, evaluated: Path, tmp_path: Path) -> None:
    words = ["push", "results", str(evaluated), "--repo", "evil", "--workspaces"]
    assert CliRunner().invoke(app, words).exit_code == 0
    repo = hub.repos[f"datasets/{NAME}"]
    path = next(path for path in repo.files if path.endswith("workspace.tar.gz"))
    repo.put(path, b"another")
    assert "is not the file of its result" in refused("results", tmp_path / "out")


@pytest.mark.parametrize("data", [b"PAR1", b"", b"PAR1" + b"\0" * 100 + b"PAR1"], ids=["head", "empty", "hollow"])
def test_damaged_traces_are_refused(hub: Hub, tmp_path: Path, data: bytes) -> None:
    repo = hub.repos[f"datasets/{NAME}"] = Repo(False)
    repo.put("data/train-00000-of-00001.parquet", data)
    assert "is damaged" in refused("traces", tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["", "evil", "a/b/c", "../x", "a/..", "https://x.org/a/b", "a/b@", "a/b@x y", "hf://models/a/b", "a/b@../c"]
)
def test_names_of_other_forms_are_refused(name: str) -> None:
    with pytest.raises(DownloadError, match="OWNER/NAME"):
        Remote.parse(name)


def test_token_is_not_sent_elsewhere(hub: Hub, evil_set: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub redirects large files to a store of another host."""
    seen: list[dict[str, str]] = []
    with Hub() as store:
        store.repos = hub.repos
        answer = store.answer

        def recorded(method: str, path: str, body: bytes, headers: dict[str, str], query: Any) -> tuple[int, Any]:
            seen.append(headers)
            return answer(method, path, body, headers | {"authorization": f"Bearer {hub.token}"}, query)

        store.answer = recorded  # type: ignore[method-assign]
        hub.store = store.url
        assert pull("tasks", tmp_path / "out").exit_code == 0
    assert seen
    assert all(name.lower() != "authorization" for headers in seen for name in headers)
