from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clawgym.cli import app
from clawgym.errors import PoolError, TraceError
from clawgym.pool import Pool
from clawgym.records import Image

from ..pool.histories import chain, store


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def where(tmp_path: Path) -> Path:
    with Pool(tmp_path / "pool.db") as pool:
        for seed in range(3):
            store(pool, chain(seed, 4), task_id=f"t{seed}")
        pool.fetch("trainer", 0)
    return tmp_path / "pool.db"


def test_stats_count_episodes_and_groups(where: Path) -> None:
    text = run("pool", "stats", where).output
    assert "3 solved" in text
    assert "1 leased" in text
    assert "1.00 per episode" in text
    found = json.loads(run("pool", "stats", where, "--json").output)
    assert found["channels"]["train"]["turns"] == 12


def test_export_and_import_episodes(where: Path, tmp_path: Path) -> None:
    assert "3 episodes" in run("pool", "export", where, tmp_path / "e.parquet").output
    second = tmp_path / "second.db"
    assert "3 episodes with 12 turns" in run("pool", "import", second, tmp_path / "e.parquet").output
    assert "3 episodes were already in the pool" in run("pool", "import", second, tmp_path / "e.parquet").output
    assert (
        "1 episodes"
        in run("pool", "export", where, tmp_path / "m.jsonl", "--format", "messages", "--task", "t1").output
    )
    assert run("pool", "check", second).exit_code == 0


@pytest.fixture
def online(tmp_path: Path) -> Path:
    """A pool with two sessions that a gateway left open; one turn is greedy."""
    with Pool(tmp_path / "online.db") as pool:
        for id, flaw in (("one", "greedy"), ("two", None)):
            turns = chain(3, 2, flaw=flaw) if flaw else chain(3, 2)
            pool.open_episode(id=id, channel="online")
            pool.append([(id, index, turn) for index, turn in enumerate(turns)])
        definitions = b"[]"
        pool.put_images([Image(hashlib.sha256(definitions).hexdigest(), definitions, "application/json")])
    return tmp_path / "online.db"


def test_stats_count_flaws_and_separate_tools_from_images(online: Path) -> None:
    text = run("pool", "stats", online).output
    assert "turns     4, 2 of them flawed (2 greedy)" in text
    assert "0 images, 1 tool definitions" in text
    found = json.loads(run("pool", "stats", online, "--json").output)
    assert (found["images"], found["tools"]) == (0, 1)
    assert found["channels"]["online"]["flaws"] == {"greedy": 2}


def test_export_counts_open_sessions_and_close_closes_them(online: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.parquet"
    done = run("pool", "export", online, out)
    assert "0 episodes" in done.output
    assert "2 open sessions were left out" in done.stderr
    assert f"clawgym pool close {online} --all" in done.stderr.replace("\n", " ")
    assert "2 episodes" in run("pool", "export", online, out, "--open").output
    assert run("pool", "close", online).exit_code == 2
    assert run("pool", "close", online, "one", "--reward", "1").exit_code == 2
    assert "1 sessions closed" in run("pool", "close", online, "one", "--outcome", "solved", "--reward", "1").output
    assert "1 sessions closed" in run("pool", "close", online, "--all").output
    with Pool(online) as pool:
        one, two = pool.episode("one"), pool.episode("two")
    assert (one.outcome, one.reward, one.trainable) == ("solved", 1.0, None)
    assert (two.outcome, two.cause, two.trainable) == ("failed", "closed without an outcome", False)
    done = run("pool", "export", online, out)
    assert "2 episodes" in done.output
    assert not done.stderr
    assert isinstance(run("pool", "close", online, "three").exception, PoolError)


def test_close_refuses_a_closed_session_and_changes_nothing(online: Path) -> None:
    assert run("pool", "close", online, "one", "--outcome", "solved").exit_code == 0
    assert "one: already closed" in str(run("pool", "close", online, "two", "one").exception)
    with Pool(online) as pool:
        assert (pool.episode("one").trainable, pool.episode("two").state) == (None, "open")


def test_missing_pool_is_refused_and_not_created(tmp_path: Path) -> None:
    for words in (("stats", tmp_path / "gone.db"), ("export", tmp_path / "gone.db", tmp_path / "e")):
        result = run("pool", *words)
        assert isinstance(result.exception, PoolError)
        assert "no such pool" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_pool_check_does_not_count_an_episode_without_turns(where: Path) -> None:
    with Pool(where) as pool:
        pool.open_episode(id="idle")
    result = run("pool", "check", where)
    assert (result.exit_code, "1 empty, 3 exact" in result.output) == (0, True)


def test_pool_check_fails_without_any_turn(tmp_path: Path) -> None:
    with Pool(tmp_path / "idle.db") as pool:
        pool.open_episode(id="idle")
    assert run("pool", "check", tmp_path / "idle.db").exit_code == 1


def test_pool_check_exits_with_0_only_if_all_is_exact(where: Path, tmp_path: Path) -> None:
    result = run("pool", "check", where)
    assert result.exit_code == 0
    assert "3 exact" in result.output
    with Pool(where) as pool:
        store(pool, chain(9, 1, flaw="stripped"), id="marked")
    result = run("pool", "check", where)
    assert result.exit_code == 1
    assert "1 unproved, 3 exact" in result.output
    assert "stripped" in result.output
    found = json.loads(run("pool", "check", where, "--json").output)
    assert [e["status"] for e in found["episodes"]] == ["exact"] * 3 + ["unproved"]
    assert found["exact"] is False
    (tmp_path / "empty.jsonl").write_text("")
    assert run("pool", "check", tmp_path / "empty.jsonl").exit_code == 1


def test_pool_check_reports_unreadable_tokenizer(where: Path, tmp_path: Path) -> None:
    assert isinstance(run("pool", "check", tmp_path / "gone").exception, TraceError)
    result = run("pool", "check", where, "--tokenizer", tmp_path)
    assert "no tokenizer.json" in str(result.exception)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in str(run("pool", "check", where, "--tokenizer", tmp_path).exception)


def test_pool_check_compares_texts_with_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "yes": 1, "no": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.save(str(tmp_path / "tokenizer.json"))
    row = {"prompt_ids": [3], "response_ids": [1], "logprobs": [-0.5], "response_text": "yes"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    assert run("pool", "check", tmp_path / "t.jsonl", "--tokenizer", tmp_path).exit_code == 0
    for change in ({"response_text": "no"}, {"response_ids": [4]}):
        (tmp_path / "t.jsonl").write_text(json.dumps(row | change))
        result = run("pool", "check", tmp_path / "t.jsonl", "--tokenizer", tmp_path)
        assert result.exit_code == 1
        assert "broken" in result.output
