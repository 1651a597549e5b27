"""Convert episodes to documents for other tools and back: ATIF transcripts, and chat messages for supervised training.

Invariant: documents contain the stored ids. Turns from a document can only be trained on if :mod:`clawgym.pool.check`
finds them exact; all others get a flaw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from clawgym.pool._rows import turn_of
from clawgym.pool.check import TraceTurn, check
from clawgym.pool.sequences import Shape, paths_of
from clawgym.pool.states import PooledEpisode
from clawgym.records import Episode, Observation, Outcome, Step, ToolCall, Turn, continued, prompt_ids
from clawgym.records.atif import episode_to_atif, json_safe

__all__ = ["atif_of", "conversations_of", "openai_of", "turns_from_atif", "turns_from_messages"]

_ABOUT = ("channel", "group", "reward", "rewards", "penalties", "trainable", "tags", "note", "meta")


def _parts(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (
        p.get("text") if p.get("type") == "text" else f"[{p.get('type')}]" for p in content if isinstance(p, Mapping)
    )
    return "\n".join(str(text or "") for text in texts)


def _calls(message: Mapping[str, Any]) -> Iterator[ToolCall]:
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            arguments = function.get("arguments")
        if not isinstance(arguments, dict):
            arguments = {"arguments": arguments}
        yield ToolCall(str(call.get("id") or f"call_{number}"), str(function.get("name") or ""), arguments)


def _steps(turns: Sequence[Turn], when: str) -> Iterator[Step]:
    """The transcript in the order of the turns; each turn ends with an agent step."""
    results: dict[str, Observation] = {}
    for turn in reversed(turns):
        for message in turn.messages:
            if message.get("role") == "tool":
                id = str(message.get("tool_call_id"))
                results[id] = Observation(_parts(message.get("content")), id)
    for turn in turns:
        for message in turn.messages:
            role = message.get("role")
            if role in ("system", "developer", "user"):
                yield Step("user" if role == "user" else "system", _parts(message.get("content")), when)
        calls = tuple(_calls(turn.reply))
        yield Step(
            "agent",
            _parts(turn.reply.get("content")),
            when,
            tool_calls=calls,
            observations=tuple(results[call.id] for call in calls if call.id in results),
            reasoning=turn.reply.get("reasoning_content"),
        )


def atif_of(episode: PooledEpisode, turns: Sequence[Turn]) -> dict[str, Any]:
    """The episode as an ATIF document, with an agent step per turn. Whole prompts make its size quadratic in length."""
    when = datetime.fromtimestamp(episode.opened_at, UTC).isoformat()
    record = Episode(
        task_id=episode.task_id,
        task_hash=episode.task_hash,
        sample=episode.sample,
        seed=episode.seed,
        agent=episode.agent or "unknown",
        outcome=Outcome(episode.outcome or "truncated"),
        cause=episode.cause,
        steps=tuple(_steps(turns, when)),
    )
    document = episode_to_atif(record)
    document["session_id"] = document["trajectory_id"] = episode.id
    document["extra"]["clawgym"] |= json_safe({name: getattr(episode, name) for name in _ABOUT})
    document["extra"]["clawgym"]["outcome"] = episode.outcome  # None while it is open
    agent_steps = [step for step in document["steps"] if step["source"] == "agent"]
    for index, (step, turn) in enumerate(zip(agent_steps, turns, strict=True)):
        named = ("parent", "role", "policy_version", "finish_reason", "flaw")
        extra = {"turn": index} | {name: getattr(turn, name) for name in named}
        metrics: dict[str, Any] = {"extra": extra}
        if turn.sampled_ids:
            metrics["prompt_token_ids"] = list(prompt_ids(turns, index))
            metrics["completion_token_ids"] = list(turn.sampled_ids)
            metrics["logprobs"] = list(turn.logprobs)
        step["metrics"] = json_safe(metrics)
    return document


def conversations_of(
    episode: PooledEpisode, turns: Sequence[Turn], tools: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """OpenAI chat messages of each branch of the main agent; ``tools`` maps a hash to tool definitions."""
    shapes = [Shape(turn.parent, turn.role, None, bool(turn.reply)) for turn in turns]
    for path in paths_of(shapes):
        messages: list[Mapping[str, Any]] = []
        for index in path.turns:
            messages += [*turns[index].messages, turns[index].reply]
        about = ("task_id", "channel", "group", "sample", "outcome", "reward")
        row: dict[str, Any] = {"messages": json_safe(messages)}
        if defined := tools.get(turns[path.turns[-1]].tools):
            row["tools"] = defined
        row |= {"episode": episode.id, "turns": list(path.turns)} | {name: getattr(episode, name) for name in about}
        if judge := episode.meta.get("judged_by"):
            row["judged_by"] = judge
        yield row


_OPENAI = {
    "system": ("content", "name"),
    "developer": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "refusal", "tool_calls"),
    "tool": ("content", "tool_call_id"),
}
"""Role -> the keys of its messages in OpenAI's fine-tuning format."""


def openai_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row of :func:`conversations_of` in OpenAI's fine-tuning format, without reasoning. None if it ends without a
    reply."""
    messages = [
        {"role": message["role"]} | {key: message[key] for key in _OPENAI[message["role"]] if key in message}
        for message in row["messages"]
        if message.get("role") in _OPENAI
    ]
    if not messages or messages[-1]["role"] != "assistant":
        return None
    return {"messages": messages} | ({"tools": row["tools"]} if "tools" in row else {})


def turns_from_atif(document: Mapping[str, Any]) -> list[Turn]:
    """The turns of an ATIF document: exact ones with their ids, the others with their texts and a flaw."""
    messages: list[Mapping[str, Any]] = []
    said: list[tuple[list[Mapping[str, Any]], Mapping[str, Any]]] = []
    rows: list[TraceTurn] = []
    for step in document.get("steps") or ():
        extra = step.get("extra") or {}
        if extra.get("clawgym_placeholder"):
            continue
        if step.get("source") != "agent":
            messages.append({"role": step.get("source"), "content": _parts(step.get("message"))})
            continue
        metrics = step.get("metrics") or {}
        rows.append(turn_of({**(metrics.get("extra") or {}), **{k: v for k, v in metrics.items() if k != "extra"}}))
        said.append((messages, _reply(step)))
        results = (step.get("observation") or {}).get("results") or ()
        messages = [
            {"role": "tool", "tool_call_id": r.get("source_call_id"), "content": _parts(r.get("content"))}
            for r in results
        ]
    return _proved(rows, said)


def _reply(step: Mapping[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": _parts(step.get("message"))}
    if step.get("reasoning_content"):
        reply["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        reply["tool_calls"] = [
            {"id": c.get("tool_call_id"), "type": "function",
             "function": {"name": c.get("function_name"), "arguments": json.dumps(c.get("arguments"))}}
            for c in step["tool_calls"]
        ]  # fmt: skip
    return reply


def _proved(
    rows: Sequence[TraceTurn], said: Sequence[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]]
) -> list[Turn]:
    verdict = check("", rows)
    flaws: dict[int, str] = {}
    for finding in verdict.findings:
        if finding.level != "note":
            for index in range(len(rows)) if finding.turn is None else (finding.turn,):
                flaws.setdefault(index, rows[index].flaw or finding.code)
    turns: list[Turn] = []
    whole: list[tuple[int, ...]] = []
    for index, (row, (messages, reply)) in enumerate(zip(rows, said, strict=True)):
        flaw = flaws.get(index)
        prompt, sampled = (() if flaw else tuple(map(int, ids or ())) for ids in (row.prompt, row.response))
        parent = row.parent
        if not row.declared:  # the longest history that it continues
            parent = continued(prompt, {n: ids for n, ids in enumerate(whole) if n not in flaws})
        if flaw and parent is not None and not 0 <= parent < index:
            parent = None
        version = row.versions[0] if row.versions else None
        turns.append(
            Turn(
                context_ids=prompt if parent is None or flaw else prompt[len(whole[parent]) :],
                sampled_ids=sampled,
                logprobs=() if flaw else tuple(map(float, row.logprobs or ())),
                policy_version=version if isinstance(version, int) else None,
                role=row.role if row.role in ("main", "subagent", "compaction") else "unknown",  # type: ignore[arg-type]
                parent=parent,
                flaw=flaw,
                messages=tuple(messages),
                reply=reply,
            )
        )
        whole.append(prompt + sampled)
    return turns


def turns_from_messages(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """One turn for each assistant message, with texts and without ids."""
    turns: list[Turn] = []
    fresh: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") != "assistant":
            fresh.append(message)
            continue
        parent = len(turns) - 1 if turns else None
        turns.append(Turn(parent=parent, flaw="text-only", messages=tuple(fresh), reply=message))
        fresh = []
    return turns
