"""Checkpoints: the state that a run resumes from, and the model in the format of transformers or peft.

Invariants: a checkpoint's folder appears when it is complete on disk. ``last`` names a complete checkpoint. The
``best`` one is never removed. A named checkpoint that is missing is an error, never a new start. Nothing is written if
the disk has too little space.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from clawgym.errors import TrainingError
from clawgym.records.run_folder import write_atomic
from clawgym.trainers.config import Budget

__all__ = ["Checkpoints", "Progress", "load_adapter", "optimizer_tensors", "restore_optimizer"]

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json",
              "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
              "chat_template.json", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model")  # fmt: skip
_COPY = "weight"
"""Name of the float32 copy of a weight that the model holds in lower precision."""
_SPARE_BYTES = 64 * 2**20
"""Bytes that stay free after a checkpoint, for the pool and the logs."""


class Optimized(Protocol):
    """Parameters with their optimizer."""

    parameters: list[torch.Tensor]

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def copies(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Index in ``parameters``, float32 copy and weight, for each weight that the files of the model do not hold in
        full precision."""
        ...


class CheckpointedPolicy(Protocol):
    """The part of a policy that a checkpoint holds."""

    folder: Path
    """The folder that the model was loaded from."""

    @property
    def lora(self) -> bool: ...

    def trained(self) -> dict[str, torch.Tensor]:
        """The trained weights, under their names in a checkpoint."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Replace the trained weights; None: by a LoRA adapter that changes nothing, as at the start. Raises
        :class:`ValueError` if they are other weights."""
        ...

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write ``weights`` in the format of transformers, or of peft."""
        ...


class CheckpointedLearner(Protocol):
    """The part of a learner that a checkpoint holds."""

    updates: int
    """Optimizer steps taken."""

    @property
    def critic(self) -> Optimized | None:
        """The critic, if there is one. It has a file of its own, ``critic.safetensors``."""
        ...

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """The state of the optimizer as tensors (:func:`optimizer_tensors`)."""
        ...

    def restore_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore it. Raises :class:`ValueError` if it does not fit."""
        ...


@dataclass
class Progress:
    """The progress of a run, as kept in ``state.json``."""

    step: int = 0
    """Batches trained on; also the policy's version."""
    seconds: float = 0.0
    """Seconds of rollouts and updates."""
    best_step: int = -1
    best_score: float = -1.0
    tokens: int = 0
    """Sampled tokens that were trained on."""
    extra: dict[str, Any] = field(default_factory=dict)
    """State of other components, as JSON."""

    def record_score(self, score: float) -> None:
        """Record this step's score on the validation split. Of steps with equal scores, the last is the best."""
        if score >= self.best_score:
            self.best_score, self.best_step = score, self.step

    def used(self, budget: Budget) -> float:
        """The share of ``budget`` that is used up, in [0, 1]."""
        minutes = 0.0 if budget.minutes is None else self.seconds / (60 * budget.minutes)
        return min(1.0, max(self.step / budget.steps, minutes))


class Checkpoints:
    """The folder ``checkpoints`` of a run."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "checkpoints"

    def last(self) -> Path | None:
        """The newest checkpoint; ``None`` before the first. Raises :class:`~clawgym.errors.TrainingError` if it is
        missing on disk."""
        return self._named("last")

    def best(self) -> Path | None:
        """The checkpoint with the best score on the validation split. As :meth:`last`."""
        return self._named("best")

    def _named(self, name: str) -> Path | None:
        step = self._step(name)
        if step is None:
            return None
        folder = self.folder / step
        if not step or not (folder / "state.json").exists():
            raise TrainingError(
                f"{folder}: {self.folder / name} names this checkpoint, but it is missing: restore it, or start again "
                "with another --out"
            )
        return folder

    def _step(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text("utf-8").strip()
        except FileNotFoundError:
            return None

    def name_best(self, progress: Progress) -> None:
        """Let ``best`` name the best step of ``progress``, if that checkpoint exists. A killed run may not have done
        it."""
        name = f"{progress.best_step:06d}"
        if self._step("best") != name and (self.folder / name / "state.json").exists():
            write_atomic(self.folder / "best", name.encode())

    def save(self, policy: CheckpointedPolicy, learner: CheckpointedLearner, progress: Progress) -> Path:
        """Write a checkpoint of ``progress``. Raises as :meth:`put` does."""
        weights = {name: t.detach().cpu().contiguous() for name, t in policy.trained().items()}
        state = learner.optimizer_state()
        critic = {} if learner.critic is None else optimizer_tensors(learner.critic)
        tensors = (*weights.values(), *state.values(), *critic.values())
        need = sum(t.numel() * t.element_size() for t in tensors) + _SPARE_BYTES

        def fill(part: Path) -> None:
            self._model(part, policy, weights)
            if state:
                save_file(state, part / "optimizer.safetensors")
            if critic:
                save_file(critic, part / "critic.safetensors")
            about = asdict(progress) | {"updates": learner.updates, "random": _random_state()}
            (part / "state.json").write_text(json.dumps(about), "utf-8")
            save_file({"torch": torch.get_rng_state()}, part / "random.safetensors")

        return self.put(progress, need, fill)

    def put(self, progress: Progress, need: int, fill: Callable[[Path], None]) -> Path:
        """Write a checkpoint: ``fill`` writes ``need`` bytes into a temporary folder, which is then renamed.

        After that ``best`` (if it is the best) and ``last`` name it, and checkpoints without a name are removed. Raises
        :class:`~clawgym.errors.TrainingError` if it would not fit or cannot be written; then nothing has changed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"{progress.step:06d}"
        free = shutil.disk_usage(self.folder).free
        if free < need:
            raise TrainingError(
                f"{self.folder}: a checkpoint takes {need / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free: free "
                f"disk space and run the same command again to resume from checkpoint {self._last_name()}"
            )
        part = self.folder / f".{target.name}.{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            fill(part)
            for file in (p for p in part.rglob("*") if p.is_file()):
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            shutil.rmtree(target, ignore_errors=True)
            part.replace(target)
        except (OSError, SafetensorError) as error:  # safetensors raises the latter for a full disk
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TrainingError(
                f"{target}: cannot be written ({why}); nothing was overwritten: free disk space, or repair the disk, "
                f"and run the same command again to resume from checkpoint {self._last_name()}"
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self.name_best(progress)  # before ``last``: a run killed in between resumes with the right best score
        write_atomic(self.folder / "last", target.name.encode())
        self._prune()
        return target

    def _model(self, part: Path, policy: CheckpointedPolicy, weights: Mapping[str, torch.Tensor]) -> None:
        folder = part / ("adapter" if policy.lora else "model")
        folder.mkdir()
        policy.write(folder, weights)
        for name in TOKENIZER:
            if (policy.folder / name).exists():
                shutil.copyfile(policy.folder / name, folder / name)

    def load(self, folder: Path, policy: CheckpointedPolicy, learner: CheckpointedLearner) -> Progress:
        """Restore model, optimizer, critic and random generators. Raises :class:`~clawgym.errors.TrainingError` if the
        checkpoint does not fit the configuration."""
        try:
            about = json.loads((folder / "state.json").read_text("utf-8"))
            load_weights(folder, policy)
            state = _tensors(folder / "optimizer.safetensors") if (folder / "optimizer.safetensors").exists() else {}
            learner.restore_optimizer(state)
            if learner.critic is not None:
                restore_optimizer(learner.critic, _tensors(folder / "critic.safetensors"))
            torch.set_rng_state(_tensors(folder / "random.safetensors")["torch"])
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise TrainingError(
                f"{folder}: cannot be resumed from ({error}): use the configuration it was written with, or name "
                "another --out"
            ) from error
        learner.updates = about.pop("updates")
        version, numbers, gauss = about.pop("random")
        random.setstate((version, tuple(numbers), gauss))
        progress = Progress(**about)
        self.name_best(progress)
        return progress

    def _prune(self) -> None:
        kept = {self._step("last"), self._step("best")}
        for folder in self.folder.iterdir():
            if folder.is_dir() and folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _last_name(self) -> str:
        return self._step("last") or "none yet"


def load_weights(folder: Path, policy: CheckpointedPolicy) -> None:
    """Load the trained weights of a checkpoint into ``policy``."""
    if policy.lora:
        load_adapter(folder / "adapter", policy)
    else:
        policy.load(_tensors(folder / "model" / "model.safetensors"))


def load_adapter(folder: Path | None, policy: CheckpointedPolicy) -> None:
    """Load a LoRA adapter, as :func:`~clawgym.engines.lora.write_adapter` wrote it, into ``policy``; None: one that
    changes nothing, as at the start."""
    policy.load(None if folder is None else _tensors(folder / "adapter_model.safetensors"))


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{file}: cannot be read ({error}): restore this file, or start again with another --out"
        ) from error


def optimizer_tensors(learner: Optimized) -> dict[str, torch.Tensor]:
    """The state of an optimizer as named tensors."""
    found: dict[str, torch.Tensor] = {}
    for number, parameter in enumerate(learner.parameters):
        for name, value in learner.optimizer.state.get(parameter, {}).items():
            found[f"{number}.{name}"] = torch.as_tensor(value).detach().cpu().clone()
    for number, copy, _ in learner.copies():
        found[f"{number}.{_COPY}"] = copy.detach().cpu()
    return found


def restore_optimizer(learner: Optimized, state: Mapping[str, torch.Tensor]) -> None:
    """Restore what :func:`optimizer_tensors` gave. Raises :class:`ValueError` for other shapes."""
    for key, value in state.items():
        number, _, name = key.partition(".")
        parameter = learner.parameters[int(number)]
        if name != "step" and value.shape != parameter.shape:
            raise ValueError(f"the optimizer's {name} of weight {number} has another shape")
        if name == _COPY:
            with torch.no_grad():
                parameter.copy_(value)
            continue
        # AdamW keeps its step on the CPU, and its moments on the device of the weight.
        learner.optimizer.state[parameter][name] = value if name == "step" else value.to(parameter)


def _random_state() -> list[Any]:
    version, numbers, gauss = random.getstate()
    return [version, list(numbers), gauss]
