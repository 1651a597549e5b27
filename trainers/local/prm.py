"""``clawgym train prm``: a process reward model, trained on the milestones of episodes.

A turn's target is 1 if more of the verifier's checks pass after it, 0 if fewer do, and 1/2 if nothing has changed. Such
a turn is neither good nor bad: a file is read before it is changed. 1/2 is the vote 0, so a policy is not taught to
avoid reading.

Invariants: scores of held-out families come from a model that was trained on no turn of them. The same call on the same
folder resumes, and ends with the same model.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from clawgym.engines.folders import local_name
from clawgym.errors import ClawGymError, TrainingError
from clawgym.offload import in_update_thread
from clawgym.pool import Pool
from clawgym.records.judge import Judgeable
from clawgym.records.run_folder import write_atomic
from clawgym.rewards.milestones import MILESTONES
from clawgym.rewards.prm import ABOUT, AboutPrm, Head, Prm
from clawgym.rewards.quality import Quality, null_auc, qualities
from clawgym.rewards.reader import Reader
from clawgym.rewards.states import judgeables
from clawgym.rewards.words import words
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.collector import GroupPlayer
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.services import open_services, pool_file
from clawgym.trainers.common.splits import Splits
from clawgym.trainers.common.start_model import base_folder, checkpoint_model
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.training_state import TrainingState

__all__ = ["EVALUATION", "LabelledTurn", "fit_head", "labelled_turns", "train_prm"]

EVALUATION = "evaluation.json"
_CHUNK = 32
"""Turns whose hidden states are kept in one file."""
_SHOW_EVERY = 20.0
"""Seconds between messages."""
_FOLDS = 4
"""Parts of the tasks of a single family."""
_SHUFFLED, _SHUFFLES = "shuffled", 10
"""Permutations of the targets in the control. One alone may agree with the true ones by chance."""


@dataclass(frozen=True)
class LabelledTurn:
    """A turn and what it achieved."""

    record: Judgeable
    progress: float
    """Change of the mean score of the verifier's plain checks."""
    family: str
    task: str
    """Hash of the task."""
    group: str

    @property
    def target(self) -> float:
        """1, 1/2 or 0."""
        return 0.5 + 0.5 * float(np.sign(self.progress))


async def train_prm(config: TrainConfig, run: Run, splits: Splits) -> Progress:
    """Collect episodes unless ``prm.data`` names some, train, evaluate, and write the model to the run folder."""
    about = config.prm
    if (run.path / ABOUT).exists():  # written last
        run.say(f"{run.path}: trained already")
        return Progress(step=1)
    if not about.data:
        await _collect(config, run, splits)
        if run.stop.is_set():
            return Progress()
    turns = _prepared(labelled_turns(list(map(Path, about.data)) or [pool_file(run.path)]), about.heldout)
    known = {turn.task for turn in turns}
    others = [turn for turn in labelled_turns(list(map(Path, about.others)), "prm.others") if turn.task not in known]
    run.say(_counts(turns) + (f"; of other policies: {_counts(others)}" if about.others else ""))
    reader = None
    if about.kind != "words":
        folder = base_folder(_of_reader(config), run.path, splits.demonstrations, ())
        reader = Reader(folder, layer=about.layer, context=about.context)
    if about.kind == "yes-no" and reader is not None:
        return await _YesNo(config, run).tune(turns, others, reader)
    return await _Heads(config, run).run(turns, others, reader)


def labelled_turns(pools: Sequence[Path], setting: str = "prm.data") -> list[LabelledTurn]:
    """The turns with milestones of the closed episodes in ``pools``.

    A turn after which nothing was recorded is left out, as it is by a judge. Raises
    :class:`~clawgym.errors.TrainingError`, which names ``setting``, for a missing file and one without milestones.
    """
    found: list[LabelledTurn] = []
    for file in (pool.expanduser() for pool in pools):
        if not file.is_file():
            raise TrainingError(f"{setting} {file}: no such file: name the pool.db of a run with reward.milestones")
        before = len(found)
        with Pool(file) as pool:
            for episode in pool.episodes(state="closed"):
                progress = pool.turn_rewards(episode.id).get(MILESTONES)
                if not progress or episode.outcome == "infra":
                    continue
                family, kind = (str(episode.meta.get(name) or "") for name in ("family", "setting"))
                records = judgeables("", pool.turns(episode.id), id=episode.id, setting=kind or None)  # type: ignore[arg-type]
                found += [
                    LabelledTurn(record, progress[record.turn], family, episode.task_hash, episode.group)
                    for record in records
                    if record.turn in progress
                ]
        if len(found) == before:
            raise TrainingError(
                f"{setting} {file}: no turn with a next state has milestones: collect with reward.milestones, or leave "
                "it out"
            )
    return found


def fit_head(
    features: np.ndarray, targets: np.ndarray, *, hidden: int = 0, l2: float = 1e-4, seed: int = 0, scaled: bool = True
) -> Head:
    """The head that minimises the cross-entropy to ``targets`` (N,) in [0, 1] plus ``l2``/2 |w|^2, by L-BFGS.

    With ``scaled`` each of the (N, F) features gets mean 0 and variance 1/F first. ``hidden`` is the number of hidden
    units; 0: logistic regression. Deterministic.
    """
    size = features.shape[1]
    mean, scale = np.zeros(size, np.float32), np.ones(size, np.float32)
    if scaled:
        mean = features.mean(0, dtype=np.float64).astype(np.float32)
        scale = (1 / (np.sqrt(size) * np.maximum(features.std(0, dtype=np.float64), 1e-6))).astype(np.float32)
    x = torch.tensor((features - mean) * scale, dtype=torch.float64)
    # The solution is a combination of the turns, so at most N dimensions are needed.
    basis, small = torch.linalg.qr(x.T) if size > len(x) else (None, None)
    x = x if small is None else small.T
    y = torch.tensor(targets, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"out.weight": (hidden or x.shape[1],), "out.bias": (1,)}
    if hidden:
        shapes |= {"hidden.weight": (hidden, x.shape[1]), "hidden.bias": (hidden,)}
    weights = {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) if hidden else torch.zeros(shape).double())
        for name, shape in shapes.items()
    }
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.LBFGS(weights.values(), max_iter=300, tolerance_change=1e-9, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        z = torch.tanh(x @ weights["hidden.weight"].T + weights["hidden.bias"]) if hidden else x
        found = torch.nn.functional.binary_cross_entropy_with_logits(z @ weights["out.weight"] + weights["out.bias"], y)
        found = found + l2 / 2 * sum((w**2).sum() for name, w in weights.items() if name.endswith("weight"))
        found.backward()
        return found

    optimizer.step(loss)
    found = {name: weight.detach() for name, weight in weights.items()}
    if basis is not None:
        wide = "hidden.weight" if hidden else "out.weight"
        found[wide] = found[wide] @ basis.T
    return Head({"mean": mean, "scale": scale} | {name: w.numpy().astype(np.float32) for name, w in found.items()})


class _Heads:
    """Trains heads on features of a frozen model, or on words."""

    def __init__(self, config: TrainConfig, run: Run) -> None:
        self._config, self._run = config, run

    async def run(self, turns: list[LabelledTurn], others: list[LabelledTurn], reader: Reader | None) -> Progress:
        """Train and evaluate; without ``reader`` on words."""
        about = self._config.prm
        self._run.rewind(0)
        if reader is not None:
            turns, others = self._readable(reader, turns), self._readable(reader, others)
        features = bags = np.stack([words(turn.record) for turn in (*turns, *others)])
        if reader is not None:
            read = await self._states(reader, [turn.record for turn in (*turns, *others)])
            if read is None:
                return Progress()
            features = read
        targets = np.array([turn.target for turn in turns])
        dice = np.random.default_rng(self._config.seed)
        shuffled = [dice.permutation(targets) for _ in range(_SHUFFLES)]

        def fitted(given: np.ndarray, wanted: np.ndarray, at: np.ndarray, *, plain: bool = False) -> Head:
            hidden = 0 if plain else about.hidden
            return fit_head(
                given[at], wanted[at], hidden=hidden, l2=about.l2, seed=self._config.seed, scaled=given is not bags
            )

        def scored(at: np.ndarray, wanted: np.ndarray) -> dict[str, np.ndarray]:
            """Scores of the turns ``wanted`` by models of the turns ``at``."""
            return {
                "prm": fitted(features, targets, at)(features[wanted]),
                "words": fitted(bags, targets, at, plain=True)(bags[wanted]),
                "constant": np.full(len(wanted), targets[at].mean()),
                **{
                    f"{_SHUFFLED} {n}": fitted(features, given, at)(features[wanted])
                    for n, given in enumerate(shuffled)
                },
            }

        trained = np.array([turn.family not in about.heldout for turn in turns])
        heldout: dict[str, np.ndarray] = {}
        for fold in _folds(turns, about.heldout):
            found = await asyncio.to_thread(scored, np.flatnonzero(trained & ~fold), np.flatnonzero(fold))
            for name, scores in found.items():
                heldout.setdefault(name, np.full(len(turns), np.nan))[fold] = scores
        seen = ~np.isnan(heldout["prm"])
        results = {"heldout": _evaluated(turns, {name: scores[seen] for name, scores in heldout.items()}, seen)}
        if others:
            there = np.arange(len(turns), len(turns) + len(others))
            found = await asyncio.to_thread(scored, np.flatnonzero(trained), there)
            results["others"] = _evaluated(others, found)
        head = fitted(features, targets, np.flatnonzero(trained))
        model = None if reader is None else _name_of(self._config, reader.folder, self._run.path)
        self._run_ended(1, turns, trained, results, Prm(self._about(turns, trained, model), head, reader))
        return Progress(step=1)

    def _readable(self, reader: Reader, turns: Sequence[LabelledTurn], *, question: bool = False) -> list[LabelledTurn]:
        """The turns that the model's chat template can render."""
        found: list[LabelledTurn] = []
        for turn in turns:
            try:
                reader.ids(turn.record, question=question)
                found.append(turn)
            except ClawGymError as error:
                self._run.say(f"warning: left out: {error}")
        return found

    def _about(self, turns: Sequence[LabelledTurn], trained: np.ndarray, model: str | None) -> AboutPrm:
        about = self._config.prm
        families = sorted({turn.family for turn, used in zip(turns, trained, strict=True) if used})
        return AboutPrm(
            kind=about.kind, model=model, layer=about.layer, context=about.context, families=tuple(families)
        )

    def _run_ended(
        self,
        step: int,
        turns: Sequence[LabelledTurn],
        trained: np.ndarray,
        results: Mapping[str, dict[str, Quality]],
        prm: Prm,
    ) -> None:
        """Show and store the results, then the model."""
        data = {
            "turns": _summary([turn for turn, used in zip(turns, trained, strict=True) if used]),
            **{part: {name: quality.about() for name, quality in rows.items()} for part, rows in results.items()},
        }
        write_atomic(self._run.path / EVALUATION, json.dumps(data, indent=1).encode() + b"\n")
        for part, rows in results.items():
            for line in _lines(part, rows):
                self._run.say(line)
            if (gain := rows["words"].gain) is not None and gain.high < 0:
                self._run.say(f"warning: {part}: a bag of words is better: set prm.kind to words, or collect more")
        self._run.log(
            step, {f"prm/{part}_auc": rows["prm"].auc.value for part, rows in results.items() if rows["prm"].auc}
        )
        prm.save(self._run.path)

    async def _states(self, reader: Reader, records: Sequence[Judgeable]) -> np.ndarray | None:
        """(N, F) hidden states; None if it was stopped. Each chunk is kept in a file, which a resumed run reads."""
        place = self._run.path / "states"
        place.mkdir(exist_ok=True)
        rows = [reader.ids(record) for record in records]
        parts: list[np.ndarray] = []
        shown = time.monotonic()
        for number, start in enumerate(range(0, len(rows), _CHUNK)):
            if self._run.stop.is_set():
                return None
            chunk = rows[start : start + _CHUNK]
            digest = hashlib.sha256(json.dumps([local_name(str(reader.folder)), chunk]).encode()).hexdigest()[:16]
            file = place / f"{number:05d}-{digest}.safetensors"
            known = _known_states(file, (len(chunk), reader.size))
            if known is None:
                known = await asyncio.to_thread(reader.states, chunk)
                write_atomic(file, save({"states": known}))
            parts.append(known)
            if time.monotonic() > shown + _SHOW_EVERY or start + _CHUNK >= len(rows):
                shown = time.monotonic()
                self._run.say(f"hidden states of {min(start + _CHUNK, len(rows))} of {len(rows)} turns")
        return np.concatenate(parts)


class _YesNo(_Heads):
    """Fine-tunes the model to answer yes or no."""

    async def tune(self, turns: list[LabelledTurn], others: list[LabelledTurn], reader: Reader) -> Progress:
        """Train until the last step, then evaluate."""
        config, about = self._config, self._config.prm
        state = await asyncio.to_thread(
            TrainingState.load, _of_reader(config), self._run.path, reader.folder, lr=config.sft.lr
        )
        self._run.rewind(state.progress.step)
        turns, others = (self._readable(reader, some, question=True) for some in (turns, others))
        trained = np.array([turn.family not in about.heldout for turn in turns])
        rows = [
            (reader.ids(turn.record, question=True), turn.target)
            for turn, used in zip(turns, trained, strict=True)
            if used
        ]
        if about.shuffle:
            shuffled = [target for _, target in rows]
            random.Random(config.seed).shuffle(shuffled)
            rows = [(ids, target) for (ids, _), target in zip(rows, shuffled, strict=True)]
        progress, saved = state.progress, state.progress.step if state.checkpoints.last() else -1
        while progress.step < config.sft.steps and not self._run.stop.is_set():
            batch = _answers(rows, config.sft.batch, (reader.yes, reader.no), f"{config.seed}:prm:{progress.step}")
            imitate = partial(state.learner.imitate, batch, step=progress.step, steps=config.sft.steps)
            metrics = await in_update_thread(imitate)
            progress.step += 1
            progress.seconds += metrics["timing/update"]
            self._run.log(progress.step, metrics)
            if progress.step % config.sft.evaluate_every == 0:
                await asyncio.to_thread(state.save)
                saved = progress.step
        if saved < progress.step:
            await asyncio.to_thread(state.save)
        last = state.checkpoints.last()
        if progress.step < config.sft.steps or last is None:
            return progress
        model = checkpoint_model(last)
        answering = Reader(model, context=about.context)
        prm = Prm(self._about(turns, trained, str(model.relative_to(self._run.path))), None, answering)
        used = [turn for turn in turns if turn.family not in about.heldout]
        targets = np.array([turn.target for turn in used])
        plain = fit_head(np.stack([words(turn.record) for turn in used]), targets, l2=about.l2, scaled=False)
        results = {}
        for part, some in (("heldout", [turn for turn in turns if turn.family in about.heldout]), ("others", others)):
            if some:
                scores = {
                    "prm": await asyncio.to_thread(prm.scores, [turn.record for turn in some]),
                    "words": plain(np.stack([words(turn.record) for turn in some])),
                    "constant": np.full(len(some), targets.mean()),
                }
                results[part] = _evaluated(some, scores)
        self._run_ended(progress.step + 1, turns, trained, results, prm)
        return progress


def _answers(
    rows: Sequence[tuple[tuple[int, ...], float]], size: int, words: tuple[int, int], seed: str
) -> list[MaskedSequence]:
    """A batch of turns, each answered yes with the probability of its target."""
    dice = random.Random(seed)
    drawn = [dice.choice(rows) for _ in range(size)]
    yes, no = words
    return [
        MaskedSequence((*ids, yes if dice.random() < target else no), (0,) * len(ids) + (1,)) for ids, target in drawn
    ]


async def _collect(config: TrainConfig, run: Run, splits: Splits) -> None:
    """Run ``prm.groups`` groups of episodes with milestones, or those that are missing."""
    about = config.reward.model_copy(update={"milestones": config.reward.milestones or "turn", "judge": None})
    config = config.model_copy(update={"reward": about})
    with Pool(pool_file(run.path)) as pool:
        policy = load_policy(
            config.model, base_folder(config, run.path, splits.demonstrations, ()), config.compute, seed=config.seed
        )
        async with open_services(config, policy, run.path, pool) as services:
            groups = GroupPlayer(config, splits.train, pool, services.player)
            known = await groups.unfinished()
            wanted = [number for number in range(config.prm.groups) if known.get(number, True)]
            run.say(f"collecting {len(wanted)} groups of {config.rollout.group_size} episodes with milestones")

            async def collect() -> None:
                await asyncio.gather(*(groups.play(number, known.get(number)) for number in wanted))

            await run.unless_stopped(collect())


def _prepared(turns: list[LabelledTurn], heldout: Sequence[str]) -> list[LabelledTurn]:
    """``turns``, if they can be trained on."""
    families: dict[str, str] = {}
    for turn in turns:
        if not turn.family or families.setdefault(turn.task, turn.family) != turn.family:
            raise TrainingError(
                f"prm.data: episode {turn.record.episode} has no family, or another one than earlier episodes of its "
                "task: collect it again"
            )
    known = sorted(set(families.values()))
    if unknown := sorted(set(heldout) - set(known)):
        raise TrainingError(f"prm.heldout: no episode of family {unknown[0]!r}: choose from {', '.join(known)}")
    kinds = {turn.target for turn in turns if turn.family not in heldout}
    if 1.0 not in kinds or len(kinds) < 2:
        raise TrainingError(
            f"prm.data: {_counts(turns)}: training needs turns with and without progress: collect more episodes "
            "(prm.groups), or with a better policy (model.path)"
        )
    return turns


def _folds(turns: Sequence[LabelledTurn], heldout: Sequence[str]) -> Iterator[np.ndarray]:
    """Masks (N,) of turns that are scored by a model that was not trained on them: the families ``heldout``, or each
    family in turn; parts of the tasks if there is only one family."""
    families = sorted({turn.family for turn in turns})
    if heldout:
        yield np.array([turn.family in heldout for turn in turns])
    elif len(families) > 1:
        yield from (np.array([turn.family == family for turn in turns]) for family in families)
    else:
        tasks = sorted({turn.task for turn in turns})
        yield from (
            np.array([tasks.index(t.task) % _FOLDS == n for t in turns]) for n in range(min(_FOLDS, len(tasks)))
        )


def _evaluated(
    turns: Sequence[LabelledTurn], scores: Mapping[str, np.ndarray], chosen: np.ndarray | None = None
) -> dict[str, Quality]:
    """The quality of each of ``scores``; those named ``shuffled N`` become one."""
    some = [turn for n, turn in enumerate(turns) if chosen is None or chosen[n]]
    targets, families = np.array([turn.target for turn in some]), [turn.family for turn in some]
    models = {name: of for name, of in scores.items() if not name.startswith(_SHUFFLED)}
    found = qualities(models, targets, families, [turn.task for turn in some])
    if shuffled := [of for name, of in scores.items() if name not in models]:
        found[_SHUFFLED] = Quality(null_auc(shuffled, targets, families))
    return found


def _lines(part: str, rows: Mapping[str, Quality]) -> Iterator[str]:
    for name, found in rows.items():
        shown = {"AUC": found.auc, "Brier": found.brier, "ECE": found.ece, "AUC of prm is higher by": found.gain}
        yield f"{part}: {name}: " + ", ".join(f"{what} {value}" for what, value in shown.items() if value is not None)
    yield f"{part}: prm: turns, mean score and mean target, by score:"
    yield from (f"  {count:5d}  {score:.3f}  {target:.3f}" for count, score, target in rows["prm"].table)


def _summary(turns: Sequence[LabelledTurn]) -> dict[str, int]:
    return {
        "turns": len(turns),
        "progress": sum(turn.progress > 0 for turn in turns),
        "loss": sum(turn.progress < 0 for turn in turns),
        "episodes": len({turn.record.episode for turn in turns}),
        "tasks": len({turn.task for turn in turns}),
        "families": len({turn.family for turn in turns}),
    }


def _counts(turns: Sequence[LabelledTurn]) -> str:
    return ", ".join(f"{count} {name}" for name, count in _summary(turns).items())


def _of_reader(config: TrainConfig) -> TrainConfig:
    """``config`` with the model that reads turns in place of the policy."""
    if config.prm.model is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": config.prm.model})})


def _name_of(config: TrainConfig, folder: Path, run: Path) -> str:
    """The model as ``prm.json`` names it: relative in the run folder, absolute elsewhere, or its name on the Hub."""
    if folder.is_relative_to(run):
        return str(folder.relative_to(run))
    given = config.prm.model or config.model.path or ""
    return str(folder.resolve()) if Path(given).expanduser().is_dir() else given


def _known_states(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    try:
        found = load_file(file)["states"]
    except (OSError, SafetensorError, KeyError):
        return None
    return found if found.shape == shape else None
