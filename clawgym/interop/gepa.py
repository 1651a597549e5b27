"""GEPA: prompts and skill files optimised on tasks of this library (``gepa.optimize``).

    adapter = ClawGymAdapter(lambda prompt: ToolLoopAgent(engine(), system_prompt=prompt))
    gepa.optimize({"system_prompt": "Work."}, tasks, adapter=adapter, reflection_lm=..., max_metric_calls=200)

A candidate has named texts. ``system_prompt`` goes to the agent. A name that ends with ``.md`` is a file that the
sandbox has before the agent starts, such as ``skills/files/SKILL.md``. Needs the package ``gepa``.

Invariants: a score is that of the task's own verifier. An infrastructure error is tried again, and then raised; it is
never a score. What an agent wrote is bounded before it is shown to the reflection model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clawgym.agents.protocol import Agent
from clawgym.errors import ClawGymError, InfraError, MissingDependency
from clawgym.interop._backend import loop_backend
from clawgym.records import Episode, Outcome, Task, TaskFile
from clawgym.rollout import Ended, EpisodeRequest, run_episode
from clawgym.rollout.request import RewardName
from clawgym.visible import cut

try:
    from gepa.core.adapter import EvaluationBatch  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency(f"gepa is needed ({error}): pip install gepa") from error

__all__ = ["SYSTEM_PROMPT", "ClawGymAdapter"]

SYSTEM_PROMPT = "system_prompt"
"""The name of the text that goes to the agent."""
_SHOWN = 2000
"""Most characters of one step, and of a verifier's log, in the reflective data set."""
_STEPS = 20
"""Most steps of one episode in it; the last ones."""


class ClawGymAdapter:
    """GEPA's adapter: evaluates candidates on tasks, and shows the reflection model what went wrong.

    Args:
        make_agent: makes the agent of one episode from a system prompt; None if the candidate has none.
        reward: the score of an episode.
        seed: the seed of the first episode of a task; each further one has the next.
        concurrency: episodes at a time.
    """

    propose_new_texts = None
    """GEPA's own proposal with the reflection model."""

    def __init__(
        self,
        make_agent: Callable[[str | None], Agent],
        *,
        reward: RewardName = "official",
        seed: int = 0,
        concurrency: int = 16,
    ) -> None:
        self._make_agent, self._seed = make_agent, seed
        self._reward: RewardName = reward
        self._concurrency = concurrency
        self._runner = asyncio.Runner()
        self.episodes = 0
        """Episodes so far, those that were tried again included."""

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Episode, str]:
        """Play each task once. Raises :class:`~clawgym.errors.ClawGymError` for a text with an unknown name, and
        :class:`~clawgym.errors.InfraError` after two infrastructure errors of one episode."""
        for name in candidate:
            if name != SYSTEM_PROMPT and not name.endswith(".md"):
                raise ClawGymError(f"a candidate has the text {name!r}: name it {SYSTEM_PROMPT}, or a path with .md")
        ended = self._runner.run(self._play(batch, candidate))
        return EvaluationBatch(
            outputs=[one.episode.final_message[:_SHOWN] for one in ended],
            scores=[float(one.reward or 0.0) for one in ended],
            trajectories=[one.episode for one in ended] if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch[Episode, str], components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The same records for each text: the task, what the agent did, and the checks that failed."""
        pairs = zip(eval_batch.trajectories or [], eval_batch.scores, strict=True)
        records = [_record(episode, score) for episode, score in pairs]
        return dict.fromkeys(components_to_update, records)

    def close(self) -> None:
        """Close the sandboxes."""
        self._runner.close()

    async def _play(self, batch: Sequence[Task], candidate: Mapping[str, str]) -> list[Ended]:
        files = tuple(TaskFile(name, text.encode()) for name, text in candidate.items() if name != SYSTEM_PROMPT)
        slots = asyncio.Semaphore(self._concurrency)

        async def one(number: int, task: Task) -> Ended:
            task = replace(task, inputs=(*task.inputs, *files)) if files else task
            async with slots:
                ended = await self._episode(task, candidate, 2 * number)
                if ended.episode.outcome is Outcome.INFRA:
                    ended = await self._episode(task, candidate, 2 * number + 1)
            if ended.episode.outcome is not Outcome.INFRA:
                return ended
            why = ended.episode.error or ended.episode.cause
            raise InfraError(f"task {task.id}: infrastructure errors (the last: {why}): run `clawgym doctor`")

        return list(await asyncio.gather(*(one(number, task) for number, task in enumerate(batch))))

    async def _episode(self, task: Task, candidate: Mapping[str, str], number: int) -> Ended:
        self.episodes += 1
        agent = self._make_agent(candidate.get(SYSTEM_PROMPT))
        try:
            seed = (self._seed + number) % 2**31
            request = EpisodeRequest(task=task, seed=seed, reward=self._reward, keep_workspace=False)
            return await run_episode(request, agent, await loop_backend())
        finally:
            await agent.aclose()


def _record(episode: Episode, score: float) -> dict[str, Any]:
    """One record of the reflective data set, as JSON data."""
    result = episode.result
    failed = [] if result is None else [name for name, value in result.checks.items() if value < 1]
    said = [f"The score is {score:.2f}. The episode ended as {episode.outcome}: {episode.cause or 'no cause'}."]
    if failed:
        said.append(f"Failed checks: {', '.join(failed)[:_SHOWN]}.")
    if result is not None and failed and result.log.strip():
        said.append(f"Output of the verifier: {_cut(result.log)}")
    steps = []
    for step in episode.steps[-_STEPS:]:
        if step.source != "agent":
            continue
        steps.append(f"agent: {_cut(step.message)}")
        steps += [f"call {call.name}: {_cut(str(dict(call.arguments)))}" for call in step.tool_calls]
        steps += [f"result: {_cut(seen.content)}" for seen in step.observations]
    task = next((step.message for step in episode.steps if step.source == "user"), episode.task_id)
    return {"Inputs": {"task": _cut(task)}, "Generated Outputs": "\n".join(steps), "Feedback": "\n".join(said)}


def _cut(text: str) -> str:
    return cut(text, _SHOWN)[0]
