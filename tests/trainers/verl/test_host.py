"""Groups on one host, in real sandboxes, with servers that fail or hang; what the host puts into verl's queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import EngineError, TrainingError
from clawgym.gateway.render import Renderer
from clawgym.pool import Pool, sequences_of
from clawgym.rewards.scoring import TorchScorer
from clawgym.trainers.common.batch import teacher_of
from clawgym.trainers.common.teaching import find_teachers

from ..endpoint import judge_endpoint
from ..runs import small

cpu: Any = pytest.importorskip("clawgym.trainers.verl.cpu")
hosts: Any = pytest.importorskip("clawgym.trainers.verl.host")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_window=1024)


@pytest_asyncio.fixture(loop_scope="module")
async def judge() -> AsyncIterator[Callable[[bool], str]]:
    async with judge_endpoint() as at:
        yield at


class Queue:
    """Records what is put into verl's queue."""

    def __init__(self) -> None:
        self.status: dict[str, list[str]] = {}
        self.keys: list[str] = []
        self.tags: list[dict[str, Any]] = []
        self.fields: list[Any] = []

    def init(self) -> None: ...

    async def async_kv_put(self, *, key: str, partition_id: str, tag: dict[str, str]) -> None:
        self.status.setdefault(key, []).append(tag["status"])

    async def async_kv_batch_put(self, *, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        assert not any(key in self.keys for key in keys)
        self.keys += keys
        self.tags += tags
        self.fields.append(fields)


class Client:
    """Requests of the n-th session fail, or hang, as ``fails`` and ``hangs`` say."""

    def __init__(self, server: Any, fails: Callable[[int], bool], hangs: Callable[[int], bool]) -> None:
        self._server = server
        self._fails, self._hangs = fails, hangs
        self.sessions: dict[str, int] = {}

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        number = self.sessions.setdefault(request_id, len(self.sessions))
        if self._fails(number):
            raise EngineError("the server is gone")
        if self._hangs(number):
            await asyncio.Event().wait()
        output = await self._server.generate(request_id, prompt_ids, sampling_params)
        output.extra_fields["min_global_steps"] = output.extra_fields["global_steps"]
        return output


def never(_: int) -> bool:
    return False


@contextlib.asynccontextmanager
async def opened(
    folder: Path, pool: Path, monkeypatch: pytest.MonkeyPatch, *, fails: Callable[[int], bool] = never,
    hangs: Callable[[int], bool] = never, parts: Mapping[str, Any] | None = None, **rollout: Any,
) -> AsyncIterator[tuple[Any, Queue, Client]]:  # fmt: skip
    queue = Queue()
    monkeypatch.setattr(hosts, "tq", queue)
    about = {"groups": 1, "group_size": 3, "concurrency": 1, **rollout}
    given: dict[str, Any] = {"reward": {"judge": "rule"}, **(parts or {})}
    config = small(trainer="verl", rollout=about, verl={"engine": "transformers"}, **given)
    server = cpu.CpuServer(str(folder), 1)
    client = Client(server, fails, hangs)
    host = hosts.Host(config, pool, folder, client, client, context_window=1024)
    await host.open()
    try:
        yield host, queue, client
    finally:
        await host.aclose()
        await server._engine.aclose()


async def test_group_entries_match_sampled_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder, tmp_path / "pool.db", monkeypatch) as (host, queue, _):
        await host.group("u", 4, 0)
        assert queue.status == {"u": ["running", "finished"]}
        rows = iter(queue.fields[0])
        with Pool(tmp_path / "pool.db") as pool:
            for episode in sorted(pool.episodes(channel="train"), key=lambda e: e.sample):
                assert episode.group == "group-00000004"
                for place, sample in enumerate(sequences_of(pool.turns(episode.id))):
                    at = queue.keys.index(f"u_{episode.sample}_{place}")
                    row, tag = next(rows), queue.tags[at]
                    assert row["input_ids"].tolist() == list(sample.ids)
                    trained = row["response_mask"].bool()
                    assert row["rollout_log_probs"][trained].tolist() == pytest.approx(sample.logprobs)
                    assert row["turns"][trained].tolist() == list(sample.turn_of)
                    assert (tag["number"], tag["global_steps"], tag["sample"]) == (4, 1, episode.sample)
                    assert tag["attempt"]["process"] == pool.turn_rewards(episode.id)["judge"]
        await host.acknowledge([4])
        await host.advance(1)
        with Pool(tmp_path / "pool.db") as pool:
            assert pool.group_states() == {"group-00000004": "consumed"}


async def test_stale_episodes_are_not_trained_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(folder, tmp_path / "pool.db", monkeypatch, staleness=1) as (host, queue, _):
        await host.advance(1)  # but the server has version 0
        await host.group("in time", 0, 0)
        await host.advance(2)
        await host.group("too late", 1, 0)
        assert {uid: status[-1] for uid, status in queue.status.items()} == {
            "in time": "finished",
            "too late": "failure",
        }


@pytest.mark.parametrize(
    ("failing", "delivered", "infra"),
    [
        ({0}, 3, 1),  # played once more
        ({0, 3}, 2, 2),  # the second attempt failed, too: two are enough
        ({0, 1, 3, 4}, 0, 4),  # one is not
    ],
)
async def test_infrastructure_errors_are_retried_and_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[int], delivered: int, infra: int
) -> None:
    async with opened(folder, tmp_path / "pool.db", monkeypatch, fails=failing.__contains__) as (host, queue, _):
        await host.group("u", 0, 0)
        assert queue.status["u"][-1] == ("finished" if delivered else "failure")
        assert len({key.rsplit("_", 1)[0] for key in queue.keys}) == delivered
        counts = await host.advance(1)
        assert counts["rollout/infra"] == infra
        assert counts["rollout/groups_dropped"] == (0 if delivered else 1)


async def test_group_does_not_wait_for_straggler_after_deadline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(
        folder, tmp_path / "pool.db", monkeypatch, hangs={1}.__contains__, deadline=4.0, concurrency=3
    ) as (host, queue, _):
        await host.group("u", 0, 0)
        assert queue.status["u"] == ["running", "finished"]
        assert len({key.rsplit("_", 1)[0] for key in queue.keys}) == 2
        counts = await host.advance(1)
        assert counts["rollout/late_groups"] == 1
        with Pool(tmp_path / "pool.db") as pool:
            fates = sorted(e.fate or "" for e in pool.episodes(channel="train"))
            assert fates == ["delivered", "delivered", "infra"]
            assert all(e.state == "closed" for e in pool.episodes())


async def test_repeated_infrastructure_errors_end_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(
        folder, tmp_path / "pool.db", monkeypatch, fails=lambda _: True, group_size=10, concurrency=4
    ) as (host, _, _):
        with pytest.raises(TrainingError, match=r"20 infrastructure errors in a row .*clawgym doctor"):
            await host.group("u", 0, 0)


async def test_resumed_run_does_not_repeat_finished_episodes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folder, tmp_path / "pool.db", monkeypatch) as (host, first, client):
        await host.group("u", 0, 0)
        played = len(client.sessions)
    async with opened(folder, tmp_path / "pool.db", monkeypatch) as (host, again, client):
        await host.group("v", 0, 0)
        assert (played, len(client.sessions)) == (3, 0)
        assert [key.replace("v", "u", 1) for key in again.keys] == first.keys
        assert [tag["attempt"] for tag in again.tags] == [tag["attempt"] for tag in first.tags]


@pytest.mark.parametrize("hints", [True, False])
async def test_judge_behind_endpoint_gives_rewards_and_hints(
    judge: Callable[[bool], str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hints: bool
) -> None:
    """Teacher log-probs equal those of the trainer's model; without a hint there are none."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    about = {"judge": "model", "model": "j", "base_url": judge(hints), "votes": 1}
    parts = {"reward": about, "distillation": {"hints": 1}}
    async with opened(folder, tmp_path / "pool.db", monkeypatch, parts=parts) as (host, queue, _):
        await host.group("u", 0, 0)
        counts = await host.advance(1)
        batch = host._pool.fetch(hosts.CONSUMER, 0)
        own = TorchScorer(AutoModelForCausalLM.from_pretrained(folder))
        wanted, _ = await find_teachers(batch, host._config.distillation, host._pool, Renderer(folder), own)
    assert bool(wanted) is hints
    assert counts["opd/turns_taught"] == len(wanted)
    assert counts.get("opd/no_teacher_no-hint", 0) == (0 if hints else counts["judge/scored"])
    rows = iter(queue.fields[0])
    for member in batch.groups[0].episodes:
        for sample in member.sequences:
            row = next(rows)
            said, trained = row["teacher_log_probs"], row["response_mask"].bool()
            expected = teacher_of(member, sample, wanted)
            torch.testing.assert_close(said[trained], expected, rtol=0, atol=1e-5, equal_nan=True)
            assert said[~trained].isnan().all()
            assert said.isfinite().any() == hints


async def test_evaluation_is_repeatable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(folder, tmp_path / "pool.db", monkeypatch) as (host, queue, client):
        one, two = [await host.measure("heldout", [0, 1], 1, False) for _ in range(2)]
        assert one == two
        assert len(one) == 2
        assert len(client.sessions) == 4
        assert not queue.keys
