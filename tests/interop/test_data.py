"""Exports read by ``datasets``, verl and OpenAI's own types, and their data as tasks and pools.

Needs the packages ``datasets``, ``verl`` and ``openai``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TaskError, TraceError
from clawgym.interop.data import from_dataproto, restore, task_set, to_dataproto
from clawgym.pool import EpisodeEnd, Pool, sequences_of
from clawgym.pool.exchange import export, import_

from ..pool.histories import chain, store
from ..pool.test_exchange import CHAT, DEFINED, filled, same
from .one_task import EPISODES, TASK, by_gym_make, in_the_ledger

datasets = pytest.importorskip("datasets", reason="needs datasets: clawgym interop check data")

Held = Callable[..., None]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool(tmp_path / "pool.db") as made:
        yield made


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str, Path], Any]:
    """``load("json", file)`` by ``datasets.load_dataset``."""

    def loaded(kind: str, file: Path) -> Any:
        return datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))

    return loaded


def test_a_pool_returns_from_datasets_as_it_was(pool: Pool, tmp_path: Path, load: Any, record_property: Held) -> None:
    ids = filled(pool)
    export(pool, tmp_path / "e.parquet")
    read = load("parquet", tmp_path / "e.parquet")
    read.save_to_disk(tmp_path / "arrow")
    read.to_parquet(tmp_path / "again.parquet")
    ways = {
        "parquet": read,
        "arrow": datasets.load_from_disk(tmp_path / "arrow"),
        "again": load("parquet", tmp_path / "again.parquet"),
        "stream": read.to_iterable_dataset(),
    }
    for name, dataset in ways.items():
        with Pool(tmp_path / f"{name}.db") as other:
            assert restore(other, dataset).episodes == len(ids)
            same(pool, other, ids)
            again = export(other, tmp_path / f"{name}.parquet")
            assert again.episodes == len(ids)
    record_property("held", "a pool that went through Parquet, Arrow on disk and a stream of `datasets` is the same")


def test_datasets_reads_every_export(pool: Pool, tmp_path: Path, load: Any, record_property: Held) -> None:
    filled(pool)
    count = {}
    for format, name in (("parquet", "e.parquet"), ("atif", "a.jsonl"), ("messages", "m.jsonl"), ("openai", "o.jsonl")):
        export(pool, tmp_path / name, format=format)
        read = load("parquet" if format == "parquet" else "json", tmp_path / name)
        count[format] = len(read)
    assert count["atif"] == 5
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    read = load("json", tmp_path / "m.jsonl")
    assert [without_none(row["messages"]) for row in read] == [without_none(row["messages"]) for row in lines]
    record_property("held", f"`datasets.load_dataset` reads {', '.join(count)}, and the messages are the same")


def without_none(value: Any) -> Any:
    """``value`` without the keys that a table adds to every row."""
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list) else value


def test_atif_and_messages_return_with_their_content(pool: Pool, tmp_path: Path, record_property: Held) -> None:
    chat = [replace(turn, images=()) for turn in CHAT]  # neither format has images
    pool.put_images([DEFINED])
    id = store(pool, chat, task_id="t1")
    for name, format in (("a.jsonl", "atif"), ("m.jsonl", "messages")):
        export(pool, tmp_path / name, format=format)
        with Pool(tmp_path / f"{format}.db") as other:
            import_(other, tmp_path / name)
            (found,) = other.episodes()
            assert (found.task_id, found.outcome, found.reward) == ("t1", "solved", pool.episode(id).reward)
            turns = other.turns(found.id)
            assert [turn.reply["content"] for turn in turns] == [turn.reply["content"] for turn in chat]
            if format == "atif":
                assert sequences_of(turns) == sequences_of(chat)
            else:
                assert [(turn.messages, turn.reply) for turn in turns] == [(one.messages, one.reply) for one in chat]
    record_property("held", "ATIF returns with the same training sequences, SFT messages with the same messages")


async def test_the_task_of_several_routes(pool: Pool, tmp_path: Path, load: Any, record_property: Held) -> None:
    model = make_tiny_model(tmp_path / "model")
    expected = []
    for commands in EPISODES.values():
        played = await asyncio.to_thread(by_gym_make, commands)
        episode = (await in_the_ledger(pool, model, commands)).episode
        expected.append((TASK.id, played.reward, sequences_of(episode.turns)))
        assert all(turn.sampled_ids for turn in episode.turns)
    for format, name in (("parquet", "e.parquet"), ("atif", "a.jsonl")):
        export(pool, tmp_path / name, format=format)
        with Pool(tmp_path / f"{format}.db") as other:
            if format == "parquet":
                restore(other, load("parquet", tmp_path / name))
            else:
                import_(other, tmp_path / name)
            found = [(one.task_id, one.reward, sequences_of(other.turns(one.id))) for one in other.episodes()]
        assert found == expected
    ids = sum(len(sequence.ids) for _, _, sequences in expected for sequence in sequences)
    record_property("held", f"a task that other routes play: {ids} ids as our ledger, rewards as `gym.make`")


def test_openai_accepts_its_format(pool: Pool, tmp_path: Path, record_property: Held) -> None:
    chat = pytest.importorskip("openai.types.chat")
    from pydantic import TypeAdapter

    filled(pool)
    export(pool, tmp_path / "o.jsonl", format="openai")
    lines = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert lines
    known = TypeAdapter(chat.ChatCompletionMessageParam, config={"extra": "forbid"})
    for line in lines:
        assert line.keys() <= {"messages", "tools"}
        assert line["messages"][-1]["role"] == "assistant"
        for message in line["messages"]:
            known.validate_python(message)
    assert "reasoning_content" not in json.dumps(lines)
    record_property("held", f"OpenAI's own types accept {len(lines)} conversations of its fine-tuning format")


def test_sequences_return_from_dataproto(pool: Pool, tmp_path: Path, record_property: Held) -> None:
    verl = pytest.importorskip("verl")
    filled(pool)
    store(pool, chain(3, 5), task_id="t3")
    ungraded = store(pool, chain(4, 5), outcome=None)
    pool.close_episode(ungraded, EpisodeEnd(outcome="solved"))
    batch = to_dataproto(pool, pad_id=7)
    batch.save_to_disk(tmp_path / "batch.pkl")
    batch = verl.DataProto.concat(verl.DataProto.load_from_disk(tmp_path / "batch.pkl").chunk(len(batch)))
    expected = [
        (episode.id, sequence)
        for episode in pool.episodes()
        if episode.state == "closed" and episode.outcome != "infra" and episode.trainable is not False
        if episode.reward is not None
        for sequence in sequences_of(pool.turns(episode.id))
    ]
    found = from_dataproto(batch)
    assert len(found) > 2
    for (id, one), (other_id, other) in zip(expected, found, strict=True):
        assert id == other_id
        assert other.logprobs == pytest.approx(one.logprobs, rel=1e-6)
        for name in ("turns", "ids", "mask", "policy_versions", "turn_of", "images"):
            assert getattr(one, name) == getattr(other, name), name
    assert ungraded not in {id for id, _ in found}
    rewards = [pool.episode(id).reward for id, _ in expected]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == pytest.approx(rewards)
    record_property("held", f"{len(found)} training sequences return from a `DataProto` on disk, in chunks")


def test_any_data_set_becomes_tasks(tmp_path: Path, load: Any, record_property: Held) -> None:
    rows = [
        {"id": 7, "Question": "What is 1 + 1?", "meta": {"final": "2"}},
        {"id": 8, "Question": "What is 2 + 2?", "meta": {"final": "4"}},
        {"id": 9, "Question": None, "meta": {"final": "4"}},
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load("json", tmp_path / "q.jsonl")
    columns = {"problem": "Question", "answer": "meta.final"}
    for one in (dataset, dataset.to_iterable_dataset()):
        tasks = task_set(one, columns, name="sums")
        assert [task.id for task in tasks.tasks] == ["row-00007", "row-00008"]
        assert "1 + 1" in tasks.tasks[0].instruction
        assert list(tasks.problems) == ["sums:2"]
    assert len(task_set(dataset, columns, limit=1).tasks) == 1
    with pytest.raises(TaskError, match="no column 'none'"):
        task_set(dataset, {"problem": "none"})
    with pytest.raises(TaskError, match="map the columns"):
        task_set(dataset)
    record_property("held", "a local data set becomes a TaskSet by a mapping of its columns, nested ones too")


def test_other_data_is_no_pool(pool: Pool) -> None:
    with pytest.raises(TraceError):
        restore(pool, datasets.Dataset.from_list([{"a": 1}]))
    with pytest.raises(TraceError):
        restore(pool, datasets.Dataset.from_list([{"episode": {"a": 1}}]))
