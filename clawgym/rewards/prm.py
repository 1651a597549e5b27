"""Judge ``prm``: a process reward model that ``clawgym train prm`` trained (:mod:`clawgym.trainers.local.prm`).

Its folder has ``prm.json``, and ``head.safetensors`` unless it answers yes or no. torch is imported with the model.

Invariants: nothing in the folder is executed. A folder whose model is not the one it was trained with is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clawgym.errors import RunFolderError
from clawgym.records.judge import Judgeable, Judgement, Vote
from clawgym.registry import judges
from clawgym.rewards._prompt import EXAMPLE
from clawgym.rewards.words import SIZE, words

if TYPE_CHECKING:
    from clawgym.rewards.reader import Reader

__all__ = ["ABOUT", "HEAD", "AboutPrm", "Head", "Kind", "Prm", "PrmJudge"]

ABOUT, HEAD = "prm.json", "head.safetensors"
MARGIN = 0.1
"""Probabilities closer to 1/2 than this give the vote 0."""
Kind = Literal["states", "words", "yes-no"]
_AT_ONCE = 32
"""Most turns that are scored in one batch."""
_TOLERANCE = 0.02
"""Most difference of the score of the example, which precision and device may change."""
_READ = replace(EXAMPLE, after=replace(EXAMPLE.after, outcome=None))


class AboutPrm(BaseModel):
    """The file ``prm.json``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    kind: Kind
    model: str | None = None
    """The language model: a folder, relative to this one or absolute, or a name. None for ``words``."""
    layer: int | None = Field(default=None, ge=1)
    context: int = Field(default=1024, ge=16)
    families: tuple[str, ...] = ()
    """The families of tasks that it was trained on."""
    example: float | None = Field(default=None, ge=0, le=1)
    """Its score for a fixed turn. Another score shows that it was trained with another model or rendering."""


@dataclass(frozen=True)
class Head:
    """Logistic regression, or a network with one hidden layer, on (F,) features of a turn.

    ``weights`` has ``mean`` (F,), ``scale`` (F,), ``out.weight`` (H,), ``out.bias`` (1,), and with a hidden layer also
    ``hidden.weight`` (H, F) and ``hidden.bias`` (H,); without one H = F. Raises :class:`ValueError` for others.
    """

    weights: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        given = self.weights
        size = given["mean"].size if "mean" in given else 0
        shapes: dict[str, tuple[int, ...]] = {
            "mean": (size,),
            "scale": (size,),
            "out.weight": (size,),
            "out.bias": (1,),
        }
        if "hidden.bias" in given:
            units = given["hidden.bias"].size
            shapes |= {"out.weight": (units,), "hidden.weight": (units, size), "hidden.bias": (units,)}
        if odd := shapes.keys() ^ given.keys():
            raise ValueError(f"{min(odd)}: missing, or not a weight of a head: train it again")
        for name, shape in shapes.items():
            if given[name].shape != shape or given[name].dtype != np.float32 or not np.isfinite(given[name]).all():
                raise ValueError(f"{name}: not {shape} finite float32 values: train it again")

    @property
    def size(self) -> int:
        """F."""
        return self.weights["mean"].size

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """(N, F) features -> (N,) probabilities of progress."""
        given = self.weights
        x = (features - given["mean"]) * given["scale"]
        if "hidden.weight" in given:
            x = np.tanh(x @ given["hidden.weight"].T + given["hidden.bias"])
        return 0.5 * (1 + np.tanh((x @ given["out.weight"] + given["out.bias"]) / 2))


class Prm:
    """A process reward model: scores turns with the probability that they make progress, in [0, 1]; 1/2 is neutral."""

    def __init__(self, about: AboutPrm, head: Head | None, reader: Reader | None) -> None:
        self.about, self.head, self.reader = about, head, reader

    @classmethod
    def load(cls, folder: Path, *, device: str | None = None) -> Self:
        """Read the folder that ``clawgym train prm`` wrote.

        Raises :class:`~clawgym.errors.RunFolderError`, which names the file and the field, if it cannot be used, and
        :class:`~clawgym.errors.EngineError` for its model.
        """
        file = folder / ABOUT
        try:
            about = AboutPrm.model_validate_json(file.read_bytes())
        except OSError as error:
            raise RunFolderError(
                f"{file}: cannot be read ({error.strerror}): name a folder in which `clawgym train prm` has ended"
            ) from error
        except ValidationError as error:
            wrong = error.errors()[0]
            raise RunFolderError(
                f"{file}: {'.'.join(map(str, wrong['loc'])) or 'JSON'}: {wrong['msg']}: train it again"
            ) from error
        head = None if about.kind == "yes-no" else _read_head(folder / HEAD)
        reader = None
        if about.kind != "words":
            from clawgym.engines.folders import model_folder
            from clawgym.rewards.reader import Reader

            if about.model is None:
                raise RunFolderError(f"{file}: model: missing for kind {about.kind}: train it again")
            inside = folder / about.model
            reader = Reader(
                inside if inside.is_dir() else model_folder(about.model),
                layer=about.layer,
                context=about.context,
                device=device,
            )
        if head is not None and head.size != (wanted := SIZE if reader is None else reader.size):
            raise RunFolderError(
                f"{folder / HEAD}: mean: {head.size} features, not the model's {wanted}: train it again"
            )
        made = cls(about, head, reader)
        if about.example is not None and not abs(made.example() - about.example) <= _TOLERANCE:
            raise RunFolderError(
                f"{file}: example: scored {made.example():.3f}, not {about.example:.3f}, so its model or chat template "
                f"has changed ({about.model}): restore that, or train it again"
            )
        return made

    def save(self, folder: Path) -> None:
        """Write it to ``folder``, so that ``prm.json`` appears last."""
        from safetensors.numpy import save

        from clawgym.records.run_folder import write_atomic

        if self.head is not None:
            write_atomic(folder / HEAD, save({name: np.ascontiguousarray(w) for name, w in self.head.weights.items()}))
        about = self.about.model_copy(update={"example": self.example()})
        write_atomic(folder / ABOUT, about.model_dump_json(indent=1).encode() + b"\n")

    @cached_property
    def version(self) -> str:
        """Hex SHA-256 of ``prm.json`` and of the head."""
        found = hashlib.sha256(json.dumps(self.about.model_dump(exclude={"model"})).encode())
        for name, weights in sorted((self.head.weights if self.head else {}).items()):
            found.update(name.encode() + weights.tobytes())
        return found.hexdigest()

    def ids(self, record: Judgeable) -> tuple[int, ...]:
        """What its model reads of a turn. Raises :class:`~clawgym.errors.ClawGymError` if that cannot be rendered."""
        return () if self.reader is None else self.reader.ids(record, question=self.about.kind == "yes-no")

    def scores(self, records: Sequence[Judgeable]) -> np.ndarray:
        """(N,) the probability of progress of each turn. Raises as :meth:`ids` does."""
        return self.scores_of(records, [self.ids(record) for record in records])

    def scores_of(self, records: Sequence[Judgeable], rows: Sequence[tuple[int, ...]]) -> np.ndarray:
        """:meth:`scores` of turns with their :meth:`ids`."""
        if self.reader is None:
            features = np.stack([words(record) for record in records])
        elif self.about.kind == "yes-no":
            return self.reader.probabilities(rows)
        else:
            features = self.reader.states(rows)
        assert self.head is not None
        return self.head(features)

    def example(self) -> float:
        """The score of a fixed turn."""
        return float(self.scores([_READ])[0])


@judges.register("prm")
class PrmJudge:
    """A process reward model, trained beforehand with ``clawgym train prm``.

    Args:
        path: the folder that ``clawgym train prm`` wrote.
        device: the device of its model, such as ``cuda:1``.
    """

    name = "prm"

    def __init__(self, path: Path, *, device: str | None = None) -> None:
        self._model = Prm.load(path.expanduser(), device=device)
        self.version = self._model.version
        self._waiting: list[tuple[Judgeable, asyncio.Future[float]]] = []
        self._work: asyncio.Task[None] | None = None

    async def judge(self, record: Judgeable) -> Judgement:
        """One vote; its text is the probability of progress. Turns that wait are scored in one batch."""
        asked: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, asked))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._score())
        p = await asked
        vote: Vote = 1 if p >= 0.5 + MARGIN else -1 if p <= 0.5 - MARGIN else 0
        return Judgement((vote,), (f"{p:.6f}",), self.name, self.version)

    async def _score(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # turns that are asked for at the same time
            part, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            part = [(record, asked) for record, asked in part if not asked.done()]  # cancelled
            found = await asyncio.to_thread(self._scored, [record for record, _ in part])
            for (_, asked), value in zip(part, found, strict=True):
                if asked.done():
                    continue
                if isinstance(value, Exception):
                    asked.set_exception(value)
                else:
                    asked.set_result(value)

    def _scored(self, records: Sequence[Judgeable]) -> list[float | Exception]:
        """The score of each turn, or its error: one turn that cannot be rendered is no reason to lose the others."""
        found: list[float | Exception] = []
        rows: list[tuple[int, ...]] = []
        for record in records:
            try:
                rows.append(self._model.ids(record))
                found.append(0.0)
            except Exception as error:
                found.append(error)
        good = [n for n, value in enumerate(found) if not isinstance(value, Exception)]
        try:
            scores = self._model.scores_of([records[n] for n in good], rows) if good else []
        except Exception as error:  # such as no memory: each waiting turn gets it
            return [error for _ in records]
        for n, score in zip(good, scores, strict=True):
            found[n] = float(score)
        return found


def _read_head(file: Path) -> Head:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return Head(load_file(file))
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{file}: cannot be read ({error}): train it again") from error
    except ValueError as error:
        raise RunFolderError(f"{file}: {error}") from error
