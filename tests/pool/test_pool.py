from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings

from clawgym.errors import PoolError
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Image, Turn

from .histories import chain, histories, store
from .servers import new_database

PICTURE = b"\x89PNG..."
IMAGE = Image(hashlib.sha256(PICTURE).hexdigest(), PICTURE, "image/png")


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=histories())
def test_what_was_stored_comes_back(file_pool: Pool, turns: list[Turn]) -> None:
    id = store(file_pool, turns)
    assert file_pool.turns(id) == tuple(turns)


def test_odd_values_come_back_on_every_database(pool: Pool) -> None:
    odd = Turn(
        (0, 2**31 - 1),
        (7,),
        (-1e-300,),
        policy_version=2**40,
        messages=({"role": "user", "content": "half a pair \ud800, NUL \0, long " + "x" * 5000},),
        reply={"content": None, "n": [1.5, True]},
        images=(IMAGE.sha256,),
        seconds={"total": 0.1},
        malformed_calls=2,
        tools="ab" * 32,
    )
    single = replace(odd, logprobs=(-0.5,), images=())
    text = Turn((), (1, 2, 3, 4), (-0.3, -0.1), flaw="stripped")
    id = pool.open_episode(task_id="täsk", meta={"a": [1, None]})
    pool.append([(id, 0, odd), (id, 1, single), (id, 2, text)], images=[IMAGE])
    assert pool.turns(id) == (odd, single, text)
    assert pool.image(IMAGE.sha256) == IMAGE
    assert pool.episode(id).meta == {"a": [1, None]}


def test_a_pool_is_there_after_it_was_closed(where: str) -> None:
    with Pool(where) as pool:
        id = store(pool, chain(1, 3))
    with Pool(where) as pool:
        assert pool.turns(id) == tuple(chain(1, 3))
        assert pool.episode(id).outcome == "solved"


def test_turns_come_in_order_and_once(pool: Pool) -> None:
    turns = chain(1, 3)
    id = pool.open_episode()
    pool.append([(id, 0, turns[0]), (id, 1, turns[1])])
    pool.append([(id, 1, turns[1]), (id, 0, turns[0])])
    with pytest.raises(PoolError, match="turn 3 came where turn 2 is next"):
        pool.append([(id, 3, turns[2])])
    with pytest.raises(PoolError, match="another turn 1"):
        pool.append([(id, 1, replace(turns[2], parent=0))])
    with pytest.raises(PoolError, match="another turn 2"):
        pool.append([(id, 2, turns[2]), (id, 2, replace(turns[2], role="subagent"))])
    pool.close_episode(id, EpisodeEnd(outcome="failed"))
    pool.append([(id, 1, turns[1])])
    with pytest.raises(PoolError, match="closed"):
        pool.append([(id, 2, turns[2])])
    assert pool.turns(id) == (turns[0], turns[1])


def test_an_append_is_all_or_nothing(pool: Pool) -> None:
    good, bad = pool.open_episode(), pool.open_episode()
    turns = chain(1, 2)
    with pytest.raises(PoolError, match="turn 1 came where turn 0"):
        pool.append([(good, 0, turns[0]), (bad, 1, turns[1])])
    with pytest.raises(PoolError, match="no episode 'nobody'"):
        pool.append([(good, 0, turns[0]), ("nobody", 0, turns[0])])
    assert pool.turns(good) == pool.turns(bad) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"context_ids": (1, -2)}, "context_ids: token id -2"),
        ({"context_ids": (2**31,)}, "context_ids"),
        ({"sampled_ids": (1.5,), "logprobs": (-1.0,)}, "sampled_ids"),
        ({"logprobs": ("x",), "sampled_ids": (1,)}, "logprobs"),
        ({"parent": 0}, "parent 0 does not come before"),
        ({"parent": -1}, "parent -1"),
        ({"role": "judge"}, "role 'judge'"),
        ({"policy_version": "3"}, "policy_version"),
        ({"finish_reason": "a\0b"}, "finish_reason"),
        ({"flaw": "\ud800"}, "flaw"),
        ({"reply": {"a": object()}}, "turn 0: cannot be written as JSON"),
        ({"images": ("ab" * 32,)}, "put the images before"),
    ],
)
def test_invalid_turns_are_named(file_pool: Pool, change: dict, said: str) -> None:
    id = file_pool.open_episode()
    with pytest.raises(PoolError, match=said):
        file_pool.append([(id, 0, replace(chain(1, 1)[0], **change))])
    assert file_pool.turns(id) == ()


def test_closing_is_final(pool: Pool) -> None:
    id = pool.open_episode(meta={"a": 1, "b": 1})
    end = {"outcome": "truncated", "reward": 0.25, "rewards": {"x": 1}, "cause": "budget", "meta": {"b": 2}}
    end |= {"penalties": {"length": -0.5}}
    pool.close_episode(id, EpisodeEnd(**end))
    pool.close_episode(id, EpisodeEnd(**end))
    other = {"outcome": "solved", "reward": 0.5, "rewards": {}, "cause": None, "meta": {}, "penalties": {}}
    for name, value in other.items():
        with pytest.raises(PoolError, match="an end is final"):
            pool.close_episode(id, EpisodeEnd(**{**end, name: value}))
    episode = pool.episode(id)
    assert (episode.outcome, episode.reward, episode.rewards, episode.cause) == (
        "truncated",
        0.25,
        {"x": 1.0},
        "budget",
    )
    assert episode.meta == {"a": 1, "b": 2}
    assert episode.penalties == {"length": -0.5}
    assert (episode.n_samples, episode.state) == (0, "closed")


@pytest.mark.parametrize("end", [{"outcome": "won"}, {"outcome": "solved", "reward": float("nan")},
                                 {"outcome": "solved", "rewards": {"x": float("inf")}}, {"outcome": "unsupported"},
                                 {"outcome": "solved", "penalties": {"x": 0.5}}])  # fmt: skip
def test_an_end_that_makes_no_sense_is_refused(file_pool: Pool, end: dict) -> None:
    id = file_pool.open_episode()
    with pytest.raises(PoolError):
        file_pool.close_episode(id, EpisodeEnd(**end))
    assert file_pool.episode(id).state == "open"


def test_opening_twice_is_opening_once(pool: Pool) -> None:
    for _ in range(2):
        assert pool.open_episode(id="e", task_id="t", secret_sha256="s") == "e"
        assert pool.open_group(id="g", size=2) == "g"
    with pytest.raises(PoolError, match="secret_sha256"):
        pool.open_episode(id="e", task_id="t", secret_sha256="other")
    with pytest.raises(PoolError, match="size is 2"):
        pool.open_group(id="g", size=3)
    pool.close_episode("e", EpisodeEnd(outcome="failed"))
    with pytest.raises(PoolError, match="closed already"):
        pool.open_episode(id="e", task_id="t", secret_sha256="s")
    with pytest.raises(PoolError, match="choose another"):
        pool.open_episode(id="g")
    assert len(list(pool.episodes())) == 1


def test_a_group_takes_its_size_and_replaces_what_was_infra(pool: Pool) -> None:
    group = pool.open_group(task_id="t", size=2)
    first = pool.open_episode(group=group, task_id="t")
    pool.open_episode(group=group, task_id="t")
    with pytest.raises(PoolError, match="has its 2 episodes"):
        pool.open_episode(group=group, task_id="t")
    pool.close_episode(first, EpisodeEnd(outcome="infra"))
    pool.open_episode(group=group, task_id="t")
    with pytest.raises(PoolError, match="has its 2 episodes"):
        pool.open_episode(group=group, task_id="t")
    with pytest.raises(PoolError, match="task 't'"):
        pool.open_episode(group=group, task_id="other")
    with pytest.raises(PoolError, match="channel"):
        pool.open_episode(group=group, task_id="t", channel="eval")
    with pytest.raises(PoolError, match="no group"):
        pool.open_episode(group="nobody")


def test_turn_rewards_cannot_be_changed(pool: Pool) -> None:
    id = store(pool, chain(1, 3))
    pool.set_turn_rewards(id, {0: 1, 1: -1})
    pool.set_turn_rewards(id, {1: -1, 2: 0})
    pool.set_turn_rewards(id, {0: 0.5}, name="hint")
    assert pool.turn_rewards(id) == {"judge": {0: 1.0, 1: -1.0, 2: 0.0}, "hint": {0: 0.5}}
    with pytest.raises(PoolError, match=r"reward judge is 1\.0 already"):
        pool.set_turn_rewards(id, {2: 0, 0: 0})
    with pytest.raises(PoolError, match="no turn 3"):
        pool.set_turn_rewards(id, {3: 1})
    pool.fetch("trainer", 0, min_episodes=1)
    with pytest.raises(PoolError, match="delivered to training already"):
        pool.set_turn_rewards(id, {0: 1})


def test_provenance_of_turn_rewards_is_stored(pool: Pool) -> None:
    id = store(pool, chain(1, 3))
    about = {"votes": [1, None, 0], "texts": ["Größe " * 400, "", "…"], "version": "9f"}
    pool.set_turn_rewards(id, {0: 0.5, 1: -1}, about={0: about})
    pool.set_turn_rewards(id, {0: 0.5}, about={0: about})
    pool.set_turn_rewards(id, {0: 0.5})
    pool.set_turn_rewards(id, {0: 1}, name="other", about={0: {"version": "x"}})
    assert pool.about_turn_rewards(id) == {"judge": {0: about}, "other": {0: {"version": "x"}}}
    assert pool.turn_rewards(id) == {"judge": {0: 0.5, 1: -1.0}, "other": {0: 1.0}}
    for again in ({0: {**about, "version": "a0"}}, {1: about}):
        with pytest.raises(PoolError, match="was given otherwise"):
            pool.set_turn_rewards(id, {0: 0.5, 1: -1}, about=again)
    with pytest.raises(PoolError, match=r"turn 2: about judge: .*JSON"):
        pool.set_turn_rewards(id, {2: 1}, about={2: {"votes": {1, 2}}})
    pool.set_turn_rewards(id, {1: -1}, about={2: about})  # turn 2 was judged, and got no reward
    assert pool.turn_rewards(id)["judge"] == {0: 0.5, 1: -1.0}
    assert pool.about_turn_rewards(id)["judge"] == {0: about, 2: about}
    (group,) = pool.fetch("trainer", 0, min_episodes=1).groups
    assert group.episodes[0].process_rewards == {0: 0.5, 1: -1.0}


def test_episodes_are_listed_in_order(pool: Pool) -> None:
    ids = [pool.open_episode(task_id=f"t{n % 2}", channel="online" if n == 3 else "train") for n in range(6)]
    pool.close_episode(ids[1], EpisodeEnd(outcome="failed"))
    assert [e.id for e in pool.episodes()] == ids
    assert [e.id for e in pool.episodes(state="closed")] == [ids[1]]
    assert [e.id for e in pool.episodes(channel="online")] == [ids[3]]
    assert [e.id for e in pool.episodes(task_id="t0")] == ids[::2]


def test_an_erased_episode_leaves_nothing(pool: Pool) -> None:
    shown = Image(hashlib.sha256(b"other").hexdigest(), b"other", "image/png")
    ids = [pool.open_episode(channel="c", meta={"secret": "s3cret"}) for _ in range(2)]
    for id, images in zip(ids, ((IMAGE, shown), (IMAGE,)), strict=True):
        said = ({"role": "user", "content": "my s3cret"},)
        turn = Turn((1,), (2,), (-0.5,), 0, messages=said, images=tuple(image.sha256 for image in images))
        pool.append([(id, 0, turn)], images=images)
        pool.set_turn_rewards(id, {0: 1.0}, about={0: {"why": "s3cret"}})
        pool.close_episode(id, EpisodeEnd(outcome="failed", reward=0.0))
    taken = pool.fetch("t", 0, channel="c", groups=2)
    assert taken is not None
    pool.erase(ids[0])
    again = pool.fetch("t", 0, channel="c", groups=2)
    assert again is not None
    assert [m.episode.id for g in again.groups for m in g.episodes] == [ids[1]]
    pool.ack("t", 0)
    assert [e.id for e in pool.episodes()] == [ids[1]]
    assert pool.image(IMAGE.sha256) == IMAGE, "another turn shows it"
    with pytest.raises(PoolError, match="no image"):
        pool.image(shown.sha256)
    pool.erase(ids[1])
    for what in (pool.episode, pool.turns, pool.erase):
        with pytest.raises(PoolError, match="no episode"):
            what(ids[1])
    assert pool.stats()["channels"] == {}
    assert pool.stats()["images"] == 0
    assert pool.fetch("t", 1, channel="c") is None


def test_the_bytes_of_an_erased_episode_are_gone(tmp_path: Path) -> None:
    where = tmp_path / "pool.db"
    with Pool(where) as pool:
        ids = [pool.open_episode() for _ in range(2)]
        for n, id in enumerate(ids):
            pool.append(
                [(id, 0, Turn((1,), (2,), (-0.5,), 0, messages=({"role": "user", "content": f"word{n}" * 9},)))]
            )
        pool.erase(ids[0])
        files = [file.read_bytes() for file in tmp_path.iterdir()]
        assert not any(b"word0" in data for data in files)
        assert any(b"word1" in data for data in files)


def test_a_group_goes_on_without_an_erased_episode(pool: Pool) -> None:
    group = pool.open_group(size=2)
    ids = [store(pool, chain(n, 1), group=group, outcome=None) for n in range(2)]
    pool.erase(ids[0])
    other = store(pool, chain(3, 1), group=group, outcome=None)
    for id in (ids[1], other):
        pool.close_episode(id, EpisodeEnd(outcome="failed", reward=0.0))
    batch = pool.fetch("t", 0)
    assert batch is not None
    assert [m.episode.id for g in batch.groups for m in g.episodes] == [ids[1], other]
    pool.erase(other)
    pool.erase(ids[1])
    assert pool.fetch("t", 0) is None, "a batch without episodes is gone"


def test_a_revoked_secret_is_gone(pool: Pool) -> None:
    id = pool.open_episode(secret_sha256="ab" * 32)
    for _ in range(2):
        pool.revoke(id)
        assert pool.episode(id).secret_sha256 == ""
    with pytest.raises(PoolError, match="no episode"):
        pool.revoke("nobody")


def test_curation_is_kept(pool: Pool) -> None:
    id = pool.open_episode()
    pool.curate(id, trainable=False, tags=["b", "a", "b"], note="rude")
    pool.curate(id, note="rude, twice")
    episode = pool.episode(id)
    assert (episode.trainable, episode.tags, episode.note) == (False, ("a", "b"), "rude, twice")


def test_an_image_is_what_its_hash_says(pool: Pool) -> None:
    pool.put_images([IMAGE, IMAGE])
    pool.put_images([IMAGE])
    assert pool.stats()["images"] == 1
    with pytest.raises(PoolError, match="another SHA-256"):
        pool.put_images([Image("00" * 32, PICTURE)])
    with pytest.raises(PoolError, match="no image"):
        pool.image("00" * 32)


@pytest.mark.parametrize("column", ["context_ids", "sampled_ids", "logprobs", "document", "role", "parent"])
def test_a_row_that_was_changed_is_refused(tmp_path: Path, column: str) -> None:
    with Pool(tmp_path / "pool.db") as pool:
        id = store(pool, chain(1, 2))
    with sqlite3.connect(tmp_path / "pool.db") as db:
        ((value,),) = db.execute(f'SELECT {column} FROM turns WHERE "index" = 1').fetchall()
        changed = (
            value[:-4] + b"\x01\x00\x00\x00" if isinstance(value, bytes) else "subagent" if value == "main" else None
        )
        db.execute(f'UPDATE turns SET {column} = ? WHERE "index" = 1', (changed,))
    db.close()
    with Pool(tmp_path / "pool.db") as pool, pytest.raises(PoolError, match="turn 1: changed since it was written"):
        pool.turns(id)


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    with Pool(tmp_path / "pool.db") as pool:
        store(pool, chain(1, 1))
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_what_is_no_pool_is_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database at all" * 100)
    with pytest.raises(PoolError, match="this is not a pool"):
        Pool(text)
    assert text.read_text() == "not a database at all" * 100
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE people (name)")
    db.close()
    with pytest.raises(PoolError, match="holds other tables"):
        Pool(other)
    with pytest.raises(PoolError, match=r"a file or postgresql://"):
        Pool("mysql://u:secret@h/d")
    with pytest.raises(PoolError, match="give a file that can be written"):
        Pool(tmp_path)


def test_a_pool_of_another_version_is_refused(where: str) -> None:
    with Pool(where) as pool, pool._store.write() as db:
        db.execute(sa.text("UPDATE clawgym_pool SET value = '99' WHERE key = 'version'"))
    with pytest.raises(PoolError, match="version 99"):
        Pool(where)


def test_full_disk_is_reported_and_nothing_is_half_written(file_pool: Pool) -> None:
    ids = [file_pool.open_episode() for _ in range(2)]
    engine = file_pool._store._engine
    engine.dispose()

    @sa.event.listens_for(engine, "connect")
    def _small(connection: sqlite3.Connection, _: object) -> None:
        ((pages,),) = connection.execute("PRAGMA page_count").fetchall()
        connection.execute(f"PRAGMA max_page_count={pages + 2}")

    with pytest.raises(PoolError, match="the disk is full: make room"):
        file_pool.append([(id, n, turn) for id in ids for n, turn in enumerate(chain(1, 60))])
    assert [file_pool.turns(id) for id in ids] == [(), ()]
    assert [file_pool.episode(id).n_turns for id in ids] == [0, 0]


def test_a_lost_connection_is_made_again(postgres: str) -> None:
    with Pool(new_database(postgres, f"s{uuid.uuid4().hex}")) as pool:
        id = store(pool, chain(1, 2))
        with psycopg.connect(postgres.format(database="postgres"), autocommit=True) as killer:
            killer.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                           "AND backend_type = 'client backend'")  # fmt: skip
        assert pool.turns(id) == tuple(chain(1, 2))
        store(pool, chain(3, 1))


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    with pytest.raises(PoolError) as caught:
        Pool(f"postgresql://me:hunter2@/x?host={tmp_path}&connect_timeout=2")
    assert "hunter2" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_must_open_its_own(tmp_path: Path) -> None:
    code = f"""
import os, sys
from clawgym.errors import PoolError
from clawgym.pool import Pool
pool = Pool({str(tmp_path / "pool.db")!r})
pid = os.fork()
if pid == 0:
    try:
        pool.stats()
    except PoolError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "open the pool again in the new process" in done.stdout, done.stderr


def test_missing_extra_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["sqlalchemy"] = None
import clawgym.pool
try:
    clawgym.pool.Pool
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("MissingDependency"), done.stderr
    assert "pip install 'clawgym[pool]'" in done.stdout
