"""The replies of the first version that training rehearses, and what training imitates."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from clawgym.gateway.render import Renderer  # noqa: E402
from clawgym.online.canaries import canaries  # noqa: E402
from clawgym.online.config import ServiceFolder, load_service_config  # noqa: E402
from clawgym.online.judging import ConversationJudge  # noqa: E402
from clawgym.online.rehearsal import general_requests, rehearsed_replies  # noqa: E402
from clawgym.online.training import VersionTrainer  # noqa: E402
from clawgym.online.versions import Versions  # noqa: E402
from clawgym.pool import Pool  # noqa: E402
from clawgym.records import Turn  # noqa: E402
from clawgym.trainers.common.policy import load_policy  # noqa: E402
from clawgym.trainers.config import Compute, Lora, Model  # noqa: E402


def test_no_request_is_a_canary_of_the_gate() -> None:
    checked = {str(canary.messages[-1]["content"]) for canary in canaries("style", 500)}
    asked, topics = general_requests(500), {text.rstrip("?.").split()[-1] for text in checked}
    assert asked[:72] == general_requests(72)
    assert not set(asked) & checked
    assert not [text for text in asked if topics & set(text.rstrip("?.").split())]


async def test_the_first_version_is_rehearsed_whatever_was_learned_since(model: Path, tmp_path: Path) -> None:
    policy = load_policy(Model(path=str(model), lora=Lora(rank=2, alpha=4)), model, Compute())
    renderer, kept = Renderer(model), tmp_path / "kept.json"
    first = await rehearsed_replies(kept, policy, renderer)
    assert first
    assert all(row.ids[-1] in renderer.stop_ids and 0 < sum(row.mask) <= 160 for row in first)
    with torch.no_grad():
        for name, weight in policy.module.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    assert await rehearsed_replies(tmp_path / "again.json", policy, renderer) == first
    assert await rehearsed_replies(kept, policy, renderer) == first, "read from the file"


def converse(pool: Pool, number: int, thumbs: tuple[int, ...], version: int = 0) -> str:
    """A conversation with a version, and a thumb for each reply."""
    id = pool.open_episode(channel="live:user")
    message: Mapping[str, Any] = {"role": "user", "content": "Hello"}
    for n in range(len(thumbs)):
        parent = n - 1 if n else None
        turn = Turn((9, 10 + number), (11, 12 + n), (-7.6, -7.6), version, parent=parent, messages=(message,))
        pool.append([(id, n, turn)])
    pool.set_turn_rewards(id, dict(enumerate(map(float, thumbs))), name="feedback")
    return id


async def judged(folder: ServiceFolder, pool: Pool) -> None:
    judge = ConversationJudge(folder, folder.config, pool)
    for episode in list(pool.episodes(state="open")):
        assert await judge(episode)


@pytest.mark.parametrize(("imitation", "versions"), [(1.0, 3), (0.0, 2)])
async def test_accepted_replies_are_trained_on_at_any_age(
    model: Path, tmp_path: Path, imitation: float, versions: int
) -> None:
    """The gate is behind: all conversations are with version 0, and one version of difference is allowed."""
    folder = ServiceFolder(tmp_path / "service")
    settings = ["redact=false", "held_out=0", "training.rollout.groups=2", "training.rollout.staleness=1"]
    settings += ["training.reward.judge=complaints", "gate.scorers=[likelihood, complaints]"]
    folder.create(load_service_config(None, str(model), [*settings, f"training.algorithm.imitation={imitation}"]))
    Versions.create(folder.versions, model)
    with Pool(folder.pool) as pool:
        for number in range(6):
            converse(pool, number, (-1, 1))
        await judged(folder, pool)
        trainer = VersionTrainer(folder, pool)
        while await trainer.step():
            pass
        made = Versions(folder.versions).all()[1:]
    assert len(made) == versions
    assert all(("sft/loss" in version.about["metrics"]) == (imitation > 0) for version in made)
    if imitation:
        last = made[-1].about["metrics"]
        assert last["actor/grad_norm"] > 0
        assert last["rollout/groups_trained"] == 0, "old replies have no policy gradient"


@pytest.mark.parametrize("imitation", [0.0, 1.0])
async def test_a_version_names_the_conversations_that_it_was_trained_on(
    model: Path, tmp_path: Path, imitation: float
) -> None:
    """An old conversation is one of them only if something in it is imitated."""
    folder = ServiceFolder(tmp_path / "service")
    settings = ["redact=false", "held_out=0", "gate.on=false", "training.rollout.groups=3"]
    settings += ["training.rollout.staleness=0", "training.reward.judge=complaints"]
    folder.create(load_service_config(None, str(model), [*settings, f"training.algorithm.imitation={imitation}"]))
    Versions.create(folder.versions, model)
    with Pool(folder.pool) as pool:
        first = {converse(pool, number, (-1,)) for number in range(3)}
        await judged(folder, pool)
        trainer = VersionTrainer(folder, pool)
        assert await trainer.step()
        converse(pool, 3, (-1,))
        old, new = converse(pool, 4, (-1, 1)), converse(pool, 5, (-1,), version=1)
        await judged(folder, pool)
        assert await trainer.step()
        _, one, two = Versions(folder.versions).all()
    assert set(one.sessions) == first
    assert set(two.sessions) == ({new, old} if imitation else {new})


async def test_training_goes_on_from_what_the_gate_compares_next(model: Path, tmp_path: Path) -> None:
    """After a rejection that is the version that the rejected one was made of, with its weights."""
    folder = ServiceFolder(tmp_path / "service")
    settings = ["redact=false", "held_out=0", "training.rollout.groups=2", "training.algorithm.imitation=1"]
    settings += ["training.reward.judge=complaints", "gate.scorers=[likelihood, complaints]"]
    folder.create(load_service_config(None, str(model), settings))
    versions = Versions.create(folder.versions, model)
    with Pool(folder.pool) as pool, contextlib.closing(VersionTrainer(folder, pool)) as trainer:

        async def steps() -> None:
            for number in range(2):
                converse(pool, number, (-1, 1))
            await judged(folder, pool)
            while await trainer.step():
                pass

        for _ in range(3):
            await steps()
        assert [version.parent for version in versions.all()] == [None, 0, 1, 2]
        versions.judged(3, {"verdict": "rejected", "reasons": ["style"]}, rejected=True)
        await steps()
        assert versions[4].parent == 2
        for number in (4, 2, 1):
            versions.judged(number, {"verdict": "rejected", "reasons": ["no gain"]}, rejected=True)
        await steps()
        assert versions[5].parent == 0
