from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from clawgym.errors import PoolError, TraceError
from clawgym.pool import Pool, sequences_of
from clawgym.pool.check import check
from clawgym.pool.exchange import Exported, export, import_
from clawgym.pool.traces import read_traces
from clawgym.records import Image, Turn
from clawgym.records.atif import steps_from_atif

from .histories import chain, histories, store

DATA = b"picture"
IMAGE = Image(hashlib.sha256(DATA).hexdigest(), DATA)
TOOLS = json.dumps([{"type": "function", "function": {"name": "bash"}}], sort_keys=True).encode()
DEFINED = Image(hashlib.sha256(TOOLS).hexdigest(), TOOLS, "application/json")

CHAT = [
    Turn((1, 2, 3), (4, 5), (-0.5, -0.25), policy_version=3, tools=DEFINED.sha256,
         messages=({"role": "system", "content": "be kind"}, {"role": "user", "content": "list them"}),
         reply={"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
             {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]}),
    Turn((6,), (7, 8), (-0.1, -0.2), policy_version=3, parent=0, tools=DEFINED.sha256, images=(IMAGE.sha256,),
         messages=({"role": "tool", "tool_call_id": "c1", "content": "a b"},),
         reply={"role": "assistant", "content": "a and b"}),
]  # fmt: skip


def filled(pool: Pool) -> list[str]:
    """A bit of everything."""
    pool.put_images([IMAGE, DEFINED])
    chat = store(pool, CHAT, task_id="t1", meta={"k": ["v", None]}, agent="me", seed=7)
    group = pool.open_group(task_id="t2", size=2)
    pair = [store(pool, chain(n, 3) + chain(9, 1, parent=1), group=group, task_id="t2", sample=n) for n in range(2)]
    pool.set_turn_rewards(pair[0], {0: 1, 2: -1}, about={2: {"votes": [-1, None], "texts": ["né", ""]}})
    pool.curate(pair[1], trainable=False, tags=["x"], note="no")
    text = store(
        pool, [replace(t, flaw="text-only", sampled_ids=(), logprobs=()) for t in chain(5, 2)], outcome="failed"
    )
    empty = store(pool, [], outcome="infra", channel="eval")
    store(pool, chain(6, 1), outcome=None)
    return [chat, *pair, text, empty]


def same(first: Pool, second: Pool, ids: list[str]) -> None:
    """Everything but times, secrets and what became of them."""
    assert [e.id for e in second.episodes()] == ids
    for id in ids:
        assert first.turns(id) == second.turns(id)
        assert first.turn_rewards(id) == second.turn_rewards(id)
        assert first.about_turn_rewards(id) == second.about_turn_rewards(id)
        past = {"opened_at": 0.0, "closed_at": 0.0, "fate": None, "secret_sha256": ""}
        assert replace(first.episode(id), **past) == replace(second.episode(id), **past)


def test_parquet_comes_back_as_it_was(pool: Pool, tmp_path: Path) -> None:
    ids = filled(pool)
    assert export(pool, tmp_path / "out" / "e.parquet").episodes == 5
    with Pool(tmp_path / "second.db") as second:
        done = import_(second, tmp_path / "out" / "e.parquet")
        assert (done.episodes, done.turns, done.flawed, done.known) == (5, 12, 2, 0)
        same(pool, second, ids)
        assert second.image(IMAGE.sha256) == IMAGE
        assert import_(second, tmp_path / "out" / "e.parquet").known == 5
        same(pool, second, ids)
        batch = second.fetch("trainer", 0, groups=2, min_episodes=1)
        assert [len(g.episodes) for g in batch.groups] == [1, 1]  # type: ignore[union-attr]


def test_older_file_without_reward_provenance_is_read(file_pool: Pool, tmp_path: Path) -> None:
    id = filled(file_pool)[1]
    export(file_pool, tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet")
    pq.write_table(table.drop_columns(["about_turn_rewards"]), tmp_path / "old.parquet")
    with Pool(tmp_path / "second.db") as second:
        import_(second, tmp_path / "old.parquet")
        assert second.turn_rewards(id) == file_pool.turn_rewards(id) == {"judge": {0: 1.0, 2: -1.0}}
        assert second.about_turn_rewards(id) == {}


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=histories())
def test_any_history_survives_parquet(tmp_path: Path, turns: list[Turn]) -> None:
    for name in ("a.db", "b.db"):
        (tmp_path / name).unlink(missing_ok=True)
    with Pool(tmp_path / "a.db") as first, Pool(tmp_path / "b.db") as second:
        id = store(first, turns)
        export(first, tmp_path / "e.parquet")
        import_(second, tmp_path / "e.parquet")
        assert second.turns(id) == tuple(turns)
        ours = check(*next(read_traces(tmp_path / "e.parquet")))
        assert (ours.status in ("exact", "empty")) == all(turn.flaw is None for turn in turns)
        assert (ours.status == "empty") == (not turns)


def test_rows_of_training_are_ready_to_use(file_pool: Pool, tmp_path: Path) -> None:
    ids = filled(file_pool)
    export(file_pool, tmp_path / "e.parquet")
    table = pq.read_table(tmp_path / "e.parquet")
    rows = [row for row in table.to_pylist() if row["row_ids"] is not None]
    expected = [(id, sample) for id in ids for sample in sequences_of(file_pool.turns(id))]
    assert [row["episode"] for row in rows] == [id for id, _ in expected]
    for row, (_, sample) in zip(rows, expected, strict=True):
        assert tuple(row["row_ids"]) == sample.ids
        assert tuple(row["row_mask"]) == sample.mask
        assert tuple(row["row_logprobs"]) == sample.logprobs
        assert tuple(row["row_versions"]) == sample.policy_versions
        assert tuple(row["row_turns"]) == sample.turns


def test_a_changed_row_is_refused_by_import_and_seen_by_the_check(file_pool: Pool, tmp_path: Path) -> None:
    store(file_pool, chain(1, 3))
    export(file_pool, tmp_path / "e.parquet")
    table = pq.read_table(tmp_path / "e.parquet")
    for column, change in (
        ("logprobs", lambda v: [*v[:-1], v[-1] - 0.5]),
        ("sampled_ids", lambda v: [v[0] + 1, *v[1:]]),
        ("sampled_ids", lambda v: v[:-1]),
        ("context_ids", lambda v: v[1:]),
        ("parent", lambda v: None),
        ("role", lambda v: "subagent"),
    ):
        rows = table.to_pylist()
        rows[1][column] = change(rows[1][column])
        pq.write_table(type(table).from_pylist(rows, table.schema), tmp_path / "x.parquet")
        assert check(*next(read_traces(tmp_path / "x.parquet"))).status == "broken", column
        with Pool(tmp_path / "second.db") as second:
            with pytest.raises(PoolError, match=r"turn 1: (changed|cannot be a turn)"):
                import_(second, tmp_path / "x.parquet")
            assert list(second.episodes()) == []


def test_atif_carries_the_ids_and_comes_back(file_pool: Pool, tmp_path: Path) -> None:
    chat = filled(file_pool)[0]
    export(file_pool, tmp_path / "e.jsonl", format="atif", task_ids=["t1"])
    (document,) = (json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines())
    steps = steps_from_atif(document)
    assert [step.source for step in steps] == ["system", "user", "agent", "agent"]
    assert steps[2].tool_calls[0].arguments == {"command": "ls"}
    assert steps[2].observations[0].content == "a b"
    assert check(*next(read_traces(tmp_path / "e.jsonl"))).status == "exact"
    with Pool(tmp_path / "second.db") as second:
        import_(second, tmp_path / "e.jsonl")
        assert second.episode(chat).outcome == "solved"
        for ours, theirs in zip(CHAT, second.turns(chat), strict=True):
            for name in ("context_ids", "sampled_ids", "logprobs", "parent", "role", "policy_version", "flaw"):
                assert getattr(ours, name) == getattr(theirs, name), name
        assert second.turns(chat)[0].reply["tool_calls"][0]["function"]["name"] == "bash"


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=histories())
def test_any_history_keeps_its_exact_tokens_through_atif(tmp_path: Path, turns: list[Turn]) -> None:
    for name in ("a.db", "b.db"):
        (tmp_path / name).unlink(missing_ok=True)
    with Pool(tmp_path / "a.db") as first, Pool(tmp_path / "b.db") as second:
        id = store(first, turns)
        export(first, tmp_path / "e.jsonl", format="atif")
        import_(second, tmp_path / "e.jsonl")
        for ours, theirs in zip(turns, second.turns(id), strict=True):
            assert theirs.flaw is not None or (ours.sampled_ids, ours.logprobs) == (theirs.sampled_ids, theirs.logprobs)
            assert ours.flaw is None or theirs.flaw is not None


def test_inexact_foreign_turns_get_a_flaw_and_are_never_fetched(file_pool: Pool, tmp_path: Path) -> None:
    metrics = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5]}
    steps = [{"step_id": 1, "source": "agent", "message": "a", "metrics": metrics},
             {"step_id": 2, "source": "agent", "message": "b"}]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"schema_version": "ATIF-v1.4", "session_id": "s", "steps": steps}))
    done = import_(file_pool, tmp_path / "a.json")
    assert (done.turns, done.flawed) == (2, 2)
    assert [turn.flaw for turn in file_pool.turns("s")] == ["logprobs", "no-ids"]
    assert (file_pool.episode("s").outcome, file_pool.episode("s").trainable) == ("failed", False)
    assert file_pool.fetch("trainer", 0) is None


def test_messages_are_chats_of_the_main_agent(file_pool: Pool, tmp_path: Path) -> None:
    filled(file_pool)
    export(file_pool, tmp_path / "m.jsonl", format="messages", channel="train")
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    chat = rows[0]
    assert [m["role"] for m in chat["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat["messages"][2]["tool_calls"][0]["id"] == "c1"
    assert chat["tools"] == json.loads(TOOLS)
    assert (chat["outcome"], chat["reward"], chat["task_id"]) == ("solved", 1.0, "t1")
    assert len([row for row in rows if row["task_id"] == "t2"]) == 4  # two branches each
    with Pool(tmp_path / "second.db") as second:
        done = import_(second, tmp_path / "m.jsonl")
        assert done.episodes == len(rows)
        assert done.flawed == done.turns
        assert second.fetch("trainer", 0, min_episodes=1) is None


def test_filters_choose(file_pool: Pool, tmp_path: Path) -> None:
    filled(file_pool)
    assert export(file_pool, tmp_path / "e", channel="eval").episodes == 1
    assert export(file_pool, tmp_path / "e", outcome="failed").episodes == 1
    assert export(file_pool, tmp_path / "e", task_ids=["nothing"]).episodes == 0
    assert pq.read_table(tmp_path / "e").num_rows == 0
    with pytest.raises(PoolError, match=r"no export format 'parket'\. Did you mean 'parquet'"):
        export(file_pool, tmp_path / "e", format="parket")  # type: ignore[arg-type]


def test_an_export_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "out" / "e.parquet"
    with Pool(tmp_path / "pool.db") as pool:
        store(pool, chain(1, 1))
        export(pool, out)
        before = out.read_bytes()
        store(pool, chain(2, 1))
        with sqlite3.connect(tmp_path / "pool.db") as db:
            db.execute("UPDATE turns SET sampled_ids = x'00' WHERE episode_seq = 2")
        db.close()
        with pytest.raises(PoolError, match="changed since"):
            export(pool, out)
        assert out.read_bytes() == before
        assert os.listdir(out.parent) == ["e.parquet"]
        with pytest.raises(PoolError, match="cannot be written"):
            export(pool, tmp_path / "pool.db" / "x")


def test_interrupted_import_is_resumed(file_pool: Pool, tmp_path: Path) -> None:
    ids = filled(file_pool)
    export(file_pool, tmp_path / "e.parquet")

    class Cut(Exception): ...

    def cut(done: int) -> None:
        if done == 2:
            raise Cut

    with Pool(tmp_path / "second.db") as second:
        with pytest.raises(Cut):
            import_(second, tmp_path / "e.parquet", progress=cut)
        half = second.open_episode(id=ids[2], task_id="t2", sample=1, group=file_pool.episode(ids[2]).group)
        second.append([(half, 0, file_pool.turns(half)[0])])  # killed in the middle of one
        done = import_(second, tmp_path / "e.parquet")
        assert (done.known, done.episodes) == (2, 3)
        same(file_pool, second, ids)


def test_another_episode_of_the_same_id_is_refused(file_pool: Pool, tmp_path: Path) -> None:
    id = store(file_pool, chain(1, 2))
    export(file_pool, tmp_path / "e.parquet")
    with Pool(tmp_path / "second.db") as second:
        store(second, chain(2, 2), id=id)
        with pytest.raises(PoolError, match="another one of this id"):
            import_(second, tmp_path / "e.parquet")


@pytest.mark.parametrize("content", [b'{"a": 1}\n', b"x", b"PAR1xxx"])
def test_other_files_are_refused(file_pool: Pool, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(TraceError):
        import_(file_pool, tmp_path / "f")
    with pytest.raises(TraceError, match="give a file"):
        import_(file_pool, tmp_path / "gone")


def test_format_is_that_of_the_suffix(file_pool: Pool, tmp_path: Path) -> None:
    store(file_pool, chain(0, 2))
    export(file_pool, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").read_bytes()[:4] == b"PAR1"
    export(file_pool, tmp_path / "a.jsonl")
    assert json.loads((tmp_path / "a.jsonl").read_text())["schema_version"].startswith("ATIF")
    export(file_pool, tmp_path / "m.jsonl", format="messages")
    assert "messages" in json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    for name, format in (("x.jsonl", "parquet"), ("x.parquet", "atif"), ("x.parquet", "messages")):
        with pytest.raises(PoolError, match=r"give --format .*or another name"):
            export(file_pool, tmp_path / name, format=format)  # type: ignore[arg-type]
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize("format", ["parquet", "atif", "messages"])
def test_open_episodes_are_counted_and_can_be_included(file_pool: Pool, tmp_path: Path, format: Any) -> None:
    store(file_pool, chain(0, 2), id="closed")
    turns = chain(1, 3)
    file_pool.open_episode(id="open")
    file_pool.append([("open", index, turn) for index, turn in enumerate(turns)])
    assert export(file_pool, tmp_path / "e", format=format) == Exported(1, 1)
    assert export(file_pool, tmp_path / "e", format=format, include_open=True) == Exported(2, 0)
    with Pool(tmp_path / "second.db") as second:
        import_(second, tmp_path / "e")
        back = [episode for episode in second.episodes() if "open" in episode.id]
        assert len(back) == 1
        assert (back[0].state, back[0].trainable, back[0].reward) == ("closed", False, None)
        assert sum(episode.n_turns for episode in second.episodes()) == 5
