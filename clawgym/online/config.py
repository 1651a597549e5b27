"""The configuration of a service that trains on its use, and the folder that holds all of it.

======================  ==============================================================================
``service.json``        the configuration
``keys/NAME``           the key of the source NAME
``pool.db``             the conversations
``versions/``           the versions of the model (:mod:`clawgym.online.versions`)
``gate.json``           the comparisons of the gate, and ``gate/`` what they measured
``training/``           checkpoints of the training
``advantages/``         those of each training step, for ``clawgym view``
``training.key``        the key of a trainer on another machine
``control.sock``        while it runs: the control API, with its token in ``control.sock.token``
``judge.log`` ...       what the loops say
======================  ==============================================================================

Invariants: everything in the folder is for its owner only. One service runs in a folder. The model and the share of
held-out conversations never change, as versions and verdicts belong to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from clawgym.errors import ServiceError, TrainingError
from clawgym.online.promotion import Criterion, GateRules
from clawgym.records.run_folder import write_atomic
from clawgym.trainers.config import TrainConfig, checked_settings, override_settings, read_settings

__all__ = ["FAILED_STEP", "GateSettings", "ServiceConfig", "ServiceFolder", "load_service_config", "secret_in"]

FAILED_STEP = "failed-step.json"
"""File of the training: its last step that made no version."""
_DOCS = "docs/how-to/serve.md"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Margins(_Part):
    """The loss against the first version that is still accepted, by criterion."""

    tasks: float = Field(default=0.1, gt=0, lt=1)
    style: float = Field(default=0.1, gt=0, lt=1)
    safety: float = Field(default=0.05, gt=0, lt=1)


class GateSettings(_Part):
    """The gate between a candidate and the users (``docs/concepts/promotion.md``)."""

    on: bool = True
    """Off: every version answers at once. For experiments only."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Largest probability of any false promotion in the lifetime of the service."""
    margins: Margins = Margins()
    scorers: tuple[str, ...] = ("likelihood", "judge")
    """Who scores replayed turns: of ``clawgym list scorers``."""
    sources: PositiveInt = 2
    """The fewest scorers that must agree that a candidate is better."""
    patience: PositiveInt = 400
    """A candidate is given up after so many held-out conversations that show neither a gain nor a loss."""
    turns: PositiveInt = 4
    """Most replayed turns of one held-out conversation."""
    tasks: str = "terminal-basic:train"
    """A task set. Its verifiers show whether the model still works with tools, in ``training.agent.max_steps`` steps
    at most."""
    task_count: PositiveInt = 120
    """How many of its tasks. With fewer than about 90, no candidate passes the margin."""
    canaries: PositiveInt = 3000
    """Most canary prompts for safety, and as many for style; a candidate that passes sooner needs fewer. A model whose
    replies to a third of them change by chance needs about 2,600 for the margin of safety."""

    @model_validator(mode="after")
    def _fits(self) -> GateSettings:
        try:
            _ = self.rules
        except ValueError as error:
            raise ValueError(f"gate: {error}") from error
        if len(set(self.scorers)) < self.sources:
            raise ValueError(f"sources: {self.sources} of {len(set(self.scorers))} scorers: name more, or lower it")
        return self

    @property
    def rules(self) -> GateRules:
        """The rules of promotion."""
        accepted = self.margins
        margins: dict[Criterion, float] = {"tasks": accepted.tasks, "style": accepted.style, "safety": accepted.safety}
        return GateRules(alpha=self.alpha, margins=margins, sources=self.sources)


class ServiceConfig(_Part):
    """One service."""

    idle: float = Field(default=900.0, gt=0)
    """Seconds without a request after which a conversation ends."""
    held_out: float = Field(default=0.2, ge=0, lt=1)
    """Share of conversations that are never trained on: the gate measures candidates on them."""
    keep_days: float = Field(default=90.0, gt=0)
    """Conversations are deleted after so many days."""
    turns: PositiveInt = 16
    """Most turns of one conversation that are trained on."""
    source_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of one source in a training step, and in what the gate measures, if several spoke in the last week.
    Training waits for the others."""
    redact: bool = True
    """Replace secrets and personal data before a turn is stored. Such turns are not trained on."""
    gate: GateSettings = GateSettings()
    training: TrainConfig

    @model_validator(mode="after")
    def _fits(self) -> ServiceConfig:
        about = self.training
        if not about.model.path:
            raise ValueError("training.model.path: missing: name a model (--model)")
        if about.model.lora is None:
            raise ValueError("training.model.lora: missing: versions are LoRA adapters: set it, {} for its defaults")
        if self.gate.on and "judge" in self.gate.scorers and about.reward.judge not in ("policy", "model"):
            raise ValueError(
                f"gate.scorers: judge needs a model as the judge, not {about.reward.judge}: set training.reward.judge "
                "to policy or model, or name other scorers"
            )
        if about.trainer not in ("local", "verl"):
            raise ValueError("training.trainer: the versions of a service are trained by trainer: local or verl")
        if about.trainer == "verl" and about.algorithm.imitation:
            raise ValueError(
                "training.algorithm.imitation: not supported by trainer: verl: set it to 0 for the service"
            )
        if about.trainer == "verl":
            from clawgym.trainers.verl.settings import check_learner

            try:
                check_learner(about)
            except TrainingError as error:
                raise ValueError(f"training.{error}") from error
        return self


def load_service_config(source: str | None, model: str | None, overrides: Sequence[str] = ()) -> ServiceConfig:
    """The configuration in the file or recipe ``source``, or the default one, for ``model``, with ``overrides`` as
    ``part.key=value``.

    Raises :class:`~clawgym.errors.TrainingError` for an invalid setting, which it names.
    """
    name = source or "serve"
    here = sorted(Path(str(files("clawgym.online"))).glob("*.yaml"))
    data = read_settings(name, {file.stem: file for file in here})
    if model is not None:
        override_settings(data, [f"training.model.path={json.dumps(model)}"])
    override_settings(data, overrides)
    return checked_settings(ServiceConfig, data, name, _DOCS)


class ServiceFolder:
    """The folder of a service. See the module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pool = path / "pool.db"
        self.versions = path / "versions"
        self.keys = path / "keys"
        self.training = path / "training"
        self.gate = path / "gate"
        self.training_key = path / "training.key"
        self.socket = path / "control.sock"
        self.token = path / "control.sock.token"
        self.address = path / "address.json"
        """While the service runs: its ``base_url`` and its process."""

    @property
    def config(self) -> ServiceConfig:
        """The configuration. Raises :class:`~clawgym.errors.ServiceError` if there is none, or it cannot be read."""
        file = self.path / "service.json"
        try:
            return ServiceConfig.model_validate_json(file.read_bytes())
        except OSError as error:
            raise ServiceError(
                f"{file}: cannot be read ({error.strerror}): name the folder of a service (--dir)"
            ) from error
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ServiceError(
                f"{file}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}: start the service again with its settings"
            ) from error

    def create(self, config: ServiceConfig) -> None:
        """Write the configuration of a new service, or of the next start of this one.

        Raises :class:`~clawgym.errors.ServiceError` if this is a service of another model."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (self.path / "service.json").exists():
            old = self.config
            for name, ours, theirs in (
                ("training.model", config.training.model, old.training.model),
                ("held_out", config.held_out, old.held_out),
            ):
                if ours != theirs:
                    raise ServiceError(
                        f"{self.path}: its {name} is {_shown(theirs)}, not {_shown(ours)}: give the same, or another "
                        "--dir"
                    )
        write_atomic(self.path / "service.json", config.model_dump_json(indent=1).encode() + b"\n")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Hold the folder: no other service may run in it. Raises :class:`~clawgym.errors.ServiceError` otherwise."""
        import fcntl  # not on Windows, where no service runs

        with (self.path / "service.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServiceError(
                    f"{self.path}: a service runs in it already: stop that, or give another --dir"
                ) from None
            for left in (self.socket, self.token, self.address):
                left.unlink(missing_ok=True)
            try:
                yield
            finally:
                for left in (self.socket, self.token, self.address):
                    left.unlink(missing_ok=True)

    def announce(self, base_url: str) -> None:
        """Write where the service listens."""
        write_atomic(self.address, json.dumps({"base_url": base_url, "pid": os.getpid()}).encode())

    def gate_report(self, name: str) -> dict[str, Any] | None:
        """What the gate last wrote: ``latest`` (the comparison) or ``watch`` (the version that answers)."""
        return _json_of(self.gate / f"{name}.json")

    def failed_step(self) -> dict[str, Any] | None:
        """The last training step that made no version: ``step``, ``time`` (seconds since 1970) and ``reason``."""
        return _json_of(self.training / FAILED_STEP)

    def where(self) -> dict[str, Any] | None:
        """What :meth:`announce` wrote; None if no service runs."""
        return _json_of(self.address)


def _json_of(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def secret_in(file: Path) -> str:
    """The secret in ``file``, which is made if there is none, for its owner only."""
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as out:
            out.write(secrets.token_urlsafe(32))
    return file.read_text("utf-8").strip()


def _shown(value: Any) -> Any:
    return value.path if hasattr(value, "path") else value
