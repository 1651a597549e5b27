"""The answers about a pool, with the types of ``web/src/api.ts``."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.errors import ClawGymError
from clawgym.pool import tokenizer
from clawgym.pool.sequences import paths_of, sequences_of
from clawgym.pool.view import PoolView
from clawgym.records import Image, Observation, Step, ToolCall, Turn, prompt_ids
from clawgym.reporting.transcripts import step_answers, token_answers
from clawgym.trainers.common.answers import trained_advantages

__all__ = ["PoolAnswers", "steps_of"]

_COMPUTED = (
    "The training stored no advantages for this episode. They are computed here, by GRPO from the stored rewards of "
    "the group, without penalties and process rewards."
)
_TOKENIZERS = ("base", "model")


class PoolAnswers:
    """Answers about the pool in the file ``path``; for one request."""

    def __init__(self, path: Path, id: str) -> None:
        self._path = path
        self._id = id
        self._view = PoolView(path)

    def __enter__(self) -> PoolAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()

    def pool(self) -> dict[str, Any]:
        """``Pool``, without ``changed`` and ``training``."""
        stats, flaws, curation = self._view.stats(), self._view.flaws(), self._view.curation()
        channels = []
        for name, counts in stats["channels"].items():
            decided = curation.get(name, {})
            channels.append(
                {
                    "name": name,
                    **counts,
                    "flaws": flaws.get(name, {}),
                    "curation": {
                        "kept": decided.get(True, 0),
                        "left_out": decided.get(False, 0),
                        "undecided": decided.get(None, 0),
                    },
                }
            )
        versions = [{"version": v, "turns": turns, "tokens": ids} for v, turns, ids in self._view.versions()]
        return {
            "id": self._id,
            "name": self._path.name,
            "path": str(self._path),
            "channels": channels,
            "batches": stats["batches"],
            "images": stats["images"],
            "tools": stats["tools"],
            "versions": versions,
            "notes": [],
        }

    def groups(self, offset: int, limit: int, where: Mapping[str, str]) -> tuple[int, int, list[dict[str, Any]]]:
        """``PoolGroup`` of a part of the groups; number after filtering and of all."""
        total, everything, rows = self._view.groups(offset, limit, where)
        return (
            total,
            everything,
            [
                {
                    **{name: row[name] for name in ("id", "channel", "size", "members", "closed", "infra", "state")},
                    "task": row["task_id"],
                    "reason": row["reason"] or "",
                    "opened": row["opened_at"],
                    "rewards": [reward for _, _, reward in members],
                    "episodes": [seq for seq, _, _ in members],
                }
                for row, members in rows
            ],
        )

    def episodes(
        self, offset: int, limit: int, where: Mapping[str, str], find: str
    ) -> tuple[int, int, list[dict[str, Any]]]:
        """``PoolEpisodeLine`` of a part of the episodes; number after filtering and of all."""
        total, everything, rows = self._view.episodes(offset, limit, where, find)
        return total, everything, [_line(row) for row in rows]

    def find(self, id: str) -> int | None:
        """The ``seq`` of the episode with an id; None if there is none."""
        return self._view.find(id)

    def episode(self, seq: int) -> dict[str, Any]:
        """``PoolEpisode``, without ``run``. Raises :class:`~clawgym.errors.PoolError` if there is none."""
        row, episode = self._view.episode(seq)
        _, _, groups = self._view.groups(0, 1, {"id": episode.group})
        members = groups[0][1] if groups else []
        turns = self._view.turns(seq, episode.id)
        steps, where = steps_of(turns)
        rewards = [
            {"step": where[turn], "name": said["name"], "value": said["value"]}
            for turn, several in sorted(self._said(seq).items())
            for said in several
            if turn in where
        ]
        given = [reward for _, _, reward in members if reward is not None]
        advantage = _advantage(episode.reward, given)
        step, trained = self._trained(seq, episode.id)
        return {
            **_line(row),
            "pool": self._id,
            "rewards": dict(episode.rewards),
            "penalties": dict(episode.penalties),
            "tags": list(episode.tags),
            "curation_note": episode.note,
            "meta": dict(episode.meta),
            "members": [{"seq": seq, "sample": sample, "reward": reward} for seq, sample, reward in members],
            "advantage": advantage,
            "trained": {
                "step": step,
                "turns": [
                    {"turn": turn, "step": where.get(turn), "mean": mean, "least": least, "most": most}
                    for turn, (mean, least, most) in sorted(trained.items())
                ],
            }
            if trained
            else None,
            "rewards_by_turn": rewards,
            "pictures": [
                {"src": self._address(seen.image), "step": n}
                for n, step in enumerate(steps)
                for seen in step.observations
                if seen.image is not None
            ],
            "notes": [_COMPUTED] if advantage and not trained else [],
        }

    def _trained(self, seq: int, id: str) -> tuple[int | None, dict[int, tuple[float, float, float]]]:
        """The step that trained on an episode, and the advantages of its turns, if the training stored them."""
        step = self._view.step(seq)
        return step, {} if step is None else trained_advantages(self._path.parent, step, id)

    def turns(self, seq: int, offset: int, limit: int) -> tuple[int, list[dict[str, Any]]]:
        """How many steps an episode has, and ``Step`` of a part of them."""
        _, episode = self._view.episode(seq)
        turns = self._view.turns(seq, episode.id)
        steps, where = steps_of(turns)
        said = self._said(seq)
        known = {
            n: {
                "turn": turn,
                "role": turns[turn].role,
                "policy_version": turns[turn].policy_version,
                "finish_reason": turns[turn].finish_reason,
                "flaw": turns[turn].flaw or "",
                "rewards": said.get(turn, []),
            }
            for turn, n in where.items()
        }
        return len(steps), step_answers(steps, offset, offset + limit, turns=known, address=self._address)

    def tokens(self, seq: int, turn: int) -> dict[str, Any] | None:
        """``Tokens`` of a turn; None if there is no such turn."""
        _, episode = self._view.episode(seq)
        turns = self._view.turns(seq, episode.id)
        if not 0 <= turn < len(turns):
            return None
        one = turns[turn]
        trained = {index for path in paths_of(_shapes(turns)) for index in path.trained}
        decode, note = self._tokenizer()
        reward = self._view.rewards(seq)[0].get("judge", {}).get(turn)
        step, stored = self._trained(seq, episode.id)
        if stored:
            spread = stored.get(turn)
            advantage = None if spread is None else spread[0]
        else:
            spread, known = None, self.episode(seq)["advantage"]
            advantage = None if known is None else known["normalized"]
        return {
            "turn": turn,
            "turns": len(turns),
            "role": one.role,
            "policy_version": one.policy_version,
            "flaw": one.flaw or "",
            "before": len(prompt_ids(turns, turn)) - len(one.context_ids),
            **token_answers(
                one.context_ids,
                one.sampled_ids,
                one.logprobs,
                trained=turn in trained,
                advantage=advantage,
                decode=decode,
            ),
            "reward": reward,
            "advantages": {"step": step if stored else None, "spread": spread and list(spread[1:])}
            if stored or advantage is not None
            else None,
            "note": note,
        }

    def sequences(self, seq: int) -> dict[str, Any]:
        """``SequenceTree`` of an episode."""
        _, episode = self._view.episode(seq)
        turns = self._view.turns(seq, episode.id)
        paths = paths_of(_shapes(turns))
        made = sequences_of(turns)
        return {
            "turns": [
                {
                    "turn": n,
                    "parent": turn.parent,
                    "role": turn.role,
                    "flaw": turn.flaw or "",
                    "policy_version": turn.policy_version,
                    "context_ids": len(turn.context_ids),
                    "sampled_ids": len(turn.sampled_ids),
                    "finish_reason": turn.finish_reason,
                }
                for n, turn in enumerate(turns)
            ],
            "sequences": [
                {
                    "turns": list(path.turns),
                    "trained": sorted(path.trained),
                    "ids": len(one.ids),
                    "trained_ids": sum(one.mask),
                }
                for path, one in zip(paths, made, strict=True)
            ],
            "roles": ["main"],
            "note": "" if made else "No turn of role main has exact token ids, so nothing can be trained on.",
        }

    def picture(self, sha256: str) -> Image | None:
        """A picture; None if it is not there."""
        return self._view.picture(sha256)

    def _address(self, image: Image) -> str:
        return f"/api/pools/{self._id}/pictures/{image.sha256}"

    def _said(self, seq: int) -> dict[int, list[dict[str, Any]]]:
        """Turn -> ``TurnReward`` of each name."""
        values, about = self._view.rewards(seq)
        found: dict[int, list[dict[str, Any]]] = {}
        for name in dict.fromkeys([*values, *about]):
            for turn in sorted({*values.get(name, {}), *about.get(name, {})}):
                said = about.get(name, {}).get(turn, {})
                found.setdefault(turn, []).append(
                    {
                        "name": name,
                        "value": values.get(name, {}).get(turn),
                        "judge": str(said.get("judge") or "")[:200],
                        "votes": [vote if isinstance(vote, int | float) else None for vote in _list(said.get("votes"))],
                        "texts": [str(text)[:4_000] for text in _list(said.get("texts"))],
                        "hints": [str(hint)[:4_000] for hint in _list(said.get("hints"))],
                    }
                )
        return found

    def _tokenizer(self) -> tuple[Callable[[Sequence[int]], str] | None, str]:
        """The tokenizer of the training that the pool belongs to, or why there is none."""
        for folder in _tokenizer_folders(self._path.parent):
            with contextlib.suppress(ClawGymError):
                return tokenizer.load(folder).decode, ""
        return None, "The text of the tokens is not known: there is no tokenizer beside the pool."


def _tokenizer_folders(folder: Path) -> Iterator[Path]:
    names = [*_TOKENIZERS]
    with contextlib.suppress(OSError):
        names += [f"checkpoints/{path.name}/model" for path in sorted((folder / "checkpoints").iterdir())[:100]]
    for name in names:
        if not any((folder / part).is_symlink() for part in (name, f"{name}/tokenizer.json")):
            yield folder / name


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    """``PoolEpisodeLine`` of a row."""
    return {
        "seq": row["seq"],
        "id": row["id"],
        "channel": row["channel"],
        "group": row["group"],
        "task": row["task_id"],
        "sample": row["sample"],
        "agent": row["agent"],
        "state": row["state"],
        "outcome": row["outcome"] or "",
        "cause": row["cause"] or "",
        "reward": row["reward"],
        "turns": row["n_turns"],
        "flawed": row["n_flawed"],
        "sequences": row["n_samples"],
        "trained_ids": row["n_trained"],
        "trainable": row["trainable"],
        "fate": row["fate"] or "",
        "opened": row["opened_at"],
        "closed": row["closed_at"],
    }


def _advantage(reward: float | None, group: Sequence[float]) -> dict[str, float | None] | None:
    """The advantage of GRPO within a group of rewards."""
    if reward is None or len(group) < 2:
        return None
    centred, spread = reward - statistics.fmean(group), statistics.stdev(group)
    return {"centred": centred, "normalized": centred / spread if spread > 0 else 0.0}


class _Shape:
    """What :func:`~clawgym.pool.sequences.paths_of` needs of a turn."""

    def __init__(self, turn: Turn) -> None:
        self.parent, self.role, self.flaw, self.sampled = turn.parent, turn.role, turn.flaw, bool(turn.sampled_ids)


def _shapes(turns: Sequence[Turn]) -> list[_Shape]:
    return [_Shape(turn) for turn in turns]


def steps_of(turns: Sequence[Turn]) -> tuple[list[Step], dict[int, int]]:
    """The turns of an episode as steps of a transcript; and turn -> index of the step with its reply.

    A result of a tool is an observation of the step whose reply called it.
    """
    steps: list[Step] = []
    where: dict[int, int] = {}
    observed: dict[int, list[Observation]] = {}
    for index, turn in enumerate(turns):
        above = None if turn.parent is None else where.get(turn.parent)
        for message in turn.messages:
            role, (text, images) = message.get("role"), _content(message.get("content"))
            if role == "assistant":
                continue
            if role in ("tool", "function") and above is not None:
                call = str(message.get("tool_call_id") or "") or None
                observed.setdefault(above, []).append(Observation(text, call))
                observed[above] += [Observation("", call, image) for image in images]
                continue
            observed.setdefault(len(steps), []).extend(Observation("", None, image) for image in images)
            steps.append(Step("system" if role in ("system", "developer") else "user", text, ""))
        where[index] = len(steps)
        text, _ = _content(turn.reply.get("content"))
        reasoning = turn.reply.get("reasoning_content")
        calls = tuple(_calls(turn.reply.get("tool_calls")))
        steps.append(Step("agent", text, "", calls, reasoning=str(reasoning) if reasoning else None))
    return [
        Step(step.source, step.message, "", step.tool_calls, tuple(observed.get(n, ())), step.reasoning)
        for n, step in enumerate(steps)
    ], where


def _content(content: Any) -> tuple[str, list[Image]]:
    """The text and the pictures of a message in OpenAI's chat format."""
    if not isinstance(content, list):
        return ("" if content is None else str(content)), []
    texts, images = [], []
    for part in content:
        if not isinstance(part, Mapping):
            continue
        digest = part.get("sha256")
        if part.get("type") == "image" and isinstance(digest, str):
            images.append(Image(digest, b""))
        else:
            texts.append(str(part.get("text") or ""))
    return "\n".join(texts), images


def _calls(calls: Any) -> Iterator[ToolCall]:
    for call in _list(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        arguments: Any = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            arguments = {"arguments": arguments}
        yield ToolCall(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
