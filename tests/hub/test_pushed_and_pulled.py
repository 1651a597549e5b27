"""Results, task sets, traces and checkpoints go to the Hub and come back, with the real client."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("huggingface_hub")

from clawgym.cli import app
from clawgym.errors import SandboxUnavailable
from clawgym.evaluation.integrity import discrepancies
from clawgym.hub import HubError, plan_board, plan_results, plan_tasks, plan_traces
from clawgym.leaderboards.boards import LeaderboardError
from clawgym.pool import Pool
from clawgym.records import TaskSet
from clawgym.records.run_folder import RunFolder, checksum_of
from clawgym.tasks import load, read

from ..pool.histories import chain, store
from .runs import train_run
from .server import USER, Hub, Repo

PROGRAM = [sys.executable, "-c", "from clawgym.cli import main; main()"]
SECRET = "hf_" + "aB3" * 11


def clawgym(*words: str | Path) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def good(*words: str | Path) -> str:
    done = clawgym(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def process(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=170)


# -- results


def test_pushed_results_come_back_and_are_graded_again(hub: Hub, evaluated: Path, tmp_path: Path) -> None:
    assert "commit" in good("push", "results", evaluated, "--workspaces")
    repo = hub.repos[f"datasets/{USER}/sloppy-run"]
    assert repo.private
    assert "nothing has changed" in good("push", "results", evaluated, "--workspaces")
    assert {"README.md", "receipt.json", "results.jsonl", "summary.json", "report.html"} <= set(repo.files)
    assert sum(path.endswith("workspace.tar.gz") for path in repo.files) == 6
    out = good("pull", "results", f"{USER}/sloppy-run", "--out", tmp_path / "back")
    assert repo.commits[-1] in out
    back = RunFolder.read(tmp_path / "back")
    assert back.rows == RunFolder.read(evaluated).rows
    assert discrepancies(back) == {}
    assert not (tmp_path / "back" / "README.md").exists()
    assert "default-src 'none'" in (tmp_path / "back" / "report.html").read_text()  # made here
    done = process("runs", "verify", "back", cwd=tmp_path)
    assert done.stdout.strip() == "verified: 6 of 6 results reproduced", done.stderr
    assert "was here already" in good("pull", "results", f"{USER}/sloppy-run", "--out", tmp_path / "back")


def test_results_alone_have_no_transcripts(evaluated: Path) -> None:
    def paths(**options: bool) -> set[str]:
        return {upload.path.rpartition("/")[2] for upload in plan_results(evaluated, **options).uploads}

    alone = {"README.md", "receipt.json", "results.jsonl", "summary.json", "report.html"}
    assert paths() == alone
    assert paths(transcripts=True) == alone | {"transcript.json"}
    assert paths(workspaces=True) == alone | {"transcript.json", "workspace.tar.gz"}
    assert "cannot be graded again" in plan_results(evaluated).card


def test_dry_run_shows_what_would_go_without_network(evaluated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a dry run went to the network"))
    for words in (["results", str(evaluated)], ["traces", str(evaluated)], ["tasks", "terminal-basic"]):
        out = good("push", *words, "--dry-run")
        assert "README.md" in out
        assert "# " in out


def test_inconsistent_results_are_not_pushed(evaluated: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(evaluated, tmp_path / "run")
    text = (copy / "results.jsonl").read_text()
    (copy / "results.jsonl").write_text(text.replace('"outcome":"failed"', '"outcome":"solved"', 1))
    with pytest.raises(HubError, match="runs verify"):
        plan_results(copy)
    with pytest.raises(HubError, match="kind 'train'"):
        plan_results(train_run(tmp_path / "train", tmp_path_model(tmp_path)))


def tmp_path_model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize("where", ["results.jsonl", "transcript", "workspace"])
def test_secrets_in_results_are_not_uploaded(evaluated: Path, tmp_path: Path, where: str) -> None:
    copy = shutil.copytree(evaluated, tmp_path / "run")
    (copy / "summary.json").unlink()
    rows = [json.loads(line) for line in (copy / "results.jsonl").read_text().splitlines()]
    if where == "results.jsonl":
        rows[0]["final_message"] = SECRET
    else:
        folder = RunFolder.read(copy).episode_folder(rows[0]["task_id"], 0)
        if where == "transcript":
            path = folder / "transcript.json"
            path.write_text(path.read_text().replace('"agent": {', f'"notes": "{SECRET}",\n "agent": {{', 1))
        else:
            path = folder / "workspace.tar.gz"
            path.write_bytes(packed({"notes/.env": f"TOKEN={SECRET}\n".encode()}))
        rows[0]["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    rows[0]["seal"] = checksum_of(rows[0])
    (copy / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(HubError, match="nothing was uploaded") as caught:
        plan_results(copy, workspaces=True)
    assert SECRET not in str(caught.value)


def packed(files: dict[str, bytes]) -> bytes:
    import gzip
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue())


def test_card_of_results_shows_hostile_names_as_text(evaluated: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(evaluated, tmp_path / "run")
    manifest = json.loads((copy / "receipt.json").read_text())
    manifest["agent"]["name"] = "<script>alert(1)</script> | [x](javascript:1)\n# title"
    (copy / "receipt.json").write_text(json.dumps(manifest))
    card = plan_results(copy).card
    assert "<script" not in card
    assert "[x](javascript" not in card
    assert "\n# title" not in card


# -- task sets


@pytest.mark.parametrize("name", ["terminal-basic", "toolcall-basic", "gui-basic"])
def test_pushed_task_sets_keep_their_content_hash(hub: Hub, tmp_path: Path, name: str) -> None:
    assert "commit" in good("push", "tasks", name, "--repo", name)
    there = f"{USER}/{name}"
    listing = yaml.safe_load(hub.repos[f"datasets/{there}"].files["eval.yaml"])
    assert listing["evaluation_framework"] == "clawgym"
    assert listing["tasks"] == [{"id": f"{name}-heldout", "config": "default", "split": "test"}]
    assert "nothing has changed" in good("push", "tasks", name, "--repo", name)
    mine = load(name)
    theirs = load(f"hf://{there}")
    assert theirs.content_hash == mine.content_hash
    assert [task.solution != () for task in theirs.tasks] == [task.solution != () for task in mine.tasks]
    assert theirs.version == hub.repos[f"datasets/{there}"].commits[-1]
    good("pull", "tasks", there, "--out", tmp_path / "set")
    assert read(tmp_path / "set" / "tasks").content_hash == mine.content_hash
    asked = len(hub.downloads)
    hub.repos.clear()
    assert load(f"hf://{there}@{theirs.version}").content_hash == mine.content_hash  # from the cache
    assert len(hub.downloads) == asked


def test_set_on_the_hub_is_evaluated_and_verified(hub: Hub, tmp_path: Path) -> None:
    good("push", "tasks", "terminal-basic", "--repo", "terminal-basic")
    words = ["eval", f"hf://datasets/{USER}/terminal-basic", "--agent", "oracle", "--limit", "3", "--out", "run"]
    done = process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {row["outcome"] for row in RunFolder.read(tmp_path / "run").rows} == {"solved"}
    done = process("runs", "verify", "run", cwd=tmp_path)
    assert done.stdout.strip() == "verified: 3 of 3 results reproduced", done.stderr


def test_card_of_a_set_has_audit_and_attack_rate(tmp_path: Path) -> None:
    tasks = load("terminal-basic", limit=2)
    audit, attack = tmp_path / "audit", tmp_path / "attack"
    about = {"task_set": {"hash": tasks.content_hash}, "complete": True}
    rate = {"exploit": "answer-in-place", "task_class": "reads files", "harness": "ours", "tasks": 2, "earned": 1}
    for folder, name, more in (
        (audit, "audit.json", {"tasks": [{}, {}], "kept": 1, "floor": 0.25, "flaws": {"clock": 1, "web": 0}}),
        (attack, "attack.json", {"rates": [rate | {"rate": 0.5, "allowed": False}, rate | {"harness": "stock"}]}),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(about | more))
    with plan_tasks(tasks, audit=audit, attack=attack) as plan:
        assert plan.notes == ()
        assert "Mean no-model baseline: 0.250" in plan.card
        assert "| clock | 1 | the verifier reads the current date or time |" in plan.card
        assert "| answer-in-place | reads files | 1 of 2 | 50.0 % | no |" in plan.card
    with plan_tasks(tasks) as plan:
        assert "was not audited" in plan.card
        assert len(plan.notes) == 2
    with pytest.raises(HubError, match="about other tasks"), plan_tasks(load("terminal-basic"), audit=audit):
        pass


def test_secrets_in_tasks_are_not_uploaded() -> None:
    import dataclasses

    tasks = load("terminal-basic", limit=1)
    leaking = TaskSet("mine", (dataclasses.replace(tasks.tasks[0], instruction=f"use {SECRET}"),))
    with pytest.raises(HubError, match="nothing was uploaded") as caught, plan_tasks(leaking):
        pass
    assert SECRET not in str(caught.value)
    with (
        pytest.raises(HubError, match="could not be read"),
        plan_tasks(dataclasses.replace(tasks, problems={"x": "broken"})),
    ):
        pass


# -- traces


def test_traces_of_a_run_are_read_by_datasets(hub: Hub, evaluated: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    good("push", "traces", evaluated)
    files = hub.repos[f"datasets/{USER}/sloppy-run"].files
    assert set(files) == {"README.md", "data/train-00000-of-00001.parquet"}
    good("pull", "traces", f"{USER}/sloppy-run", "--out", tmp_path / "traces")
    found = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "traces/data/*.parquet"), cache_dir=str(tmp_path / "c"), split="train"
    )
    assert len(found) == 6
    assert {row["outcome"] for row in found} == {"solved", "failed"}
    documents = [json.loads(line) for line in (tmp_path / "traces/transcripts.jsonl").read_text().splitlines()]
    assert [document["trajectory_id"] for document in documents] == [f"{row['task_id']}#0" for row in found]
    assert json.loads(found[0]["transcript"]) == documents[0]


def test_traces_of_a_pool_come_back_into_a_pool(hub: Hub, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    with Pool(tmp_path / "pool.db") as pool:
        one = store(pool, chain(3, 4))
        store(pool, chain(4, 2), outcome=None)
    good("push", "traces", tmp_path / "pool.db", "--repo", "turns")
    good("pull", "traces", f"{USER}/turns", "--out", tmp_path / "traces")
    found = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "traces/data/*.parquet"), cache_dir=str(tmp_path / "c"), split="train"
    )
    assert len(found) == 4
    good("pool", "import", tmp_path / "new.db", tmp_path / "traces/data/train-00000-of-00001.parquet")
    with Pool(tmp_path / "new.db") as pool, Pool(tmp_path / "pool.db") as old:
        assert pool.turns(one) == old.turns(one)


def test_secrets_in_traces_are_not_uploaded(tmp_path: Path) -> None:
    with Pool(tmp_path / "pool.db") as pool:
        store(pool, chain(3, 2, reply={"role": "assistant", "content": SECRET}))
    with pytest.raises(HubError, match="nothing was uploaded") as caught, plan_traces(tmp_path / "pool.db"):
        pass
    assert SECRET not in str(caught.value)
    with pytest.raises(HubError, match="neither a pool nor a run"), plan_traces(tmp_path / "nothing.db"):
        pass


# -- checkpoints


def test_pulled_checkpoint_is_loaded(hub: Hub, model_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = train_run(tmp_path / "my-run", model_folder)
    good("push", "checkpoint", run)
    repo = hub.repos[f"{USER}/my-run"]
    repo.put("pytorch_model.bin", b"\x80\x04")
    repo.put("modeling.py", b"import os")
    good("pull", "checkpoint", f"{USER}/my-run", "--out", tmp_path / "model")
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "model")


def test_revision_is_pulled(hub: Hub, model_folder: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "my-run", model_folder)
    good("push", "checkpoint", run)
    repo = hub.repos[f"{USER}/my-run"]
    first = repo.commits[-1]
    repo.put("generation_config.json", b'{"changed": true}')
    good("pull", "checkpoint", f"{USER}/my-run@{first}", "--out", tmp_path / "a")
    good("pull", "checkpoint", f"{USER}/my-run", "--revision", first, "--out", tmp_path / "b")
    good("pull", "checkpoint", f"{USER}/my-run", "--out", tmp_path / "c")
    read_config = [(tmp_path / name / "generation_config.json").read_bytes() for name in "abc"]
    assert read_config[0] == read_config[1] != read_config[2]
    done = clawgym("pull", "checkpoint", f"{USER}/my-run", "--out", tmp_path / "a")
    assert "is not this download" in str(done.exception)
    done = clawgym("pull", "checkpoint", f"{USER}/my-run@{'1' * 40}", "--out", tmp_path / "d")
    assert "with this revision" in str(done.exception)


# -- boards


BOARD = Path(__file__).parents[2] / "examples" / "leaderboard"


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return shutil.copytree(BOARD, tmp_path / "my-board")


def test_pushed_board_is_shown_checked_and_built(hub: Hub, board: Path, tmp_path: Path) -> None:
    (board / ".git").mkdir()
    (board / ".git" / "config").write_text("mine")
    (board / "notes.jsonl").write_text("mine")
    assert "commit" in good("push", "board", board)
    repo = hub.repos[f"datasets/{USER}/my-board"]
    assert repo.private
    assert "nothing has changed" in good("push", "board", board)
    assert {"board.json", "tasks.jsonl", "README.md", "checks/oracle.json"} <= set(repo.files)
    assert not {name for name in repo.files if name.startswith((".", "notes"))}
    card = repo.files["README.md"].decode()
    assert re.search(r"\| 1 \| oracle \| oracle \| - \| 100\.0 .*\| checked \|", card)
    assert "tiny-trained" in good("leaderboard", "show", f"hf://{USER}/my-board")
    good("leaderboard", "build", f"hf://{USER}/my-board", "--out", tmp_path / "site")
    assert (tmp_path / "site" / "entries" / "oracle.html").is_file()
    for more in ("--record", "--since=main"):
        done = clawgym("leaderboard", "check", f"hf://{USER}/my-board", more)
        assert "need the folder of a board" in str(done.exception)


def test_pushed_board_is_checked(hub: Hub, board: Path) -> None:
    for name in ("noop", "sloppy", "tiny-rewarded", "tiny-trained", "tiny-untrained"):
        shutil.rmtree(board / "entries" / name)
    good("push", "board", board)
    done = clawgym("leaderboard", "check", f"hf://{USER}/my-board")
    if isinstance(done.exception, SandboxUnavailable):
        pytest.skip(str(done.exception))
    assert "oracle: accepted" in done.output, done.exception


def test_changed_board_is_pushed_again(hub: Hub, board: Path) -> None:
    good("push", "board", board)
    repo = hub.repos[f"datasets/{USER}/my-board"]
    repo.put("theirs.md", b"kept")
    shutil.rmtree(board / "entries" / "noop")
    (board / "checks" / "noop.json").unlink()
    record = board / "checks" / "sloppy.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"accepted": False}))
    sent = len(hub.uploads)
    assert "commit" in good("push", "board", board)
    assert len(hub.uploads) == sent  # large files are there already
    assert not {name for name in repo.files if "noop" in name}
    assert repo.files["theirs.md"] == b"kept"
    card = repo.files["README.md"].decode()
    assert "Refused by their check, and not ranked: sloppy." in card
    assert "| sloppy |" not in card


def test_board_is_shown_by_a_dry_run_without_network(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a dry run went to the network"))
    out = good("push", "board", board, "--dry-run")
    assert "entries/oracle/results.jsonl" in out
    assert "## Ranking" in out


@pytest.mark.parametrize("where", ["board.json", "results.jsonl", "transcript", "workspace", "tasks.jsonl"])
def test_secrets_in_a_board_are_not_uploaded(board: Path, where: str) -> None:
    entry = board / "entries" / "oracle"
    if where == "workspace":
        next(entry.rglob("workspace.tar.gz")).write_bytes(packed({".env": f"TOKEN={SECRET}\n".encode()}))
    else:
        path = {
            "board.json": board / "board.json",
            "results.jsonl": entry / "results.jsonl",
            "transcript": next(entry.rglob("transcript.json")),
            "tasks.jsonl": board / "tasks.jsonl",
        }[where]
        key = {"board.json": '"about": "', "results.jsonl": '"final_message":"', "tasks.jsonl": '"prompt": "'}
        text, mark = path.read_text(), key.get(where, '"message": "')
        assert mark in text
        path.write_text(text.replace(mark, f"{mark}{SECRET} ", 1))
    with pytest.raises(HubError, match="nothing was uploaded") as caught:
        plan_board(board)
    assert SECRET not in str(caught.value)


def test_damaged_boards_are_not_pushed(board: Path, tmp_path: Path) -> None:
    entry = board / "entries" / "oracle"
    (tmp_path / "outside").write_text("mine")
    (entry / "results.jsonl").rename(tmp_path / "results.jsonl")
    (entry / "results.jsonl").symlink_to(tmp_path / "results.jsonl")
    with pytest.raises(LeaderboardError, match="is a link"):
        plan_board(board)
    (entry / "results.jsonl").unlink()
    (entry / "results.jsonl").write_text("damaged\n")
    with pytest.raises(HubError, match="repair the entry or remove it"):
        plan_board(board)
    shutil.rmtree(entry)
    (board / "tasks.jsonl").unlink()
    (board / "tasks.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(LeaderboardError, match="put the file itself there"):
        plan_board(board)
    (board / "tasks").mkdir()
    rules = json.loads((board / "board.json").read_text())
    (board / "board.json").write_text(json.dumps(rules | {"task_set": "tasks"}))
    with pytest.raises(HubError, match="are one file"):
        plan_board(board)


def test_card_of_a_board_shows_hostile_names_as_text(board: Path) -> None:
    hostile = "<script>alert(1)</script> | [x](javascript:1)\n# title /home/me/models/mine"
    rules = json.loads((board / "board.json").read_text())
    (board / "board.json").write_text(json.dumps(rules | {"about": hostile, "name": hostile[:90]}))
    path = board / "entries" / "oracle" / "receipt.json"
    manifest = json.loads(path.read_text())
    manifest["agent"]["name"] = hostile
    path.write_text(json.dumps(manifest))
    plan = plan_board(board)
    for bad in ("<script", "[x](javascript", "\n# title", "/home/me"):
        assert bad not in plan.card
    assert plan.notes == (f"not checked: oracle: run `clawgym leaderboard check {board} --record`",)


def test_board_on_the_hub_is_shown_and_built(hub: Hub, tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "examples" / "leaderboard"
    repo = hub.repos["datasets/team/board"] = Repo(False)
    for path in sorted(published.rglob("*")):
        if path.is_file():
            repo.files[path.relative_to(published).as_posix()] = path.read_bytes()
    repo.put("payload.py", b"import os")
    assert "tiny-trained" in good("leaderboard", "show", "hf://team/board")
    good("leaderboard", "build", "hf://datasets/team/board", "--out", tmp_path / "site")
    assert (tmp_path / "site" / "entries" / "oracle.html").is_file()
    assert not {path for path, _ in hub.downloads} & {"payload.py", "README.md", ".github/workflows/check.yml"}
