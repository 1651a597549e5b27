"""The policy, the engine and the learner on a service that speaks the Tinker API, and their checkpoints.

Invariants: prompts and sampled ids are exchanged as ids, and the ids in the pool are those that the service returned.
The service computes the loss from numbers that are made here by the code of the other trainers. A checkpoint here names
one there, with its optimizer. The API key stays in the SDK's client: it is in no file, message or run manifest.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from clawgym.engines.folders import load_config
from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.errors import ClawGymError, EngineError, TrainingError
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import TrainingBatch
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.step import BatchLearner, Imitated, MiniBatch, StepMetrics, mean_difference
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.protocols import loss_of
from clawgym.trainers.tinker.settings import loss_settings

if TYPE_CHECKING:
    from clawgym.rewards.scoring import Scorer

__all__ = ["TinkerEngine", "TinkerLearner", "TinkerPolicy", "TinkerState", "sdk"]

_PATHS = "tinker.json"
"""The file of a checkpoint with the names of the service's own."""


def sdk() -> Any:
    """The package ``tinker``. Raises :class:`ImportError`."""
    return importlib.import_module("tinker")


@contextlib.contextmanager
def service_errors(kind: type[ClawGymError], do: str) -> Iterator[None]:
    """Raise ``kind``, with what to do, for an error of the SDK, which has many kinds."""
    try:
        yield
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:500]
        raise kind(f"the Tinker service failed ({why}): {do}") from error


_AGAIN = "check TINKER_BASE_URL and TINKER_API_KEY, and run the same command again to resume from the last checkpoint"


class TinkerEngine:
    """Samples with weights of the service. A reply comes whole: the API does not stream."""

    name = "tinker"

    def __init__(self, model: str, folder: Path, context_window: int) -> None:
        self.tokenizer = str(folder)
        self.context_window = context_window
        self._model = model
        self._client: Any = None
        self._version = 0

    def use(self, client: Any, version: int) -> None:
        """Sample with a ``tinker.SamplingClient`` from the next request on."""
        self._client, self._version = client, version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        """See :class:`~clawgym.engines.protocol.TokenEngine`. Log-probs are given at temperature 1 and without top-p
        and top-k, where the service's are exact."""
        tinker = sdk()

        if request.images or request.adapter or request.sampling.json_schema is not None:
            raise EngineError("images, adapters and schemas cannot be sent to the Tinker service: leave them out")
        most, client, version = request.max_tokens(self.context_window), self._client, self._version
        params = tinker.SamplingParams(
            max_tokens=most,
            seed=request.seed,
            stop=sorted(request.stop_ids),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
        )
        with service_errors(EngineError, "see its log, then run again"):
            answer = await client.sample(tinker.ModelInput.from_ints(list(request.prompt_ids)), 1, params)
        (sequence,) = answer.sequences
        ids, logprobs = tuple(sequence.tokens), tuple(sequence.logprobs or ())
        exact = (request.temperature, request.top_p, request.top_k) == (1.0, 1.0, 0)
        stops = [place for place, token in enumerate(ids) if token in request.stop_ids]
        ended = [] if sequence.stop_reason == "length" else [len(ids) - 1]
        if not 0 < len(ids) <= most or len(logprobs) not in (0, len(ids)) or stops != ended:
            _broken(f"{len(ids)} ids and {len(logprobs)} log-probs of at most {most}, with stop ids at {stops[:3]}")
        yield Tokens(ids, logprobs if exact else (), version, finish_reason=sequence.stop_reason)

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.engines.protocol.TokenEngine`."""
        return {"name": self.name, "model": self._model}

    async def sleep(self) -> None:
        """Do nothing: the service decides what it keeps in memory."""

    async def aclose(self) -> None:
        """Do nothing: the session ends with the SDK's client."""


def _broken(what: str) -> NoReturn:
    raise EngineError(f"the Tinker service returned {what}: use a service that returns every sampled id")


class TinkerPolicy:
    """A LoRA adapter on the service."""

    adapter = None
    """The service has one set of weights for each sampling client."""
    device = torch.device("cpu")

    def __init__(self, service: Any, training: Any, model: str, folder: Path) -> None:
        self.folder = folder
        """The folder with the tokenizer and the chat template of the model."""
        self.training = training
        self._service, self._model = service, model
        self.sampler = ""
        """The service's name of the weights that were published last."""

    def engine(self, *, context_window: int | None = None, **_: Any) -> TinkerEngine:
        """An engine without weights: publish some first."""
        window = context_window or int(load_config(self.folder).get_text_config().max_position_embeddings)
        return TinkerEngine(self._model, self.folder, window)

    async def publish(self, engine: Any, version: int) -> None:
        """Let ``engine`` sample with the weights as they are, as ``version``."""
        with service_errors(TrainingError, _AGAIN):
            self.sampler = (await self.training.save_weights_for_sampler(f"{version:06d}")).path
            engine.use(await self._service.create_sampling_client(model_path=self.sampler), version)

    async def restore(self, checkpoint: Path, engine: Any, version: int) -> None:
        """Let ``engine`` sample with the weights of ``checkpoint``; those that are trained stay."""
        path = _paths(checkpoint)["sampler"]
        with service_errors(TrainingError, _AGAIN):
            engine.use(await self._service.create_sampling_client(model_path=path), version)

    def scorer(self, *, tokens: int) -> Scorer:
        """Hints are refused before a run starts."""
        raise TrainingError("distillation.hints: not supported by trainer: tinker: set it to 0")


class TinkerLearner(BatchLearner):
    """Updates the adapter. Advantages and token weights are sent as one number for each id: the losses ``ppo`` and
    ``cispo`` are proportional to it."""

    def __init__(self, training: Any, config: TrainConfig) -> None:
        super().__init__(config)
        self._training = training
        self._loss = loss_of(config.algorithm)
        self._settings = loss_settings(config)

    def _prepared(self, batch: TrainingBatch, metrics: StepMetrics) -> tuple[TrainingBatch, torch.Tensor]:
        if self._config.algorithm.old == "rollout" or not len(batch.row):
            return batch, batch.rollout_logp
        return batch, self._logprobs(batch, range(len(batch.sequences)))

    def _update(self, mini: MiniBatch, metrics: StepMetrics, *, lr: float, imitation: Imitated | None = None) -> float:
        tinker = sdk()

        about, batch = self._config.algorithm, mini.batch
        rows, at = self._rows_with_gradient(batch, mini.part), torch.empty(0, dtype=torch.int64)
        gains = mini.weights * batch.advantages * (1 if mini.importance is None else mini.importance)
        done, copied = None, list(imitation(self.updates)) if imitation is not None else []
        if rows:
            at = batch.places_of(rows)
            values = {"logprobs": mini.old, "advantages": gains}
            data = [_datum(batch.sequences[n], {name: of[batch.row == n] for name, of in values.items()}) for n in rows]
            done = self._training.forward_backward(data, about.loss, self._settings)
        if copied:
            weight = about.imitation / sum(sum(row.mask) for row in copied)
            given = [_datum(row, {"weights": torch.full((sum(row.mask),), weight)}) for row in copied]
            imitated = _result(self._training.forward_backward(given, "cross_entropy"))
            logp = _joined(imitated, copied)
            metrics.add("sft/loss", -logp.mean(), len(logp))
        if done is None and not copied:
            return 0.0
        optimizer = self._config.optimizer
        (beta1, beta2), clip = optimizer.betas, optimizer.grad_clip
        params = tinker.AdamParams(
            learning_rate=lr,
            beta1=beta1,
            beta2=beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=clip,
        )
        stepped = self._training.optim_step(params)
        if done is not None:
            self._measure(mini, at, _joined(_result(done), [batch.sequences[n] for n in rows]), metrics)
        said = _result(stepped).metrics or {}
        norm = next((float(value) for name, value in said.items() if name.endswith("grad_norm")), 0.0)
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is NaN or infinite: resume from the last checkpoint with a lower optimizer.lr"
            )
        return norm

    def _measure(self, mini: MiniBatch, at: torch.Tensor, logp: torch.Tensor, metrics: StepMetrics) -> None:
        """Add the metrics of the loss, computed here from the service's log-probs of the trained ids ``at``."""
        batch = mini.batch
        factors = None if mini.importance is None else mini.importance[at]
        loss, said = self._loss(logp, mini.old[at], batch.advantages[at], mini.weights[at], factors, batch.row[at])
        metrics.sum("actor/pg_loss", loss)
        if mini.unchanged and self._config.algorithm.old == "rollout":
            metrics.add("training/rollout_probs_diff", mean_difference(logp, batch.rollout_logp[at]), len(at))
        metrics.add("actor/entropy", -logp.mean(), len(at))
        metrics.add_logged(said, len(at))

    def _sample(self, batch: TrainingBatch, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of some sequences. The entropies are estimates: minus the log-prob of the sampled id."""
        drawn = self._drawn(batch, rng, self._config.compute.micro_tokens)
        if not drawn:
            return batch.row[:0], batch.rollout_logp[:0], batch.rollout_logp[:0]
        logp = self._logprobs(batch, drawn)
        return batch.places_of(drawn), logp, -logp

    def _logprobs(self, batch: TrainingBatch, rows: Sequence[int]) -> torch.Tensor:
        """(S',) the log-probs of the trained ids of some training sequences, sequence after sequence."""
        sequences = [batch.sequences[n] for n in rows]
        data = [_datum(sequence, {}) for sequence in sequences]
        return _joined(_result(self._training.forward(data, "cross_entropy")), sequences)


def _datum(sequence: MaskedSequence, values: dict[str, torch.Tensor]) -> Any:
    """The ``tinker.Datum`` of a training sequence; ``values`` are those of its trained ids, and 0 elsewhere."""
    tinker = sdk()

    targets, trained = torch.tensor(sequence.ids[1:]), torch.tensor(sequence.mask[1:]).bool()
    inputs = {"target_tokens": tinker.TensorData.from_torch(targets)}
    for name, of_ids in values.items():
        whole = torch.zeros(len(targets))
        whole[trained] = of_ids.float()
        inputs[name] = tinker.TensorData.from_torch(whole)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(sequence.ids[:-1])), loss_fn_inputs=inputs)


def _joined(answer: Any, sequences: Sequence[MaskedSequence]) -> torch.Tensor:
    """(S',) the log-probs of the trained ids of ``sequences`` in an output of the service."""
    return torch.cat(
        [
            output["logprobs"].to_torch()[torch.tensor(sequence.mask[1:]).bool()]
            for output, sequence in zip(answer.loss_fn_outputs, sequences, strict=True)
        ]
    )


def _result(future: Any) -> Any:
    """The result of a request of the SDK. Raises :class:`~clawgym.errors.TrainingError`."""
    with service_errors(TrainingError, _AGAIN):
        return future.result()


@dataclass(frozen=True)
class TinkerState:
    """The policy, its learner, the checkpoints and the progress of a run."""

    policy: TinkerPolicy
    learner: TinkerLearner
    checkpoints: Checkpoints
    progress: Progress

    @classmethod
    def load(cls, config: TrainConfig, run: Path, service: Any, model: str, folder: Path, lora: Any) -> TinkerState:
        """A new adapter of ``model``, or that of the newest checkpoint of ``run`` with its optimizer.

        Args:
            config: the configuration.
            run: the run folder.
            service: a ``tinker.ServiceClient``.
            model: the service's name of the model.
            folder: the folder with the model's tokenizer and chat template.
            lora: arguments of ``create_lora_training_client``.

        Raises:
            TrainingError: the service fails, or has no such model or checkpoint.
        """
        checkpoints = Checkpoints(run)
        last, progress, updates = checkpoints.last(), Progress(), 0
        if last is None:
            with service_errors(TrainingError, _AGAIN):
                training = service.create_lora_training_client(model, seed=config.seed, **lora).result()
        else:
            state = _paths(last)["state"]
            about = json.loads((last / "state.json").read_text("utf-8"))
            updates = about.pop("updates")
            progress = Progress(**about)
            with service_errors(TrainingError, _AGAIN):
                training = service.create_training_client_from_state_with_optimizer(state).result()
            checkpoints.name_best(progress)
        learner = TinkerLearner(training, config)
        learner.updates = updates
        return cls(TinkerPolicy(service, training, model, folder), learner, checkpoints, progress)

    def save(self) -> None:
        """Write a checkpoint on the service, and one here that names it."""
        state = _result(self.policy.training.save_state(f"{self.progress.step:06d}")).path

        def fill(part: Path) -> None:
            about = asdict(self.progress) | {"updates": self.learner.updates}
            (part / "state.json").write_text(json.dumps(about), "utf-8")
            (part / _PATHS).write_text(json.dumps({"state": state, "sampler": self.policy.sampler}), "utf-8")

        self.checkpoints.put(self.progress, 2**16, fill)


def _paths(checkpoint: Path) -> dict[str, str]:
    try:
        about = json.loads((checkpoint / _PATHS).read_text("utf-8"))
        return {name: str(about[name]) for name in ("state", "sampler")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{checkpoint}: cannot be resumed from ({error}): use the trainer it was written with, or another --out"
        ) from error
