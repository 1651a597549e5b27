"""The configuration of a training run: one YAML file, validated before anything starts.

Invariant: an unknown or invalid setting is an error that names it. Settings that are left out have the defaults below.
The run folder keeps the complete configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from clawgym.errors import ClawGymError, MissingDependency, TrainingError
from clawgym.registry import Registry, advantages, agents, judges, losses, sandboxes, trackers, trainers
from clawgym.trainers.traits import AdvantageTraits, traits_of

__all__ = ["TrainConfig", "checked_settings", "load_config", "override_settings", "read_settings", "recipes"]

_Config = TypeVar("_Config", bound=BaseModel)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _known(registry: Registry, name: str, options: Mapping[str, Any] = {}) -> None:
    """Raises ValueError for an unknown name and for invalid options."""
    if name not in registry and ":" not in name:
        raise ValueError(str(registry.unknown(name)))
    try:
        if options or ":" in name:
            registry.validated(name, registry.get(name), options, partial=True)
    except ClawGymError as error:
        raise ValueError(str(error)) from error


def _traits_of(advantage: str) -> AdvantageTraits:
    try:
        return traits_of(advantage)
    except ImportError as error:
        raise MissingDependency(f"training needs torch ({error}): pip install 'clawgym[train]'") from error


class Scratch(_Part):
    """A Qwen3 model with random weights and a tokenizer trained on the demonstrations. Nothing is downloaded."""

    hidden: PositiveInt = 192
    layers: PositiveInt = 4
    heads: PositiveInt = 6
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    context_window: PositiveInt = 1024


class Lora(_Part):
    """Low-rank adapters of linear layers (arXiv 2106.09685). The weights of the base model are frozen."""

    rank: PositiveInt = 16
    alpha: float = Field(default=32, gt=0)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Model(_Part):
    """The policy."""

    path: str | None = None
    """The folder of a model, the folder of a run (its best checkpoint is used), or a name on the Hugging Face Hub.
    Left out: ``scratch``."""
    scratch: Scratch = Scratch()
    context_window: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its reply; by default the model's own limit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    quantize: Literal["4bit"] | None = None
    """Quantize the weights of the base model with bitsandbytes; needs ``lora``."""

    @model_validator(mode="after")
    def _fits(self) -> Model:
        if self.quantize and self.lora is None:
            raise ValueError("quantize: quantized weights cannot be trained: set model.lora as well")
        return self


class Seeds(_Part):
    """A range of instances of each generator of a pack. Instance n of ``demonstrations`` and ``train`` has seed 2n;
    instance n of ``validation`` and ``heldout`` has seed 2n + 1. For other task sets: a range of its tasks."""

    first: int = Field(default=0, ge=0)
    count: PositiveInt = 1


class Tasks(_Part):
    """The tasks of each split. No two splits share an instruction or a reference solution."""

    set: str = "terminal-basic"
    """A pack with generators, or the name or path of any task set; the splits are then slices of it."""
    generators: tuple[str, ...] = ()
    """The generators of a pack to use; empty: all."""
    demonstrations: Seeds = Seeds(first=0, count=40)
    train: Seeds = Seeds(first=1000, count=500)
    validation: Seeds = Seeds(first=0, count=16)
    """Chooses the best checkpoint."""
    heldout: Seeds = Seeds(first=1000, count=64)
    """Only for evaluation, before and after training."""


class AgentPart(_Part):
    """The agent that runs an episode."""

    name: str = "tool-loop"
    """``tool-loop``, an agent of ``clawgym list agents`` that runs in the sandbox, or ``package.module:Class``."""
    options: dict[str, Any] = {}
    """Options of an agent other than ``tool-loop``: see ``clawgym list agents NAME``."""
    protocol: Literal["tools", "text"] = "tools"
    """``protocol``, ``system_prompt`` and ``max_malformed`` are for ``tool-loop`` only."""
    system_prompt: str | None = None
    max_steps: PositiveInt = 10
    max_tokens: PositiveInt = 512
    """Most tokens of one reply."""
    max_malformed: PositiveInt = 3
    """The episode ends after this many replies in a row without a valid tool call."""

    @model_validator(mode="after")
    def _fits(self) -> AgentPart:
        if self.name != "tool-loop" and (self.protocol, self.system_prompt) != ("tools", None):
            raise ValueError(f"protocol and system_prompt are for tool-loop only: leave them out for {self.name}")
        if self.name == "tool-loop" and self.options:
            raise ValueError("options are for other agents: for tool-loop set protocol, system_prompt and so on")
        _known(agents, self.name, self.options)
        return self


class Rollout(_Part):
    """How episodes are collected."""

    groups: PositiveInt = 8
    """Tasks per step."""
    group_size: int = Field(default=8, ge=2)
    """Episodes per task."""
    temperature: float = Field(default=1.0, gt=0)
    concurrency: PositiveInt = 64
    """Episodes that run at the same time."""
    replaced: int = Field(default=0, ge=0)
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): most zero-variance groups of a step that are replaced by
    groups of other tasks. 0: none. Such groups give no gradient; replacing them costs their episodes."""
    staleness: int = Field(default=0, ge=0)
    """How many versions older than the trained policy a sampled token may be. 0: rollouts and updates alternate."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds that a group waits for its slowest episode."""


class Reward(_Part):
    """The rewards of episodes and turns."""

    score: Literal["strict", "official"] = "strict"
    judge: str | None = None
    """The judge that gives process rewards: one of ``clawgym list judges``, or ``package.module:thing``, a class or
    function that makes a judge. Settings below that have the name of one of its options are passed to it. Left out:
    outcome rewards only."""
    judge_options: dict[str, Any] = {}
    """Further options of the judge, such as ``path`` of ``prm``."""
    milestones: Literal["turn", "return-to-go"] | None = None
    """Process rewards from the task's own verifier instead of a judge: the change of the mean score of its plain
    checks. ``turn``: the change by the turn itself; ``return-to-go``: by this and all later turns. The verifier runs
    after each turn, in a grading sandbox, while the model writes its next reply (:mod:`clawgym.rewards.milestones`)."""
    potential: bool = False
    """With ``milestones``: count the progress at the end as 0, so that the optimal policy stays the same."""
    votes: PositiveInt = 3
    count_zeros: bool = True
    """Whether a vote of 0 is part of the mean. False: it is left out, as in the reference implementation of arXiv
    2603.10165."""
    max_tokens: PositiveInt = 1024
    """Most tokens of one answer of the judges ``model`` and ``policy``. A truncated answer gives no vote; a model that
    reasons first needs more."""
    pictures: bool = False
    """Show screenshots to these judges; for a vision model."""
    verdict: bool = False
    """Show the judge the verifier's result at the last turn."""
    coefficient: float = Field(default=1.0, ge=0)
    """Coefficient of the process reward."""
    combine: Literal["decoupled", "sum"] = "decoupled"
    """``decoupled``: outcome and process rewards are normalised separately, added, and normalised over the batch (GDPO,
    arXiv 2601.05242). ``sum``: R_t = O + r_t is normalised by group and step (arXiv 2603.10165)."""
    clip: float | None = Field(default=3.0, gt=0)
    """Bound of the normalised process reward with ``decoupled``, in standard deviations; null for no bound."""
    calibrate: bool = True
    """Lower the weight of the process reward while judge and outcomes disagree
    (:mod:`clawgym.rewards.calibration`)."""
    by_step: bool = False
    """Compare the process reward of a step with the same step of the other episodes of the group."""
    model: str | None = None
    base_url: str | None = None
    """``model`` and ``base_url``: the model and endpoint of the judge ``model``."""
    shuffle: bool | Literal["process"] = False
    """A control experiment: shuffle the outcomes of a step among its episodes, and process rewards among turns.
    ``process``: the latter only."""
    malformed: float = Field(default=0.0, ge=0)
    """Penalty of an episode in which no tool call can be parsed; in proportion to the share of malformed turns. The
    outcome is in [-1, 1]."""
    length: float = Field(default=0.0, ge=0)
    """Penalty of an episode with ``longest`` or more sampled tokens. It rises linearly over the last ``slack`` tokens
    before that (:func:`clawgym.rewards.penalties.overlong`)."""
    longest: PositiveInt | None = None
    slack: PositiveInt | None = None

    @model_validator(mode="after")
    def _fits(self) -> Reward:
        if self.length and not (self.longest and self.slack and self.slack <= self.longest):
            raise ValueError("length: set reward.longest, and reward.slack to at most that, in tokens")
        if self.milestones and self.judge:
            raise ValueError("milestones and judge both give process rewards: set one of them")
        if self.judge is not None:
            _known(judges, self.judge, self.judge_options)
        if self.judge == "prm" and "path" not in self.judge_options:
            raise ValueError("judge is 'prm': set reward.judge_options.path to a folder that `clawgym train prm` wrote")
        if self.judge == "model" and not self.model:
            raise ValueError("judge is 'model': set reward.model, and reward.base_url")
        return self


class Distillation(_Part):
    """Hindsight distillation (on-policy distillation, OPD): the teacher is the policy itself, with a hint of the judge
    in its context. Off if ``hints`` is 0."""

    hints: int = Field(default=0, ge=0)
    """How many hints to ask the judge for, for each turn."""
    loss: Literal["advantage", "topk"] = "advantage"
    """``advantage``: log pi_T - log pi_old of each sampled token is added to its advantage. ``topk``: the reverse KL
    from the policy to the teacher over the teacher's ``top_k`` most likely ids and one bin for all others is added to
    the loss (SDFT, arXiv 2601.19897; SDPO, arXiv 2601.20802); with ``trainer: local`` only."""
    choose: Literal["sequence", "token", "shortest"] = "sequence"
    """How to choose among several hints: by the overlap of the ``top_k`` ids of student and teacher over a whole turn,
    by the same overlap for each token, or the shortest hint."""
    top_k: PositiveInt = 4
    """How many ids of the teacher are kept for each token."""
    clip: float = Field(default=1.0, gt=0)
    """Bound of log pi_T - log pi_old, in nats, with ``loss: advantage``."""
    w_rl: float = Field(default=1.0, ge=0)
    """Weight of the advantages from rewards."""
    w_opd: float = Field(default=1.0, ge=0)
    """Weight of the distillation term."""

    @property
    def teaches_topk(self) -> bool:
        """Whether the loss has a term over the teacher's most likely ids."""
        return self.hints > 0 and self.loss == "topk"


class Critic(_Part):
    """The critic of an advantage that uses values, such as ``gae``: a linear value head on the policy's hidden states
    (:mod:`clawgym.trainers.local.critic`). It is trained on the turns of each batch; the policy does not get its
    gradient. With ``trainer: local`` only."""

    lr: float = Field(default=1e-2, gt=0)
    """Learning rate of the value head."""
    updates: PositiveInt = 10
    """Updates of the value head for each batch. They cost almost nothing: the hidden states are computed once."""
    clip: float | None = Field(default=0.2, gt=0)
    """A turn has no gradient in a batch once its value has moved by more than this towards its return (PPO's value
    clipping); null for no bound."""


class Algorithm(_Part):
    """See :mod:`clawgym.trainers.algorithms`."""

    @model_validator(mode="after")
    def _fits(self) -> Algorithm:
        _known(advantages, self.advantage, self.advantage_options)
        _known(losses, self.loss, self.loss_options)
        if self.length is not None and self.aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                f"length is for aggregation seq-mean-token-sum-norm, not {self.aggregation}: leave out algorithm.length"
            )
        if self.old == "rollout" and self.importance != "token":
            raise ValueError(
                f"importance {self.importance} has no effect with old: rollout, where the ratio itself is to the "
                "rollout: set algorithm.old to recompute, or leave out algorithm.importance"
            )
        return self

    advantage: str = "grpo"
    """One of ``clawgym list advantages``, or ``package.module:function``
    (:class:`clawgym.trainers.protocols.Advantage`). ``binary``: the advantage of a turn is the majority of the judge's
    votes, without outcome, group or baseline (binary RL of arXiv 2603.10165); 0 for a turn without a vote. ``gae`` has
    a critic instead of the group's baseline (PPO, arXiv 1707.06347; see ``critic``). With ``trainer: verl`` also
    ``verl:NAME``, an advantage of verl (``verl:grpo_passk``)."""
    advantage_options: dict[str, Any] = {}
    """Options of the advantage: see ``clawgym list advantages NAME``."""
    loss: str = "ppo"
    """One of ``clawgym list losses``, or ``package.module:function`` (:class:`clawgym.trainers.protocols.Loss`). With
    ``trainer: verl`` also ``verl:NAME``, a loss of verl (``verl:gpg``)."""
    loss_options: dict[str, Any] = {}
    """Further options of the loss. ``clip_low``, ``clip_high`` and ``dual_clip`` below are passed if it has options of
    these names."""
    aggregation: Literal["token", "episode", "sequence", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "episode"
    """How the losses of tokens are added: the mean over tokens (``token``), over episodes or over training sequences of
    the mean over their tokens (``episode``, ``sequence``), or over training sequences of the sum over their tokens
    (``seq-mean-token-sum``; with ``-norm`` divided by ``length``, as in Dr. GRPO, arXiv 2503.20783)."""
    length: PositiveInt | None = None
    """The constant length of ``seq-mean-token-sum-norm``, in tokens: verl's ``loss_scale_factor``, and in Dr. GRPO the
    most tokens of a response. Left out: ``agent.max_tokens * agent.max_steps``, the most that an episode of the tool
    loop can sample."""
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    importance: Literal["token", "sequence", "masked-token", "masked-sequence"] = "token"
    """The importance weights between the trainer's log-probs and those of the rollout, with ``old: recompute``. The
    weight is a ratio of probabilities: of each token, or of a whole training sequence (``sequence``: less bias, more
    variance). A ratio above ``importance_cap`` becomes ``importance_cap`` (truncated importance sampling), or 0 with
    ``masked-`` (masked importance sampling): then these tokens, or sequences, are not trained on."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Bound of the importance weights."""
    old: Literal["rollout", "recompute"] = "recompute"
    """The log-probs of the old policy in the ratio. ``rollout`` uses those of the engine and saves a forward pass; use
    it if engine and trainer compute the same values."""
    imitation: float = Field(default=0.0, ge=0)
    """Weight of an imitation loss that is added to each update: the mean cross-entropy of ``sft.batch`` sequences. They
    are drawn uniformly from the demonstrations (PPO-ptx, arXiv 2203.02155, equation 2) and from the last solved episode
    of each training task (``self_imitation``)."""
    self_imitation: bool = True
    """Whether ``imitation`` includes solved episodes (self-imitation, arXiv 1806.05635). With False, and the advantage
    ``zero``, rewards have no effect on training: a control."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL to the initial policy."""
    kl_estimator: Literal["k2", "k3"] = "k2"
    """The estimate of the KL in the loss. The gradient of ``k2`` is that of the KL in expectation. That of ``k3``
    (verl, TRL) is not. The metric ``actor/ref_kl`` is k3 in both cases."""
    entropy: float = Field(default=0.0, ge=0)
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1


class Optimizer(_Part):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment. A larger one damps updates of weights with tiny gradients."""
    weight_decay: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly."""
    decay: bool = False
    """Lower the learning rate linearly to a tenth over the budget."""
    grad_clip: float = Field(default=1.0, gt=0)


class Compute(_Part):
    """Memory, device and threads."""

    micro_tokens: PositiveInt = 8192
    """Tokens of a micro-batch."""
    row_tokens: PositiveInt = 2048
    """Length of a packed row. Training sequences with a common prefix share rows."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads of torch in this process."""
    device: str | None = None
    kernels: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of the linear layers of a float32 model on a CPU while the engine in this process samples, and with
    ``bfloat16`` also in updates. Lower is faster; the stored log-probs are those of the sampling policy. While
    sampling, layers with an adapter stay in float32."""
    vllm: str | None = None
    """Address of a vLLM server that samples for the trainer (``http://127.0.0.1:8000/v1``). Left out: an engine in this
    process."""
    sglang: str | None = None
    """The same for an SGLang server (``http://127.0.0.1:30000``); without ``model.lora``."""
    sleep: bool = False
    """Let that server free its GPU memory during updates: for a trainer and a server on one GPU."""
    checkpointing: bool = False
    """Gradient checkpointing: recompute activations instead of keeping them."""


class Sft(_Part):
    """Supervised training, on demonstrations or on exported trajectories."""

    data: str | None = None
    """A file that ``clawgym pool export`` wrote (messages or parquet). Left out: make demonstrations."""
    steps: PositiveInt = 300
    until: float | None = Field(default=None, gt=0, le=1)
    """Stop early at this score on the validation split. RL needs a policy that still explores."""
    until_partial: float | None = Field(default=None, gt=0, le=1)
    """Stop early once this share of the checks passes on the validation split, in the mean over its episodes. For tasks
    of many steps, whose score stays near 0 for long."""
    batch: PositiveInt = 32
    """Training sequences per step."""
    lr: float = Field(default=1e-3, gt=0)
    warmup: int = Field(default=30, ge=0)
    decay: bool = True
    """Lower the learning rate linearly to a tenth over the steps."""
    evaluate_every: PositiveInt = 50
    """Steps between evaluations."""
    shuffle_words: bool = False
    """Augmentation: replace the pack's words in each sequence by other words, consistently. It teaches copying."""


class PrmPart(_Part):
    """A process reward model (``clawgym train prm``), trained on the milestones of episodes: its target is 1 for a turn
    after which more of the verifier's checks pass, 0 if fewer do, and 1/2 if nothing changed."""

    kind: Literal["states", "words", "yes-no"] = "states"
    """``states``: a head on the hidden states of a frozen model, at the last token of a turn. ``words``: a head on
    hashed words. ``yes-no``: the model itself, trained with the settings of ``sft`` (and ``model.lora``) to answer yes
    or no."""
    model: str | None = None
    """The model that reads turns, named as ``model.path``. Left out: the policy, ``model``."""
    layer: int | None = Field(default=None, ge=1)
    """Use the first layers of the model only: fewer are faster. Left out: all."""
    hidden: int = Field(default=0, ge=0)
    """Hidden units of the head. 0: logistic regression."""
    l2: float = Field(default=1e-4, gt=0)
    """Weight of half the squared norm of the head's weights in the loss."""
    context: int = Field(default=1024, ge=16)
    """Most tokens of a turn with its history; of a longer one, the start and the end are read."""
    data: tuple[str, ...] = ()
    """Pools of runs with ``reward.milestones``. Left out: the policy runs ``groups`` groups of episodes first."""
    others: tuple[str, ...] = ()
    """Pools of other policies, for evaluation. Tasks that are in ``data`` too are left out."""
    groups: PositiveInt = 64
    heldout: tuple[str, ...] = ()
    """Families of tasks (``metadata["category"]``) for evaluation only. Left out: each family is scored by a head
    of all others, and the final head is trained on all."""
    shuffle: bool = False
    """A control experiment for ``yes-no``: shuffle the targets. The other kinds always do this for comparison."""

    @model_validator(mode="after")
    def _fits(self) -> PrmPart:
        if self.kind == "yes-no" and (not self.heldout or self.layer is not None):
            raise ValueError("kind: yes-no needs families for evaluation, and has no layer: set prm.heldout only")
        return self


class Evaluation(_Part):
    """Evaluation on tasks that are not trained on."""

    every: PositiveInt = 10
    """Steps between evaluations."""
    samples: PositiveInt = 1
    """Episodes per task."""
    greedy: bool = False
    """Greedy decoding; otherwise sampling at temperature 1."""
    before: bool = True
    """Evaluate the held-out split before the first step too. Without it only the best checkpoint is, at the end: for
    experiments with many runs from one base, whose score is known."""
    canary: int = Field(default=8, ge=0)
    """Validation tasks on which attacks and trivial policies are scored."""


class Budget(_Part):
    """When to stop; whichever comes first."""

    steps: PositiveInt = 100
    minutes: float | None = Field(default=None, gt=0)
    """Minutes of rollouts and updates, without evaluation."""


class Guards(_Part):
    """Limits; the run stops with an error if a step exceeds one."""

    max_kl: float = Field(default=1.0, gt=0)
    """Most KL between the policies before and after a step, in nats per token."""
    min_entropy: float = Field(default=1e-4, ge=0)
    """Least entropy of the policy after a step, in nats per token."""


class Verl(_Part):
    """Settings of the trainer ``verl`` only (docs/how-to/verl.md)."""

    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """``sync``: rollouts and updates alternate. The other modes collect rollouts during updates, up to
    ``rollout.staleness`` versions behind; ``separate_async`` uses separate GPUs for rollouts."""
    engine: Literal["vllm", "sglang", "transformers"] = "vllm"
    """The engine; ``transformers`` is ClawGym's own, for CPUs."""
    nodes: PositiveInt = 1
    ranks: PositiveInt = 1
    """Ranks per node: GPUs, or processes on a CPU."""
    rollout_nodes: PositiveInt = 1
    """``rollout_nodes`` and ``rollout_ranks``: the nodes, and ranks per node, of the engine in ``separate_async``."""
    rollout_ranks: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    """Tensor parallel size of the engine."""
    memory: float = Field(default=0.5, gt=0, le=1)
    """Share of GPU memory for the engine."""
    offload: bool = False
    """Offload weights and optimizer states to CPU memory while the engine samples."""


class TrainConfig(_Part):
    """One training run."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.distillation.hints and self.reward.judge in (None, "rule", "prm"):
            raise ValueError("distillation.hints: the judges rule and prm give no hints: set reward.judge to another")
        served = [name for name in ("vllm", "sglang") if getattr(self.compute, name)]
        if served and self.trainer not in ("local", "verl"):
            raise ValueError(f"compute.{served[0]}: is for trainer: local: leave it out")
        if len(served) > 1:
            raise ValueError("compute.vllm, compute.sglang: one server samples: leave one of them out")
        if self.compute.kernels != "float32" and (served or self.model.dtype != "float32" or self.trainer != "local"):
            raise ValueError(
                "compute.kernels: are for the engine in this process and model.dtype float32: leave them out"
            )
        if self.compute.sglang and self.model.lora:
            raise ValueError("compute.sglang: gets all weights, no adapters: leave out model.lora, or set compute.vllm")
        if self.compute.sleep and not served:
            raise ValueError("compute.sleep: is for a server: set compute.vllm or compute.sglang, or leave it out")
        if self.reward.milestones and self.agent.name != "tool-loop":
            raise ValueError(
                f"reward.milestones: agent {self.agent.name} runs its tools itself, so the progress after its turns "
                "cannot be measured: set agent.name to tool-loop, or leave reward.milestones out"
            )
        if self.rollout.replaced and self.trainer == "verl":
            raise ValueError("rollout.replaced: trainer verl replaces no groups: set it to 0, or use trainer: local")
        if self.reward.combine == "sum" and self.algorithm.advantage not in ("grpo", "dr-grpo"):
            raise ValueError(
                f"reward.combine: sum has a baseline of its own, not {self.algorithm.advantage}: set "
                "algorithm.advantage to grpo or dr-grpo, or reward.combine to decoupled"
            )
        for part in ("advantage", "loss"):
            name = getattr(self.algorithm, part)
            if name.startswith("verl:") and self.trainer != "verl":
                raise ValueError(
                    f"algorithm.{part}: {name} is verl's own: set trainer to verl, or choose one of `clawgym list "
                    f"{'losses' if part == 'loss' else 'advantages'}`"
                )
        penalties, advantage = bool(self.reward.malformed or self.reward.length), self.algorithm.advantage
        summed = self.reward.milestones == "return-to-go"
        # The default advantage uses the outcome and no values. Others are imported, and with them torch.
        asked = penalties or self.reward.judge is None or summed or self.reward.by_step
        if asked and advantage != Algorithm.model_fields["advantage"].default:
            traits = _traits_of(advantage)
            if penalties and not traits.uses_outcome:
                raise ValueError(
                    f"reward.malformed, reward.length: advantage {advantage} has no outcome: set them to 0"
                )
            if self.reward.judge is None and not traits.uses_outcome:
                raise ValueError(f"algorithm.advantage: {advantage} trains on a judge's votes only: set reward.judge")
            if summed and traits.uses_values:
                raise ValueError(
                    f"reward.milestones: advantage {advantage} sums the rewards of later turns itself: set it to turn"
                )
            if self.reward.by_step and traits.uses_values:
                raise ValueError(f"reward.by_step: advantage {advantage} compares no steps: leave it out")
        if self.backend != "auto" and not self.backend.startswith("ray:"):
            _known(sandboxes, self.backend)
        _known(trainers, self.trainer, self.trainer_options)
        for name, options in self.tracking.items():
            _known(trackers, name, options or {})
        return self

    @property
    def loss_length(self) -> int | None:
        """The constant length of the aggregation ``seq-mean-token-sum-norm``, in tokens; None for other modes."""
        if self.algorithm.aggregation != "seq-mean-token-sum-norm":
            return None
        return self.algorithm.length or self.agent.max_tokens * self.agent.max_steps

    name: str = "train"
    seed: int = 0
    trainer: str = "local"
    """One of ``clawgym list trainers``, or ``package.module:function``
    (:class:`clawgym.trainers.protocols.Trainer`)."""
    trainer_options: dict[str, Any] = {}
    """Options of a trainer other than ``local`` and ``verl``."""
    backend: str = "auto"
    model: Model = Model()
    tasks: Tasks = Tasks()
    agent: AgentPart = AgentPart()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    distillation: Distillation = Distillation()
    optimizer: Optimizer = Optimizer()
    compute: Compute = Compute()
    verl: Verl = Verl()
    sft: Sft = Sft()
    prm: PrmPart = PrmPart()
    evaluation: Evaluation = Evaluation()
    budget: Budget = Budget()
    guards: Guards = Guards()
    tracking: dict[str, dict[str, Any] | None] = {}
    """Trackers that get the metrics, besides ``metrics.jsonl``: name (``clawgym list trackers``) -> options."""
    checkpoint_every: PositiveInt = 1
    """Steps of ``rl`` between checkpoints. ``sft`` writes one at each evaluation, and both when they are stopped. The
    last and the best checkpoint are kept."""


def recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the package."""
    folder = files("clawgym.trainers") / "recipes"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load the configuration file, or the recipe, ``source``. Each of ``overrides`` is ``part.key=value`` (YAML).

    Raises:
        TrainingError: for a file that cannot be read and for an invalid setting; the message names both.
        MissingDependency: without the extra ``train``.
    """
    data = read_settings(source, {name: files("clawgym.trainers") / "recipes" / f"{name}.yaml" for name in recipes()})
    override_settings(data, overrides)
    if _of_0_1(data):
        try:
            return TrainConfig.model_validate(data)
        except ValidationError as error:
            raise TrainingError(
                f"{source}: written by version 0.1, whose runs cannot be resumed: start another run with model.path "
                "set to its checkpoint (checkpoints/NUMBER/model), or resume it with clawgym 0.1. agent.prompt is now "
                "agent.options.prompt, and tracking names trackers (docs/how-to/training.md)"
            ) from error
    return checked_settings(TrainConfig, data, str(source), "docs/how-to/training.md")


def read_settings(source: str | Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read a YAML mapping from the file ``source``, or from the resource in ``known`` with this name.

    Raises as :func:`load_config` does.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency(f"configurations are YAML ({error}): pip install 'clawgym[train]'") from error

    path = Path(source).expanduser()
    if str(source) in known:
        text = known[str(source)].read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(
                f"{source}: neither a recipe ({', '.join(known)}) nor a readable file ({error}): name one of them"
            ) from error
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise TrainingError(f"{source}: invalid YAML ({error}): correct it") from error
    if not isinstance(data, dict):
        raise TrainingError(f"{source}: is a {type(data).__name__}, not a mapping: write `key: value` lines")
    return data


def checked_settings(kind: type[_Config], data: Mapping[str, Any], source: str, docs: str) -> _Config:
    """Make a configuration of ``kind``. Raises :class:`~clawgym.errors.TrainingError`, which names ``source``, the
    settings that are invalid, and ``docs``."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        wrong = "; ".join(": ".join(filter(None, (".".join(map(str, e["loc"])), e["msg"]))) for e in error.errors()[:5])
        raise TrainingError(f"{source}: {wrong}: correct these settings ({docs})") from error


def _of_0_1(data: Mapping[str, Any]) -> bool:
    agent, tracking = data.get("agent"), data.get("tracking")
    return (isinstance(agent, Mapping) and "prompt" in agent) or (
        isinstance(tracking, Mapping) and isinstance(tracking.get("wandb"), str | bool)
    )


def override_settings(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put each of ``overrides``, ``part.key=value`` (YAML), into ``data``. Raises
    :class:`~clawgym.errors.TrainingError` for one that cannot be read."""
    import yaml

    for override in overrides:
        _put(data, override, yaml)


def _put(data: dict[str, Any], override: str, yaml: Any) -> None:
    name, found, text = override.partition("=")
    keys = name.strip().split(".")
    if not found or not all(keys):
        raise TrainingError(f"--set {override}: write key=value, with dots between nested keys (optimizer.lr=1e-5)")
    at = data
    for key in keys[:-1]:
        if at.get(key) is None:
            at[key] = {}
        at = at[key]
        if not isinstance(at, dict):
            raise TrainingError(f"--set {override}: {key!r} has no nested keys: leave out what follows it")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TrainingError(f"--set {override}: the value is not valid YAML ({error}): quote it") from error
    # YAML 1.1 reads 1e-5 as text.
    try:
        value = float(value) if isinstance(value, str) else value
    except ValueError:
        pass
    at[keys[-1]] = value
