"""``python benchmarks/personal.py``: does a policy learn a simulated person's style from the person's reactions?

Invariants: the policy is trained on conversations through the gateway, by the learner of ``clawgym train``. The judge
reads only what the person said. Scores are on held-out requests. A cell is one (method, seed); a finished cell is not
run again. All methods meet the same person with the same requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import torch

from clawgym.engines import Sampling
from clawgym.errors import TrainingError
from clawgym.evaluation.paired import difference
from clawgym.gateway.render import Renderer
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.gateway.session_engine import SessionEngine
from clawgym.offload import in_update_thread
from clawgym.pool import EpisodeEnd, Pool
from clawgym.pool.states import Batch
from clawgym.records.run_folder import RunFolder, make_manifest
from clawgym.reporting.experiment import experiment_page
from clawgym.rewards.hints import with_hint
from clawgym.rewards.rules import DegradedJudge
from clawgym.rewards.scoring import ScoreRequest
from clawgym.simulation.corpus import conversations, habits, write
from clawgym.simulation.judge import ComplaintJudge
from clawgym.simulation.rules import RULES
from clawgym.simulation.sessions import SimulatedSession, sessions_to_stable, talk
from clawgym.simulation.users import ReplyScore, User, UserRequest, requests, user_of
from clawgym.statistics import bootstrap, mean, rate
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.common.checkpoints import Checkpoints
from clawgym.trainers.common.collector import episode_seed
from clawgym.trainers.common.judging import Judging
from clawgym.trainers.common.policy import Policy, load_policy
from clawgym.trainers.common.services import open_engine, pool_file
from clawgym.trainers.common.start_model import base_folder, checkpoint_model, given_model, merged_model
from clawgym.trainers.common.supervised import masked_sequence
from clawgym.trainers.common.teaching import find_teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.personal_report import hint_summary, report, report_answer
from clawgym.trainers.local.training_state import TrainingState
from clawgym.visible import visible_lines

__all__ = ["METHODS", "Method", "bench", "config_of", "first_policy", "imitated_policy"]

Method = Literal["binary", "opd", "combined", "random"]
METHODS: tuple[Method, ...] = get_args(Method)
THRESHOLD = 0.8
"""Mean score of first replies from which a policy counts as stable."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and the total."""

_CONSUMER = "personal"
_SEED_OFFSET = 10**6
"""Added to seeds of requests for imitation and for the check of hints, so that no simulated person asks them."""
_TOKENIZER_CONVERSATIONS = 400
"""Conversations on which the tokenizer of a model from scratch is trained."""
_CHANGEABLE = ("budget", "compute", "guards", "tracking", "checkpoint_every")
"""Settings that may change without affecting finished cells; ``budget.steps`` may not."""


def config_of(config: TrainConfig, method: Method, seed: int) -> TrainConfig:
    """The configuration of a cell: binary RL on the judge's votes, distillation from its hints, or both."""
    hints = 1 if method in ("opd", "combined") else 0
    given = config.model_dump()
    given["seed"] = seed
    given["reward"]["judge"] = ComplaintJudge.name
    given["algorithm"]["advantage"] = "binary"
    given["distillation"] |= {"hints": hints, "w_rl": 0.0 if method == "opd" else 1.0, "w_opd": 1.0}
    return TrainConfig.model_validate(given)


async def bench(
    config: TrainConfig,
    out: Path,
    *,
    methods: Sequence[Method] = METHODS,
    seeds: int = 3,
    on_progress: ProgressCallback,
    say: Callable[[str], None],
    stop: asyncio.Event,
) -> dict[str, Any]:
    """Run the missing cells of ``methods`` x ``seeds`` into the folder ``out``. Returns the content of
    ``results.json``.

    ``say`` first gets a sentence on whether the policy uses hints at all. Setting ``stop`` ends the run early. Raises
    :class:`~clawgym.errors.RunFolderError` for a folder with other settings, and
    :class:`~clawgym.errors.TrainingError` if the model cannot be loaded.
    """
    given_model(config)  # raises for a missing model before the folder is made
    settings = config.model_dump(mode="json")
    fixed = {name: value for name, value in settings.items() if name not in _CHANGEABLE} | {
        "steps": config.budget.steps
    }
    with RunFolder.open(out, make_manifest("bench", config={"bench": "personal", **fixed})) as folder:
        model = await first_policy(config, out, on_progress=on_progress, stop=stop)
        if model is not None and "hints" not in folder.latest:
            folder.append({"key": "hints", **await _hints(config, model)})
            _write(folder)
        say(hint_summary(folder.latest.get("hints")))
        for seed, method in itertools.product(range(seeds), methods):
            if model is None or stop.is_set():
                break
            key = f"{method}-{seed}"
            if key not in folder.latest:
                row = await _cell(
                    config_of(config, method, seed), method, model, out / "cells" / key, on_progress, stop
                )
                if row is not None:
                    folder.append({"key": key, **row})
                    _write(folder)
        return _write(folder)


def _write(folder: RunFolder) -> dict[str, Any]:
    rows = folder.latest
    results = {"hints": rows.get("hints"), "cells": [row for key, row in rows.items() if key != "hints"]}
    folder.write_json("results.json", results)
    folder.write("report.md", visible_lines(report(results)).encode())
    name, window = folder.path.resolve().name, folder.manifest.config["rollout"]["groups"]
    folder.write("report.html", experiment_page(report_answer(name, results, window)).encode())
    return results


# --- the initial policy -----------------------------------------------------------------------------------------------


async def first_policy(
    config: TrainConfig, out: Path, *, on_progress: ProgressCallback, stop: asyncio.Event
) -> Path | None:
    """The folder of the model that every cell starts from: ``model.path``, or :func:`imitated_policy`; ``None`` if the
    run was stopped before it was ready."""
    if config.model.path is None:
        return await imitated_policy(config, out, on_progress=on_progress, stop=stop)
    _use_threads(config)
    return base_folder(config, out, (), ())


async def imitated_policy(
    config: TrainConfig, out: Path, *, on_progress: ProgressCallback, stop: asyncio.Event
) -> Path | None:
    """The folder of a model that has imitated conversations with other people than those of the bench, in
    ``out/sft``: ``model.path``, or one that is made from scratch. ``None`` if the run was stopped before it was
    ready; the same call goes on."""
    _use_threads(config)
    run = out / "sft"
    checkpoints = Checkpoints(run)
    if (best := checkpoints.best()) is not None:
        return merged_model(checkpoint_model(best), run / "merged")
    known = [{"messages": said} for said in itertools.islice(conversations(_SEED_OFFSET), _TOKENIZER_CONVERSATIONS)]
    folder = base_folder(config, run, (), known)
    state = TrainingState.load(config, run, folder, lr=config.sft.lr)
    progress = state.progress
    progress.best_step = config.sft.steps  # no evaluation: the last checkpoint is the best one
    renderer, steps, batch = Renderer(folder), config.sft.steps, config.sft.batch
    made = itertools.islice(conversations(_SEED_OFFSET + config.seed), progress.step * batch, None)
    while progress.step < steps and not stop.is_set():
        rows = [masked_sequence(renderer, said) for said in itertools.islice(made, batch)]
        metrics = await in_update_thread(partial(state.learner.imitate, rows, step=progress.step, steps=steps))
        progress.step += 1
        on_progress(f"imitation loss {metrics['sft/loss']:.3f}", progress.step, steps)
        if progress.step % config.sft.evaluate_every == 0 or progress.step == steps or stop.is_set():
            state.save()
    best = checkpoints.best()
    return None if best is None else merged_model(checkpoint_model(best), run / "merged")


def _use_threads(config: TrainConfig) -> None:
    if config.compute.threads is not None:
        torch.set_num_threads(config.compute.threads)


async def _hints(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Whether the policy uses hints: the change of a reply's log-prob by a hint, in nats per reply, on held-out
    requests; for replies that follow the hint (``right``) and replies that do not (``wrong``)."""
    policy = load_policy(config.model, folder, config.compute, seed=config.seed)
    renderer = Renderer(folder)
    scorer = policy.scorer(tokens=config.compute.micro_tokens)
    rng = random.Random(f"hints {config.seed}")
    gaps: dict[str, list[float]] = {"right": [], "wrong": []}
    by_rule: dict[str, list[float]] = {name: [] for name in RULES}
    rules = itertools.cycle(RULES.values())
    for request, rule in zip(_heldout(_SEED_OFFSET, config.tasks.heldout.count), rules, strict=False):
        asked = {"role": "user", "content": request.text}
        kept = habits(rng)
        for kind, keeps in (("right", kept | {rule.name}), ("wrong", kept - {rule.name})):
            reply = {"role": "assistant", "content": write(request, keeps, rng)}
            rows = [
                masked_sequence(renderer, [message, reply]) for message in (asked, with_hint(asked, rule.instruction))
            ]
            starts = [row.mask.index(1) for row in rows]
            scores = await scorer.score(
                [ScoreRequest(row.ids[:start], row.ids[start:]) for row, start in zip(rows, starts, strict=True)]
            )
            plain, hinted = (float(scored.logprobs.sum()) for scored in scores)
            gaps[kind].append(hinted - plain)
        by_rule[rule.name].append(gaps["right"][-1] - gaps["wrong"][-1])
    found: dict[str, Any] = {"by_rule": {name: fmean(gap) for name, gap in by_rule.items() if gap}}
    for kind, values in gaps.items():
        low, high = bootstrap(values)
        found[kind] = {"nats": fmean(values), "low": low, "high": high, "requests": len(values)}
    return found


# --- one cell ---------------------------------------------------------------------------------------------------------


class _Chat:
    """A simulated person who talks to a policy behind a gateway."""

    def __init__(
        self, config: TrainConfig, user: User, pool: Pool, gateway: Gateway, policy: Policy, judging: Judging
    ) -> None:
        self.config = config
        self.user = user
        self.pool = pool
        self._gateway = gateway
        self._adapter = policy.adapter
        self._judging = judging

    async def session(self, request: UserRequest, number: int, *, channel: str, turns: int) -> SimulatedSession:
        """One conversation, recorded in the pool; on the channel ``train`` it is judged."""
        about = self.config
        sampling = Sampling(temperature=about.rollout.temperature, max_tokens=about.agent.max_tokens)
        seed = partial(episode_seed, about.seed, channel, number)
        about_session = SessionRequest(
            channel=channel, task_id=request.text, seed=seed(), agent="person", adapter=self._adapter, sampling=sampling
        )
        opened = await self._gateway.open_session(about_session)
        engine = SessionEngine(self._gateway, opened)
        session = await talk(engine, self.user, request, turns=turns, sampling=sampling, seed=seed)
        episode = session.episode()
        if channel == "train":
            await self._judging("", opened.id, episode)
        end = EpisodeEnd(outcome=episode.outcome, reward=float(session.content))
        await self._gateway.close_session(opened.id, end)
        return session

    async def measure(self) -> list[list[ReplyScore]]:
        """Scores of first replies to held-out requests: one list for each request."""
        samples = self.config.evaluation.samples
        asked = list(_heldout(self.config.seed, self.config.tasks.heldout.count))
        found = await self._gather(asked * samples, 0, channel="heldout", turns=1)
        return [[session.scores[0] for session in found[n :: len(asked)]] for n in range(len(asked))]

    async def train(self, asked: Sequence[UserRequest], first: int) -> list[SimulatedSession]:
        """Conversations to train on, in order; ``first`` is the number of the first one."""
        return await self._gather(asked, first, channel="train", turns=self.config.agent.max_steps)

    async def _gather(
        self, asked: Sequence[UserRequest], first: int, *, channel: str, turns: int
    ) -> list[SimulatedSession]:
        room = asyncio.Semaphore(self.config.rollout.concurrency)

        async def one(number: int, request: UserRequest) -> SimulatedSession:
            async with room:
                return await self.session(request, number, channel=channel, turns=turns)

        return await asyncio.gather(*(one(first + n, request) for n, request in enumerate(asked)))


@asynccontextmanager
async def _open_chat(
    config: TrainConfig, method: Method, user: User, policy: Policy, run: Path
) -> AsyncIterator[tuple[_Chat, Any]]:
    """A person who talks, and the engine that answers. ``run`` is emptied; its pool is ``run/pool.db``."""
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    judge = ComplaintJudge()
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(Pool(pool_file(run)))
        engine = await stack.enter_async_context(open_engine(config, policy, run))
        gateway = await stack.enter_async_context(Gateway(engine, pool))
        chosen = judge if method != "random" else DegradedJudge(judge, 0.5, seed=config.seed)
        judging = Judging(gateway, chosen, by_majority=True)
        await stack.enter_async_context(judging.pool)
        yield _Chat(config, user, pool, gateway, policy, judging), engine


async def _cell(
    config: TrainConfig, method: Method, model: Path, run: Path, on_progress: ProgressCallback, stop: asyncio.Event
) -> dict[str, Any] | None:
    """Run one cell: evaluate, train on conversations, evaluate again; ``None`` if it was stopped."""
    started = time.monotonic()
    user = user_of(config.seed)
    policy = load_policy(config.model, model, config.compute, seed=config.seed)
    learner, renderer = Learner(policy, config), Renderer(model)
    asked = requests(config.seed)
    sessions: list[SimulatedSession] = []
    metrics: dict[str, float] = {}
    ended = None
    async with _open_chat(config, method, user, policy, run) as (chat, engine):
        before = await chat.measure()
        for step in range(config.budget.steps):
            if stop.is_set():
                return None
            found = await chat.train(list(itertools.islice(asked, config.rollout.groups)), len(sessions))
            sessions += found
            try:
                batch = await _fetched(config, chat.pool, step)
                metrics = await _train_on(config, batch, chat.pool, renderer, policy, learner, step)
            except TrainingError as error:  # a policy that collapses is a result
                ended = str(error)
            await policy.publish(engine, step + 1)
            score = fmean(session.scores[0].total for session in found)
            on_progress(f"{method}, seed {config.seed}: first replies {score:.2f}", step + 1, config.budget.steps)
            if ended is not None:
                break
        after = await chat.measure()
    first = [session.scores[0].total for session in sessions]
    return {
        "method": method,
        "seed": config.seed,
        "user": user.name,
        "rules": list(user.rules),
        "sessions": len(sessions),
        "before": _measured(user, before),
        "after": _measured(user, after),
        "change": _change(before, after),
        "stable_after": sessions_to_stable(first, threshold=THRESHOLD, window=config.rollout.groups),
        "first_replies": [round(value, 4) for value in first],
        "replies_a_session": fmean(len(session.replies) for session in sessions),
        "ended": ended,
        "figures": {name: value for name, value in metrics.items() if name.startswith(("actor/", "opd/", "reward/"))},
        "seconds": time.monotonic() - started,
    }


async def _fetched(config: TrainConfig, pool: Pool, step: int) -> Batch:
    """The batch of the latest conversations, without those that lack exact tokens."""
    for count in range(config.rollout.groups, 0, -1):
        fetch = partial(pool.fetch, _CONSUMER, step, groups=count, policy_version=step, max_staleness=0)
        batch = await asyncio.to_thread(fetch)
        if batch is not None:
            return batch
    raise TrainingError("no conversation has exact tokens to train on: see the turns' flaws in the cell's pool.db")


async def _train_on(
    config: TrainConfig, batch: Batch, pool: Pool, renderer: Renderer, policy: Policy, learner: Learner, step: int
) -> dict[str, float]:
    """One training step on a batch. Raises as :meth:`~clawgym.trainers.local.learner.Learner.train_step` does."""
    teachers, said = {}, {}
    if config.distillation.hints:
        scorer = policy.scorer(tokens=config.compute.micro_tokens)
        teachers, said = await find_teachers(batch, config.distillation, pool, renderer, scorer)
    seed = episode_seed(config.seed, step)
    made = make_batch(batch, config, seed=seed, teachers=teachers, device=policy.device)
    metrics = await in_update_thread(partial(learner.train_step, made, seed=seed))
    await asyncio.to_thread(pool.ack, _CONSUMER, step)
    return dict(made.metrics) | metrics | said


def _heldout(seed: int, count: int) -> Iterator[UserRequest]:
    return itertools.islice(requests(seed, heldout=True), count)


def _measured(user: User, scores: Sequence[Sequence[ReplyScore]]) -> dict[str, Any]:
    """Means over requests, with intervals."""
    total = mean([[score.total for score in group] for group in scores])
    right = rate([[float(score.right) for score in group] for group in scores])
    content = mean([[score.content for score in group] for group in scores])
    assert total is not None
    assert right is not None
    assert content is not None
    return {
        **{
            name: {"value": found.value, "low": found.low, "high": found.high}
            for name, found in (("score", total), ("right", right), ("content", content))
        },
        "rules": {name: fmean(score.rules[name] for group in scores for score in group) for name in user.rules},
        "requests": len(scores),
    }


def _change(before: Sequence[Sequence[ReplyScore]], after: Sequence[Sequence[ReplyScore]]) -> Mapping[str, float]:
    """The change of the score, paired by request."""
    pairs = zip(before, after, strict=True)
    found = difference([fmean(b.total for b in new) - fmean(a.total for a in old) for old, new in pairs])
    return {"value": found.value, "low": found.low, "high": found.high, "p": found.p}
