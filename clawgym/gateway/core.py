"""Run one turn, from a checked request to a stored record.

Invariants: the prompt ids for the engine are the stored ids of the continued turn plus the ids of the new messages, or
a rendering of the whole conversation if nothing is continued, never a mixture. A turn is stored in the pool before the
agent gets its end. A turn that cannot be trained on exactly has a flaw.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, cast

from clawgym.engines.protocol import Delta, GenerateRequest, Image, Sampling, TextEngine, TokenEngine, Tokens
from clawgym.errors import BudgetExceeded, ClawGymError, ContextLengthExceeded, EngineError, EpisodeClosed
from clawgym.gateway.calls import ChatCall, Message, Refusal, ReplyBuilder, chat_body
from clawgym.gateway.gate import Gate
from clawgym.gateway.parsers import StopStrings
from clawgym.gateway.render import Renderer
from clawgym.gateway.roles import role_of
from clawgym.gateway.sessions import Session
from clawgym.gateway.stitch import UNFINISHED, Key, Match, message_keys, tools_json, tools_key, with_stored_ids
from clawgym.pool import PoolWriter
from clawgym.records import Role, Turn, Usage, ids_array

__all__ = ["Core", "Counts"]

_log = logging.getLogger("clawgym.gateway")
_SETTINGS = tuple(f.name for f in fields(Sampling))


@dataclass
class Counts:
    """Counts of turns since the gateway started."""

    turns: int = 0
    continued: int = 0
    branches: int = 0
    ambiguous: int = 0
    flawed: int = 0
    unfinished: int = 0
    malformed_calls: int = 0
    rewrites: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a call is answered: the turn that it continues, and its prompt."""

    match: Match
    keys: list[Key]
    new: list[Message]
    """Messages after the matched turn; tool results have the stored ids of their calls."""
    context: tuple[int, ...]
    """Ids of ``new`` and of the opening of the reply; the end of ``prompt``."""
    prompt: array[int]
    tools: str
    role: Role


@dataclass
class _Progress:
    """What the engine has sampled so far."""

    started: float
    queued: float = 0.0
    first_token: float | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: int | None = None
    cached: int = 0
    finish: str | None = None
    flaw: str | None = None

    def take(self, tokens: Tokens) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic() - self.started
            self.version = tokens.policy_version
        self.sampled += tokens.ids
        self.logprobs += tokens.logprobs
        self.cached = tokens.cached_tokens or self.cached
        self.finish = tokens.finish_reason or self.finish
        if tokens.policy_version != self.version:
            self.flaw = "mixed-versions"
        elif len(tokens.logprobs) != len(tokens.ids):
            self.flaw = self.flaw or "no-logprobs"


class Core:
    """Answers calls of all dialects and records the turns."""

    def __init__(
        self,
        engine: TokenEngine | TextEngine,
        writer: PoolWriter,
        gate: Gate,
        *,
        renderer: Renderer | None = None,
        stored: Callable[[Turn], Turn] | None = None,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.gate = gate
        self.counts = Counts()
        self._writer = writer
        self._stored = stored

    @property
    def exact(self) -> bool:
        """Whether turns have token ids."""
        return self.renderer is not None

    async def answer(self, session: Session, call: ChatCall) -> AsyncGenerator[Delta]:
        """Stream the model's reply. The last delta has the finish reason and the usage, and comes after the turn is
        stored.

        Raises:
            Refusal: before the first delta.
            EngineError: at any time.
        """
        started = time.monotonic()
        if session.most_turns is not None and session.turns + session.active >= session.most_turns:
            exhausted = BudgetExceeded(
                f"this session has used its {session.most_turns} model calls: end the work here", cause="steps"
            )
            session.failure = session.failure or exhausted  # an earlier failure used up the calls
            raise exhausted
        session.active += 1
        try:
            async with self.gate.turn():
                answer = self._by_ids if self.exact else self._by_text
                async with contextlib.aclosing(answer(session, call, started)) as stream:
                    async for delta in stream:
                        yield delta
        except Exception as error:
            session.failure = error
            raise
        finally:
            session.active -= 1

    def prompt_tokens(self, session: Session, call: ChatCall) -> int:
        """Return the number of ids in the prompt of ``call``. Raises Refusal if the engine takes text."""
        if self.renderer is None:
            raise Refusal(400, "the engine takes text, so tokens cannot be counted: do not request counts")
        return len(self._plan(session, call).prompt)

    def role(self, session: Session, call: ChatCall) -> Role:
        """Return what ``call`` is for (main agent, sub-agent, compaction, unknown)."""
        return self._plan(session, call).role

    def _plan(self, session: Session, call: ChatCall) -> _Plan:
        tools = [] if call.tool_choice == "none" else call.tools
        keyed = tools_key(tools)
        keys = message_keys(call.messages)
        match = session.tree.match(call.messages, keys, keyed, by_ids=self.exact)
        new = list(call.messages[match.used :])
        if match.node is not None:
            new = with_stored_ids(new, match.node.reply, call.messages[match.used - 1])
        role = role_of(session.tree, match, call.messages, keyed, call.role)
        context: tuple[int, ...] = ()
        prompt = array("i") if match.node is None else match.node.all_ids()
        if self.renderer is not None:
            if match.node is None:
                context = self.renderer.prompt(new, tools)
            else:
                context = self.renderer.increment(prompt[len(prompt) - match.node.sampled :], new, tools)
            prompt += ids_array(context)
        return _Plan(match, keys[match.used :], new, context, prompt, keyed, role)

    async def _by_ids(self, session: Session, call: ChatCall, started: float) -> AsyncGenerator[Delta]:
        engine, renderer = cast(TokenEngine, self.engine), self.renderer
        assert renderer is not None
        schema = self._check_supported(call)
        plan = self._plan(session, call)
        sampling = self._sampling(session, call, len(plan.prompt), engine.context_window)
        flaw = "greedy" if sampling.temperature == 0 else None
        if schema is not None:
            sampling, flaw = replace(sampling, json_schema=schema), "constrained"
        progress = _Progress(started, queued=time.monotonic() - started, flaw=flaw)
        decoder = renderer.decoder()
        stops = StopStrings(sampling.stop)
        parser = renderer.parser(call.tools if plan.tools else (), plan.prompt)
        images = [call.images[sha] for sha in _images(call.messages)]  # of the whole prompt
        held: list[Delta] = []
        stream = engine.generate(
            GenerateRequest(plan.prompt, sampling, renderer.stop_ids, session.id, session.adapter, images)
        )
        async with _TurnRecord(self, session, call, plan, progress, sampling, lambda: parser.message) as record:
            async with _closing(stream):
                async for tokens in stream:
                    # The turn must end at exactly the token that completes a stop string or a call.
                    one_by_one = len(tokens.ids) > 1 and (sampling.stop or not call.parallel_tool_calls)
                    for piece in _one_by_one(tokens) if one_by_one else (tokens,):
                        progress.take(piece)
                        text, stopped = stops.push(decoder.push(piece.ids))
                        held = parser.push(text)
                        if stopped or (parser.calls and not call.parallel_tool_calls):
                            progress.finish = "stop"
                        if progress.finish is not None:
                            break  # the held deltas go out below
                        for delta in held:
                            yield delta
                    if progress.finish is not None:
                        break
            if progress.finish is None:
                raise EngineError(f"{engine.name} ended a stream without a finish reason: see its log", retryable=True)
            text, stopped = stops.push(decoder.finish())
            held += parser.push(text if stopped else text + stops.finish())
            held += parser.finish()
            for delta in held[:-1]:
                yield delta
            reason = "tool_calls" if parser.calls and progress.finish == "stop" else progress.finish
            await record.done(reason, parser.malformed)
            usage = Usage(len(plan.prompt), len(progress.sampled), progress.cached)
            session.record_usage(usage, plan.role)
            yield replace(held[-1] if held else Delta(), finish_reason=reason, usage=usage, stop=stops.met)

    async def _by_text(self, session: Session, call: ChatCall, started: float) -> AsyncGenerator[Delta]:
        engine = cast(TextEngine, self.engine)
        plan = self._plan(session, call)
        sampling = _merge(session.sampling, call.sampling)
        progress = _Progress(started, queued=time.monotonic() - started, flaw="text-only")
        reply = ReplyBuilder()
        usage: Usage | None = None
        reason: str | None = None
        async with _TurnRecord(self, session, call, plan, progress, sampling, lambda: reply.message) as record:
            stream = engine.stream(chat_body(replace(call, sampling=sampling)), session=session.id)
            async with _closing(stream):
                async for delta in stream:
                    if progress.first_token is None:
                        progress.first_token = time.monotonic() - started
                    usage = delta.usage or usage
                    reason = delta.finish_reason or reason
                    reply.take(delta)
                    if delta.text or delta.reasoning or delta.calls:
                        yield replace(delta, finish_reason=None, usage=None)
            await record.done(reason or "stop", 0)
            session.record_usage(usage or Usage(), plan.role)
            yield Delta(finish_reason=reason or "stop", usage=usage or Usage())

    def _check_supported(self, call: ChatCall) -> Mapping[str, Any] | None:
        """Return the JSON schema that the reply must match, if any. Raises :class:`Refusal` for unsupported fields."""
        if call.tool_choice not in ("auto", "none"):
            raise _unsupported("tool_choice", f"{call.tool_choice!r} would force tokens: use 'auto' or 'none'")
        for name in ("logit_bias", "presence_penalty", "frequency_penalty"):
            if call.extra.get(name):
                raise _unsupported(name, "would change the sampled distribution, which is trained on: leave it out")
        wanted = call.response_format or {"type": "text"}
        if wanted.get("type") == "text":
            return None
        if not getattr(self.engine, "constrains", False):
            raise _unsupported(
                "response_format", f"is not supported by engine {self.engine.name}: ask for the format in the prompt"
            )
        given = wanted.get("json_schema") if wanted.get("type") == "json_schema" else {"schema": {}}
        schema = given.get("schema") if isinstance(given, Mapping) else None
        if not isinstance(schema, dict) or wanted.get("type") not in ("json_schema", "json_object"):
            raise Refusal(
                400,
                "'response_format' must be text, json_object, or json_schema with a schema: correct it",
                param="response_format",
            )
        return schema

    def _sampling(self, session: Session, call: ChatCall, prompt: int, window: int) -> Sampling:
        """Return the sampling parameters, with ``max_tokens`` limited to the window. Raises ContextLengthExceeded."""
        room = window - prompt
        if room < 1:
            raise ContextLengthExceeded(
                # Agents recognise these words and shorten the conversation.
                f"this model's maximum context length is {window} tokens, but the messages resulted in {prompt} "
                "tokens: reduce the length of the messages"
            )
        sampling = _merge(session.sampling, call.sampling)
        wanted = sampling.max_tokens if sampling.max_tokens is not None else room
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        return replace(sampling, max_tokens=max(1, min(room, wanted)), temperature=temperature)

    async def store(
        self,
        session: Session,
        call: ChatCall,
        plan: _Plan,
        progress: _Progress,
        sampling: Sampling,
        reply: Message,
        reason: str,
        malformed: int,
    ) -> None:
        """Store the turn in the pool, then add it to the session so that others can continue it."""
        node = plan.match.node
        turn = Turn(
            context_ids=plan.context,
            sampled_ids=tuple(progress.sampled),
            logprobs=tuple(progress.logprobs),
            policy_version=progress.version,
            role=plan.role,
            parent=None if node is None else node.index,
            finish_reason=reason,
            flaw=progress.flaw,
            sampling=_set_fields(sampling),
            images=_images(plan.new),
            seconds={
                "queued": progress.queued,
                "first_token": progress.first_token or 0.0,
                "total": time.monotonic() - progress.started,
            },
            malformed_calls=malformed,
            messages=tuple(plan.new),
            reply=reply,
            tools=plan.tools,
            id=call.id,
        )
        images = [call.images[sha] for sha in turn.images]
        if plan.tools and node is None:  # turns that continue it have the same tools
            images.append(Image(plan.tools, tools_json(call.tools), "application/json"))
        kept = turn if self._stored is None else await asyncio.to_thread(self._stored, turn)
        if kept.flaw is None and node is not None and node.incomplete is not None:
            kept = replace(kept, flaw=node.incomplete)
        async with session.lock:
            index = session.turns
            try:
                await self._writer.append(session.id, index, kept, images)
            except EpisodeClosed:  # by another process, such as `clawgym pool close`
                session.closed = True
                raise Refusal(403, "this session is closed: open another one", code="session_closed") from None
            session.turns = index + 1
            if reason not in UNFINISHED:
                grown = session.grow(index, turn, node, plan.keys, plan.new)
                grown.incomplete = kept.flaw if kept.context_ids != turn.context_ids else node and node.incomplete
        self._count(plan, turn)

    def _count(self, plan: _Plan, turn: Turn) -> None:
        counts = self.counts
        counts.turns += 1
        counts.unfinished += turn.finish_reason in UNFINISHED
        counts.flawed += self.exact and turn.flaw is not None
        counts.malformed_calls += turn.malformed_calls
        counts.ambiguous += plan.match.ambiguous
        counts.continued += plan.match.node is not None
        counts.branches += plan.match.node is None or len(plan.match.node.children) > 1
        for rewrite in plan.match.rewrites:
            counts.rewrites[rewrite] = counts.rewrites.get(rewrite, 0) + 1


class _TurnRecord:
    """Records a running turn, also if an error or a cancellation ends it."""

    def __init__(
        self,
        core: Core,
        session: Session,
        call: ChatCall,
        plan: _Plan,
        progress: _Progress,
        sampling: Sampling,
        reply: Callable[[], Message],
    ) -> None:
        self._store = partial(core.store, session, call, plan, progress, sampling)
        self._progress = progress
        self._reply = reply
        self._done = False

    async def __aenter__(self) -> _TurnRecord:
        return self

    async def done(self, reason: str, malformed: int) -> None:
        """Store the finished turn."""
        # Shielded: the agent may disconnect now, but it has already got the reply.
        await asyncio.shield(self._store(self._reply(), reason, malformed))
        self._done = True

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._done or kind is None:
            return
        reason = "error" if issubclass(kind, ClawGymError) else "aborted"
        self._progress.flaw = reason
        try:
            await asyncio.shield(self._store(self._reply(), reason, 0))
        except ClawGymError as failed:
            _log.warning("an unfinished turn could not be recorded: %s", failed)


def _unsupported(field: str, why: str) -> Refusal:
    return Refusal(400, f"'{field}' {why}", code="unsupported_value", param=field)


def _merge(session: Sampling, asked: Sampling) -> Sampling:
    """Return the settings of the session, completed with those of the request."""
    fixed = _set_fields(session)
    return replace(asked, **fixed) if fixed else asked


def _set_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the settings that are not empty."""
    return {name: value for name in _SETTINGS if (value := getattr(sampling, name)) not in (None, ())}


def _images(messages: Sequence[Message]) -> tuple[str, ...]:
    parts = (part for m in messages if isinstance(m["content"], list) for part in m["content"])
    return tuple(part["sha256"] for part in parts if part["type"] == "image")


def _one_by_one(tokens: Tokens) -> list[Tokens]:
    last = len(tokens.ids) - 1
    return [
        replace(
            tokens,
            ids=(token,),
            logprobs=tokens.logprobs[n : n + 1],
            finish_reason=tokens.finish_reason if n == last else None,
        )
        for n, token in enumerate(tokens.ids)
    ]


def _closing(stream: Any) -> contextlib.AbstractAsyncContextManager[Any]:
    return contextlib.aclosing(stream) if hasattr(stream, "aclose") else contextlib.nullcontext()
