"""A learner whose model is on several ranks, which verl runs as Ray actors; for a service that trains on its use.

Invariants: mini-batches, advantages, token weights and learning rates are those of the local learner
(:class:`~clawgym.trainers.common.step.BatchLearner`); so are checkpoints, so either trainer resumes from those of the
other. Nothing but this process writes files. Ranks end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from clawgym.engines.folders import load_config
from clawgym.engines.lora import write_adapter
from clawgym.errors import InfraError
from clawgym.rewards.scoring import Scored, ScoreRequest, score_batches
from clawgym.trainers.common.batch import TrainingBatch
from clawgym.trainers.common.step import BatchLearner, Imitated, MiniBatch, StepMetrics, not_finite
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.verl.cluster import cause_of, cluster, require
from clawgym.trainers.verl.queue_entries import sequence_fields
from clawgym.trainers.verl.settings import check_learner, verl_settings, window_of

__all__ = ["RankedLearner", "RankedPolicy", "open_ranks"]


@contextlib.contextmanager
def open_ranks(config: TrainConfig, model: Path) -> Iterator[RankedPolicy]:
    """Start Ray, unless ``RAY_ADDRESS`` names a cluster, and one rank on each of its ``verl.nodes * verl.ranks`` GPUs,
    with the model in the folder ``model`` and a new adapter. At the end all of it is stopped.

    Raises:
        TrainingError: Ray does not start, or a setting is not supported.
        MissingDependency: the extra ``verl`` is not installed.
        InfraError: a rank does not start.
    """
    check_learner(config, model)
    require(config)
    with cluster(config):
        policy = RankedPolicy(_start(config, model), config, model)
        try:
            yield policy
        finally:
            policy.closed = True


def _start(config: TrainConfig, model: Path) -> Any:
    """The group of workers."""
    import ray
    from omegaconf import OmegaConf
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import ActorConfig, HFModelConfig, TrainingWorkerConfig

    from clawgym.trainers.verl.worker import AdapterWorker

    settings = verl_settings(config, model, window=window_of(config, model), run=Path("service"), resume=None)
    OmegaConf.resolve(settings)
    about: HFModelConfig = omega_conf_to_dataclass(settings.actor_rollout_ref.model)  # type: ignore[assignment]
    actor: ActorConfig = omega_conf_to_dataclass(settings.actor_rollout_ref.actor)  # type: ignore[assignment]
    made = TrainingWorkerConfig(
        model_type="language_model",
        model_config=about,
        engine_config=actor.engine,  # type: ignore[attr-defined]
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    pool = RayResourcePool([config.verl.ranks] * config.verl.nodes, max_colocate_count=1)
    worker = RayClassWithInitArgs(ray.remote(AdapterWorker), config=made, actor=actor, seed=config.seed)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, device_name=settings.trainer.device)


class RankedPolicy:
    """A model with a LoRA adapter on several ranks. Batches and weights are on the CPU of this process."""

    lora = True
    device = torch.device("cpu")

    def __init__(self, group: Any, config: TrainConfig, folder: Path) -> None:
        self.folder = folder
        """The folder that the model was loaded from, with its tokenizer and chat template."""
        self.ranks = config.verl.nodes * config.verl.ranks
        self.closed = False
        """Whether the ranks are being ended. Calls are refused then, as Ray would start a new cluster for them."""
        self._group = group
        self._micro_tokens = config.compute.micro_tokens
        weights, self._about = self.call("adapter")[0]
        self._shapes = {name: weight.shape for name, weight in weights.items()}

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of all ranks. Raises :class:`~clawgym.errors.InfraError` if one fails."""
        from ray.exceptions import RayError

        if self.closed:
            raise InfraError("the ranks of the training have ended: start the training again")
        try:
            return getattr(self._group, method)(*args)
        except RayError as error:
            raise InfraError(
                f"a rank of the training failed or died ({cause_of(error)}): start the training again to resume from "
                "the last checkpoint; clawgym serve does so by itself"
            ) from error

    def trained(self) -> dict[str, torch.Tensor]:
        """The weights of the adapter, under their names in a checkpoint."""
        return self.call("adapter")[0][0]

    def load(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Replace the adapter; None: by one that changes nothing. Raises :class:`ValueError` for one of another
        shape."""
        if weights is not None and {name: weight.shape for name, weight in weights.items()} != self._shapes:
            raise ValueError("the adapter has other weights")
        self.call("load_adapter", weights)

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write the adapter in peft's format."""
        write_adapter(folder, weights, self._about)

    def scorer(self, *, tokens: int) -> RankedScorer:
        """A scorer with these weights, for at most ``tokens`` ids at a time on each rank."""
        return RankedScorer(self, tokens)

    def logprobs(
        self, batch: TrainingBatch, rows: Sequence[int], *, adapter: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(S',) log-probs and entropies of the trained ids of some training sequences, sequence after sequence. Without
        ``adapter`` those of the initial policy."""
        order, data = self.arranged([sequence_fields(batch.sequences[n].ids, batch.sequences[n].mask) for n in rows])
        self._assign(data, batch, calculate_entropy=True, compute_loss=False, no_lora_adapter=not adapter)
        output = self.call("logprobs", data)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for place, logp, entropy in zip(order, output["log_probs"].unbind(), output["entropy"].unbind(), strict=True):
            if place < len(rows):
                before = torch.tensor(batch.sequences[rows[place]].mask).nonzero()[:, 0] - 1
                found[place] = logp[before].float(), entropy[before].float()
        logps, entropies = zip(*(found[place] for place in range(len(rows))), strict=True)
        return torch.cat(logps), torch.cat(entropies)

    def update(
        self, batch: TrainingBatch, rows: Sequence[int], values: Mapping[str, torch.Tensor], *, lr: float
    ) -> dict[str, float]:
        """One step of the optimizer on some training sequences. ``values``: (S,) numbers of all trained ids of the
        batch, by their names in verl. Returns verl's metrics."""
        from verl.utils.metric import reduce_metrics

        from clawgym.trainers.verl.worker import RATE

        entries = []
        for n in rows:
            fields, own = sequence_fields(batch.sequences[n].ids, batch.sequences[n].mask), batch.row == n
            trained = fields["response_mask"].bool()
            for name, of_ids in values.items():
                fields[name] = torch.zeros(trained.shape)
                fields[name][trained] = of_ids[own].float()
            entries.append(fields)
        _, data = self.arranged(entries)
        about = {"calculate_entropy": True, "distillation_use_topk": False, "distillation_only": False}
        shape = {"global_batch_size": len(data), "mini_batch_size": len(data), "epochs": 1}
        shuffled = {"seed": 0, "dataloader_kwargs": {"shuffle": False}}
        self._assign(data, batch, **{RATE: lr}, **about, **shape, **shuffled)
        return reduce_metrics(self.call("update", data)["metrics"])

    def arranged(self, entries: list[dict[str, torch.Tensor]]) -> tuple[list[int], Any]:
        """The entries as a batch of verl, with as many entries and about as many ids for each rank; and the index in
        ``entries`` of each, which is too large for an entry that was added and is not trained on."""
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
        from verl.utils.tensordict_utils import get_tensordict

        nothing = {
            **{name: torch.zeros(1, dtype=value.dtype) for name, value in entries[0].items()},
            "input_ids": entries[0]["input_ids"][:2],
            "position_ids": torch.arange(2),
        }
        entries = [*entries, *[nothing] * (-len(entries) % self.ranks)]
        lengths = [len(fields["input_ids"]) for fields in entries]
        parts: Any = get_seqlen_balanced_partitions(lengths, self.ranks, equal_size=True)
        order = [place for part in parts for place in part]
        columns = {name: [entries[place][name] for place in order] for name in nothing}
        # Entries of equal length would become a plain tensor otherwise, which verl takes for a padded one.
        nested: dict[str, Any] = {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()
        }
        return order, get_tensordict(nested)

    def _assign(self, data: Any, batch: TrainingBatch, **about: Any) -> None:
        from verl.utils.tensordict_utils import assign_non_tensor

        longest = int(data["input_ids"].offsets().diff().max())
        # A micro-batch must hold the longest sequence.
        room = max(self._micro_tokens, longest)
        assign_non_tensor(data, temperature=batch.temperature, max_token_len_per_gpu=room, **about)


class RankedScorer:
    """Scores ids with the policy of the ranks (:class:`~clawgym.rewards.scoring.Scorer`)."""

    def __init__(self, policy: RankedPolicy, tokens: int) -> None:
        self._policy = policy
        self._tokens = tokens
        about = load_config(policy.folder).get_text_config()
        self._window, self._vocab = about.max_position_embeddings, about.vocab_size

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """See :class:`~clawgym.rewards.scoring.Scorer`. NaN for a request with more ids than the model's maximum
        length."""
        found = [Scored.nothing(request) for request in requests]
        batches = [*score_batches(requests, tokens=self._tokens, window=self._window, vocab=self._vocab)]
        if not batches:
            return found
        ranks = self._policy.ranks
        padded = batches + [batches[-1]] * (-len(batches) % ranks)  # every rank has as many forward passes
        shares = [[[requests[n] for n in batch] for batch in padded[rank::ranks]] for rank in range(ranks)]
        scored = await asyncio.to_thread(self._policy.call, "score", shares)
        for place, batch in enumerate(batches):
            for n, one in zip(batch, scored[place % ranks][place // ranks], strict=True):
                found[n] = one
        return found


class RankedLearner(BatchLearner):
    """Trains the policy of the ranks, with a new optimizer."""

    critic = None

    def __init__(self, policy: RankedPolicy, config: TrainConfig) -> None:
        super().__init__(config)
        self.policy = policy
        self.restore_optimizer({})

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        return self.policy.call("optimizer_state")[0]

    def restore_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore :meth:`optimizer_state`."""
        self.policy.call("restore_optimizer", dict(state))

    def _prepared(self, batch: TrainingBatch, metrics: StepMetrics) -> tuple[TrainingBatch, torch.Tensor]:
        if self._config.algorithm.old == "rollout" or not len(batch.row):
            return batch, batch.rollout_logp
        return batch, self.policy.logprobs(batch, sorted(set(batch.row.tolist())))[0]

    def _update(self, mini: MiniBatch, metrics: StepMetrics, *, lr: float, imitation: Imitated | None = None) -> float:
        assert imitation is None, "a service imitates nothing"
        about, batch = self._config.algorithm, mini.batch
        rows = self._rows_with_gradient(batch, mini.part)
        if not rows:
            return 0.0
        values = {
            "old_log_probs": mini.old,
            "advantages": batch.advantages,
            "votes": mini.weights,
            "rollout_is_weights": torch.ones_like(mini.old) if mini.importance is None else mini.importance,
        }
        if about.kl:
            values["ref_log_prob"] = torch.zeros_like(mini.old)
            values["ref_log_prob"][batch.places_of(rows)] = self.policy.logprobs(batch, rows, adapter=False)[0]
        said = self.policy.update(batch, rows, values, lr=lr)
        norm, count = float(said["grad_norm"]), len(batch.places_of(rows))
        if not norm < float("inf"):  # verl has not applied it
            raise not_finite()
        metrics.sum("actor/pg_loss", torch.tensor(said.pop("actor/pg_loss")))
        for name, value in said.items():
            if name == "actor/ratio_max":
                metrics.most(name, torch.tensor(value))
            elif name.startswith("actor/"):
                metrics.add(name, torch.tensor(value), count)
        return norm

    def _sample(self, batch: TrainingBatch, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of one micro-batch of randomly drawn sequences on each rank."""
        drawn = self._drawn(batch, rng, self._config.compute.micro_tokens * self.policy.ranks)
        if not drawn:
            return batch.row[:0], batch.rollout_logp[:0], batch.rollout_logp[:0]
        return batch.places_of(drawn), *self.policy.logprobs(batch, drawn)
