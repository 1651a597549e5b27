"""What a training run is told: one YAML file, checked as a whole before anything starts.

Invariant: a setting that is not known, or out of range, is refused by its name; what is left out has the value that
stands here, and is written into the run folder with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from clawgym.errors import ClawGymError, MissingDependency, TrainingError
from clawgym.registry import Registry, advantages, agents, judges, losses, sandboxes, trackers, trainers

__all__ = ["TrainConfig", "load_config", "recipes"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _known(registry: Registry, name: str, options: Mapping[str, Any] = {}) -> None:
    """Raises ValueError for a name that is not known, and for options that do not fit."""
    if name not in registry and ":" not in name:
        raise ValueError(str(registry.unknown(name)))
    try:
        if options or ":" in name:
            registry.validated(name, registry.get(name), options, partial=True)
    except ClawGymError as error:
        raise ValueError(str(error)) from error


class Scratch(_Part):
    """A Qwen3 model of random weights, with a tokenizer trained on the demonstrations: nothing is fetched."""

    hidden: PositiveInt = 192
    layers: PositiveInt = 4
    heads: PositiveInt = 6
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    context_window: PositiveInt = 1024


class Lora(_Part):
    """Low-rank adapters of linear layers (arXiv 2106.09685); the weights below stay."""

    rank: PositiveInt = 16
    alpha: float = Field(default=32, gt=0)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Model(_Part):
    """The policy."""

    path: str | None = None
    """The folder of a model, or of a run, whose best checkpoint is meant; or a hub name; left out, the model is
    made from scratch."""
    scratch: Scratch = Scratch()
    context_window: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its reply; left out, as many as the model was made for."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    quantize: Literal["8bit", "4bit"] | None = None
    """Of the weights below an adapter, by bitsandbytes."""

    @model_validator(mode="after")
    def _fits(self) -> Model:
        if self.quantize and self.lora is None:
            raise ValueError("quantize: weights of 8 or 4 bits are not trained: set model.lora as well")
        return self


class Seeds(_Part):
    """Instances of each generator of a pack: the first, and how many. Even seeds are for training, odd ones are held
    out; both are counted from 0 here."""

    first: int = Field(default=0, ge=0)
    count: PositiveInt = 1


class Tasks(_Part):
    """What is learnt, and what is measured. No instruction and no reference solution is in two of the parts."""

    set: str = "terminal-basic"
    """A pack that is made from seeds; or the name or path of any task set, of which the parts below are slices."""
    generators: tuple[str, ...] = ()
    """Of a pack; empty: all of them."""
    demonstrations: Seeds = Seeds(first=0, count=40)
    train: Seeds = Seeds(first=1000, count=500)
    validation: Seeds = Seeds(first=0, count=16)
    """Chooses the best checkpoint."""
    heldout: Seeds = Seeds(first=1000, count=64)
    """Measured before and after, and used for nothing else."""


class AgentPart(_Part):
    """How an episode is played."""

    name: str = "tool-loop"
    """``tool-loop``, or a program of ``clawgym list agents`` or ``package.module:Class``."""
    options: dict[str, Any] = {}
    """Of a program: ``clawgym list agents NAME``."""
    protocol: Literal["tools", "text"] = "tools"
    """This, ``system_prompt`` and ``max_malformed`` are the tool loop's; programs have their own."""
    system_prompt: str | None = None
    max_steps: PositiveInt = 10
    max_tokens: PositiveInt = 512
    """Of one reply."""
    max_malformed: PositiveInt = 3
    """Replies in a row with nothing to do in them, after which the episode ends."""

    @model_validator(mode="after")
    def _fits(self) -> AgentPart:
        if self.name != "tool-loop" and (self.protocol, self.system_prompt) != ("tools", None):
            raise ValueError(f"protocol and system_prompt are the tool loop's: leave them out for {self.name}")
        if self.name == "tool-loop" and self.options:
            raise ValueError("options are a program's: set protocol, system_prompt and so on for tool-loop")
        _known(agents, self.name, self.options)
        return self


class Rollout(_Part):
    """How episodes are collected."""

    groups: PositiveInt = 8
    """Tasks of a step."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of a task."""
    temperature: float = Field(default=1.0, gt=0)
    concurrency: PositiveInt = 64
    """Episodes at once."""
    staleness: int = Field(default=0, ge=0)
    """Most versions that the policy may have moved on since a token was sampled; 0: collect, learn, collect."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds; a group does not wait longer for its slowest episode."""


class Reward(_Part):
    """What an episode, and a turn of it, is worth."""

    score: Literal["strict", "official"] = "strict"
    judge: str | None = None
    """One of ``clawgym list judges``, or ``package.module:thing``, a class or function that makes a judge; left out,
    the outcome alone. It is given those of these settings that it takes as options."""
    judge_options: dict[str, Any] = {}
    """Of the judge, beside these settings: ``file`` of ``head``."""
    votes: PositiveInt = 3
    count_zeros: bool = True
    """A vote of 0 is part of the mean; else it is left out, as in the reference implementation of arXiv 2603.10165."""
    max_tokens: PositiveInt = 1024
    """Of one answer of the judges ``model`` and ``policy``: one that is cut off is no vote, and thinking takes more."""
    pictures: bool = False
    """Show these judges the screens, too: for a model that sees."""
    verdict: bool = False
    """Let the judge see, at the last turn, what the verifier found."""
    coefficient: float = Field(default=1.0, ge=0)
    """Of the process term."""
    clip: float | None = Field(default=None, gt=0)
    calibrate: bool = True
    """Let the process term count for less while judge and outcomes disagree (:mod:`clawgym.rewards.calibration`)."""
    by_step: bool = False
    """Compare a step with the same step of the other episodes."""
    model: str | None = None
    base_url: str | None = None
    """Of the judge ``model``."""
    shuffle: bool = False
    """A control: the outcomes of a step are dealt out anew among its episodes, and the judge's rewards among turns."""
    malformed: float = Field(default=0.0, ge=0)
    """What an episode loses of its outcome, in [-1, 1], if no turn has a tool call that can be read; by their share."""
    length: float = Field(default=0.0, ge=0)
    """What it loses for ``longest`` sampled tokens, and in part from ``slack`` tokens before that
    (:func:`clawgym.rewards.penalties.overlong`)."""
    longest: PositiveInt | None = None
    slack: PositiveInt | None = None

    @model_validator(mode="after")
    def _fits(self) -> Reward:
        if self.length and not (self.longest and self.slack and self.slack <= self.longest):
            raise ValueError("length: set reward.longest, and reward.slack up to that, in tokens")
        if self.judge is not None:
            _known(judges, self.judge, self.judge_options)
        if self.judge == "head" and "file" not in self.judge_options:
            raise ValueError("judge is 'head': set reward.judge_options.file to a file that HeadJudge.save wrote")
        if self.judge == "model" and not self.model:
            raise ValueError("judge is 'model': name it with reward.model, and reward.base_url")
        return self


class Distillation(_Part):
    """Hindsight distillation (OPD): the judge's hints make a teacher of the policy. Off without ``hints``."""

    hints: int = Field(default=0, ge=0)
    """Candidates that the judge is asked for, of each turn."""
    choose: Literal["sequence", "token", "shortest"] = "sequence"
    """Among several: by overlap of the likeliest ids of student and teacher, over a turn or for each token."""
    top_k: PositiveInt = 4
    clip: float = Field(default=1.0, gt=0)
    """Of log pi_T - log pi_old, in nats."""
    w_rl: float = Field(default=1.0, ge=0)
    w_opd: float = Field(default=1.0, ge=0)


class Algorithm(_Part):
    """See :mod:`clawgym.trainers.algorithms`."""

    @model_validator(mode="after")
    def _fits(self) -> Algorithm:
        _known(advantages, self.advantage, self.advantage_options)
        _known(losses, self.loss, self.loss_options)
        return self

    advantage: str = "grpo"
    """One of ``clawgym list advantages``, or ``package.module:function``: rewards and groups of the episodes, (E,)
    each, to their advantages (E,). ``binary``: the majority of the judge's votes on a turn is the advantage of that
    turn, as it stands: no outcome, no group, no baseline (binary RL of arXiv 2603.10165). A turn without a vote has
    0."""
    advantage_options: dict[str, Any] = {}
    """Of the advantage: ``clawgym list advantages NAME``."""
    loss: str = "ppo"
    """One of ``clawgym list losses``, or ``package.module:function`` (:class:`clawgym.trainers.protocols.Loss`)."""
    loss_options: dict[str, Any] = {}
    """Of the loss, beside ``clip_low``, ``clip_high`` and ``dual_clip``, which it gets if it takes them."""
    aggregation: Literal["token", "episode", "sequence"] = "episode"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    importance_cap: float = Field(default=2.0, gt=0)
    """Of truncated importance sampling, between the trainer's log-probs and those of the rollout."""
    old: Literal["rollout", "recompute"] = "recompute"
    """The log-probs that the clip is measured from. ``rollout`` saves a forward pass, where the engine computes as the
    trainer does."""
    imitation: float = Field(default=0.0, ge=0)
    """Weight of a loss of imitation in each update, beside the policy's: mean cross-entropy of ``sft.batch`` rows,
    drawn evenly from the demonstrations (PPO-ptx, arXiv 2203.02155, equation 2) and from what was solved while
    training, the last episode of each task (self-imitation, arXiv 1806.05635)."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of KL to the first policy (k3)."""
    entropy: float = Field(default=0.0, ge=0)
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1


class Optimizer(_Part):
    """AdamW."""

    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=0, ge=0)
    """Updates in which the rate rises."""
    decay: bool = False
    """Linearly, to a tenth, over the budget: what a large rate has shaken settles again."""
    grad_clip: float = Field(default=1.0, gt=0)


class Compute(_Part):
    """What the machine does at once."""

    micro_tokens: PositiveInt = 8192
    """Tokens that go through the model at once."""
    row_tokens: PositiveInt = 2048
    """Training sequences that begin alike share rows of this length."""
    threads: int | None = Field(default=None, gt=0)
    """Of torch on a CPU, for all that this process computes."""
    device: str | None = None
    vllm: str | None = None
    """Address of a vLLM server that samples beside the trainer (``http://127.0.0.1:8000/v1``), for adapters; left out,
    an engine in this process does."""
    checkpointing: bool = False
    """Compute activations again instead of keeping them."""


class Sft(_Part):
    """Supervised training, on demonstrations or on exported trajectories."""

    data: str | None = None
    """What ``clawgym pool export`` wrote (messages, parquet); left out, demonstrations are made."""
    steps: PositiveInt = 300
    until: float | None = Field(default=None, gt=0, le=1)
    """End sooner: at this score on the validation part. Reinforcement needs a policy that still varies what it does."""
    batch: PositiveInt = 32
    """Rows of a step."""
    lr: float = Field(default=1e-3, gt=0)
    warmup: int = Field(default=30, ge=0)
    decay: bool = True
    """Linearly, to a tenth, over the steps."""
    evaluate_every: PositiveInt = 50
    shuffle_words: bool = False
    """In each row, put other words of the pack for its words, the same one wherever it stands: teaches to copy."""


class Evaluation(_Part):
    """Measuring on tasks that are not learnt from."""

    every: PositiveInt = 10
    """Steps."""
    samples: PositiveInt = 1
    """Episodes of a task."""
    greedy: bool = False
    """Take the likeliest token; else sample at temperature 1."""
    canary: int = Field(default=8, ge=0)
    """Tasks of the validation part on which attacks and cheap policies are watched."""


class Budget(_Part):
    """When to end."""

    steps: PositiveInt = 100
    minutes: float | None = Field(default=None, gt=0)
    """Of learning, evaluation on the validation part left out."""


class Guards(_Part):
    """When to stop because learning has gone wrong."""

    max_kl: float = Field(default=1.0, gt=0)
    """Nats a token that all updates of a step may move the policy by, measured after the last of them."""
    min_entropy: float = Field(default=1e-4, ge=0)
    """Nats a token, after the last update of a step."""


class Verl(_Part):
    """Of the trainer ``verl`` alone (docs/verl.md)."""

    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """``sync``: collect, learn, collect. The others collect while they learn, up to ``rollout.staleness`` versions
    behind; ``separate_async`` on GPUs of their own."""
    engine: Literal["vllm", "sglang", "transformers"] = "vllm"
    """Samples the tokens; ``transformers`` is ours, for a CPU."""
    nodes: PositiveInt = 1
    ranks: PositiveInt = 1
    """Of a node: GPUs, or processes on a CPU."""
    rollout_nodes: PositiveInt = 1
    """This and ``rollout_ranks``: those that only sample, in ``separate_async``."""
    rollout_ranks: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    """Ranks that hold one copy of the engine's weights."""
    memory: float = Field(default=0.5, gt=0, le=1)
    """The share of a GPU's memory that the engine takes."""
    offload: bool = False
    """Keep weights and optimiser in the memory of the machine while the engine samples."""


class TrainConfig(_Part):
    """One training run."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.distillation.hints and self.reward.judge in (None, "rule", "head"):
            raise ValueError("distillation.hints: rule and head give no hints: set reward.judge to a judge that does")
        if self.compute.vllm and (self.model.lora is None or self.trainer != "local"):
            raise ValueError(
                "compute.vllm: is for adapters in the local trainer: set model.lora, or train whole weights beside "
                "vLLM with trainer: verl and verl.engine"
            )
        if self.algorithm.advantage == "binary" and (self.reward.malformed or self.reward.length):
            raise ValueError(
                "reward.malformed, reward.length: advantage: binary has no outcome to take them off: set 0"
            )
        if self.algorithm.advantage == "binary" and self.reward.judge is None:
            raise ValueError("algorithm.advantage: binary learns from a judge's votes alone: set reward.judge")
        if self.backend != "auto" and not self.backend.startswith("ray:"):
            _known(sandboxes, self.backend)
        _known(trainers, self.trainer, self.trainer_options)
        for name, options in self.tracking.items():
            _known(trackers, name, options or {})
        return self

    name: str = "train"
    seed: int = 0
    trainer: str = "local"
    """One of ``clawgym list trainers``, or ``package.module:function``
    (:class:`clawgym.trainers.protocols.Trainer`)."""
    trainer_options: dict[str, Any] = {}
    """Of a trainer that has options of its own; those of ``verl`` are below."""
    backend: str = "auto"
    model: Model = Model()
    tasks: Tasks = Tasks()
    agent: AgentPart = AgentPart()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    distillation: Distillation = Distillation()
    optimizer: Optimizer = Optimizer()
    compute: Compute = Compute()
    verl: Verl = Verl()
    sft: Sft = Sft()
    evaluation: Evaluation = Evaluation()
    budget: Budget = Budget()
    guards: Guards = Guards()
    tracking: dict[str, dict[str, Any] | None] = {}
    """Where figures go beside ``metrics.jsonl``: trackers by name (``clawgym list trackers``), each with its
    options."""
    checkpoint_every: PositiveInt = 1
    """Steps of ``rl``; imitation is saved when it is measured, and both when they are stopped. The last and the best
    checkpoint are kept."""


def recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the package."""
    folder = files("clawgym.trainers") / "recipes"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in the file, or the recipe, ``source``; each of ``overrides`` is ``part.key=value`` (YAML).

    Raises :class:`~clawgym.errors.TrainingError` naming the file and the field, and
    :class:`~clawgym.errors.MissingDependency` without the extra ``train``.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingDependency(f"configurations are YAML ({error}): pip install 'clawgym[train]'") from error

    path = Path(source).expanduser()
    if str(source) in recipes():
        text = (files("clawgym.trainers") / "recipes" / f"{source}.yaml").read_text("utf-8")
    else:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(
                f"{source}: neither a recipe ({', '.join(recipes())}) nor a file that can be read ({error}): name one"
            ) from error
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise TrainingError(f"{source}: is no YAML ({error}): correct it") from error
    if not isinstance(data, dict):
        raise TrainingError(f"{source}: holds no settings but {type(data).__name__}: write `key: value` lines")
    for override in overrides:
        _put(data, override, yaml)
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        if _of_0_1(data):
            raise TrainingError(
                f"{source}: written by version 0.1, whose runs are not resumed: begin another run with model.path set "
                "to its checkpoint (checkpoints/NUMBER/model), or resume it with clawgym 0.1. agent.prompt is "
                "agent.options.prompt now, and tracking names trackers (docs/training.md)"
            ) from error
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise TrainingError(f"{source}: {wrong}: correct these settings (docs/training.md lists all)") from error


def _of_0_1(data: Mapping[str, Any]) -> bool:
    agent, tracking = data.get("agent"), data.get("tracking")
    return (isinstance(agent, Mapping) and "prompt" in agent) or (
        isinstance(tracking, Mapping) and isinstance(tracking.get("wandb"), str | bool)
    )


def _put(data: dict[str, Any], override: str, yaml: Any) -> None:
    name, found, text = override.partition("=")
    keys = name.strip().split(".")
    if not found or not all(keys):
        raise TrainingError(f"--set {override}: write key=value, with dots for parts (optimizer.lr=1e-5)")
    at = data
    for key in keys[:-1]:
        if at.get(key) is None:
            at[key] = {}
        at = at[key]
        if not isinstance(at, dict):
            raise TrainingError(f"--set {override}: {key!r} has no parts: leave out what follows it")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TrainingError(f"--set {override}: the value is no YAML ({error}): quote it") from error
    # YAML 1.1 reads 1e-5 as text.
    try:
        value = float(value) if isinstance(value, str) else value
    except ValueError:
        pass
    at[keys[-1]] = value
