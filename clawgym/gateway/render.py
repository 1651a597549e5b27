"""Render conversations to token ids, and parse sampled ids to messages.

Invariants: special tokens in untrusted text are encoded as plain text. The ids of :meth:`Renderer.increment` depend
only on the new messages and the end of the previous turn, not on the history, so a stored history is never rendered
again.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import orjson

from clawgym.engines.folders import load_tokenizer, model_folder, read_settings
from clawgym.errors import EngineError, GatewayError, MissingDependency
from clawgym.gateway._check import parser_of_calls, sees_images, template_problems
from clawgym.gateway.calls import Message, Refusal
from clawgym.gateway.decode import Alphabet, Decoder
from clawgym.gateway.parsers import ReplyParser
from clawgym.gateway.template import Guard, Template, for_template
from clawgym.gateway.tool_calls import CallParser
from clawgym.registry import parsers

__all__ = ["Renderer"]

_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that the parser of replies reads as text, even if the tokenizer treats them as special."""
_LONG = 2000
"""Fewest characters of a message whose ids are cached: many sessions share a system prompt."""
_SHORT = 4000
"""Most characters of an input, as JSON, whose ids are kept."""
_USUAL_TOOLS = 2**17
"""Most bytes of tool definitions, as JSON, whose guarded texts are kept."""
_MOST_KNOWN = 1024
"""Inputs whose ids are kept: a few megabytes."""
_QUESTION: Message = {"role": "user", "content": "x"}
_TOOL: Message = {"role": "tool", "tool_call_id": "call0", "content": "x"}


class Renderer:
    """The tokenizer and the chat template of one model."""

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        chat_template: str | None = None,
        call_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a tokenizer and its chat template.

        Args:
            tokenizer: a model folder, or a name on the hub.
            chat_template: replaces the template of the tokenizer.
            call_parser: a name of ``clawgym list parsers``; by default the first parser that reads the calls which the
                template writes.
            template_kwargs: variables of the template.

        Raises:
            GatewayError: the tokenizer or the template cannot be used.
            MissingDependency: transformers is not installed.
        """
        self.tokenizer = str(tokenizer)
        folder, loaded = _load(tokenizer)
        source = chat_template or _template_of(loaded, self.tokenizer)
        self._backend = loaded.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template = Template(source, {**loaded.special_tokens_map, **(template_kwargs or {})})
        self.call_parser = call_parser or parser_of_calls(self.template)
        """The name of the tool-call parser, or None if no known parser reads the calls of the template."""
        self._calls: CallParser | None = parsers.make(self.call_parser) if self.call_parser else None
        seen = {*_MARKERS, self._calls.open, self._calls.close} if self._calls else {*_MARKERS}
        added = {i: token for i, token in self._backend.get_added_tokens_decoder().items() if token.content.strip()}
        named = {t.content for t in added.values() if t.content in source and not t.content.isalnum()}
        structure = named | {t.content for t in added.values() if t.special or t.content in seen}
        hidden = {i for i, t in added.items() if t.special and t.content not in seen}
        self._guard = Guard(structure)
        self._guard_replies = Guard(t.content for i, t in added.items() if i in hidden)
        self._guard_replies.mark = self._guard.mark
        self._texts = {t.content: i for i, t in added.items()}
        self._sentinel = f"reply{self._guard.mark[::-1]}"
        self._stand_in_name = f"call{self._guard.mark[::-1]}"
        self._end = self._turn_end()
        stop = set(_eos_of(loaded, folder))
        if self._end is not None:
            stop.add(self._texts[self._end])
        self.stop_ids = frozenset(stop)
        """Ids that end a reply: those of the generation config, and the one with which the template ends a turn."""
        if not self.stop_ids:
            raise GatewayError(f"{self.tokenizer}: no token ends a reply: add eos_token_id to generation_config.json")
        ends = {text: i for text, i in self._texts.items() if i in stop}
        self._first_end = re.compile("|".join(map(re.escape, ends)))
        self._ends_here = frozenset(i for text, i in ends.items() if text in source or text == self._end)
        """End tokens that the template writes itself; after a sampled one, no other end is added."""
        self._alphabet = Alphabet(self._backend, frozenset(hidden | stop))
        self._cuts = self._can_cut()
        self._known: dict[bytes, array[int]] = {}
        self._cached = lru_cache(maxsize=64)(self._encoded)
        self._guard_json = lru_cache(maxsize=64)(lambda tools: self._guard.value(orjson.loads(tools)))
        self._opens_reasoning = lru_cache(maxsize=64)(
            lambda last: self._backend.decode(last, skip_special_tokens=False).rstrip().endswith("<think>")
        )
        self._takes_images = sees_images(self.template)
        self._needs_calls = self._tail_needs_calls()
        self._shows_results = self._tail_shows_results()
        self._needs_tools = self._tail_needs_tools()

    # Messages to ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Return the ids of a whole conversation and of the opening of the reply.

        Raises :class:`~clawgym.gateway.calls.Refusal` if the template refuses the conversation.
        """

        def ids() -> list[int]:
            return self._encode(self.template(self._converted(messages), self._guarded(tools)))

        return self._remembered([messages, tools], ids)

    def increment(
        self,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the ids that follow a reply: its end (unless it was sampled), ``messages``, the opening of the next
        reply.

        ``sampled_ids`` are the stored ids of the reply. Raises as :meth:`prompt` does.
        """
        last = list(sampled_ids[-1:])
        tools = tools if self._needs_tools else ()

        def ids() -> list[int]:
            after = self._after(messages, self._guarded(tools))
            end = self._first_end.search(after)
            if end and last and self._stands_for(last[0], end.group()):
                # Encode with the end in front and remove it: some tokenizers encode the start of a text differently.
                return self._encode(after[end.start() :])[1:]
            return self._encode(after)

        return self._remembered([last, messages, tools], ids)

    def _remembered(self, about: list[Any], ids: Callable[[], list[int]]) -> tuple[int, ...]:
        """``ids()``, or what it gave for the same input before: attempts at a task begin alike, and commands often
        print the same. Long inputs are not kept."""
        try:
            text = orjson.dumps(about)
        except TypeError:  # such as whole numbers of more than 64 bits
            return tuple(ids())
        if len(text) > _SHORT:
            return tuple(ids())
        found = self._known.get(text)
        if found is None:
            found = array("i", ids())
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[text] = found
        return tuple(found)

    def reply(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the ids of ``reply`` to ``messages``, including its end, as a model would have sampled them.

        For supervised training on texts; sampled ids are in the pool. Raises as :meth:`prompt` does.
        """
        history, guarded = self._converted(messages), self._guarded(tools)
        before = self.template(history, guarded)
        after = self.template([*history, *self._converted([reply])], guarded, generation=False)
        if not after.startswith(before):
            raise Refusal(
                400,
                "the chat template renders this reply differently after its own opening: use another template",
                param="messages",
            )
        text = after[len(before) :]
        end = self._first_end.search(text)
        return tuple(self._encode(text[: end.end()] if end else text))

    def _stands_for(self, sampled: int, end: str) -> bool:
        """Whether a reply that ended with the id ``sampled`` needs no further ``end``."""
        return sampled == self._texts[end] or (end == self._end and sampled in self._ends_here)

    def _after(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return what the template renders after the text of a reply that is followed by ``messages``."""
        if not self._shows_results and any(message["role"] == "tool" for message in messages):
            raise Refusal(
                400,
                "this model's chat template does not render tool results after a reply: use another template",
                param="messages",
            )
        called = 0
        while self._needs_calls and called < len(messages) and messages[called]["role"] == "tool":
            called += 1
        after = self._after_stand_in(messages, tools, called)
        end = self._first_end.search(after) if called else None
        return after[end.start() :] if end else after

    def _after_stand_in(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], called: int) -> str:
        """Return what is rendered after a stand-in reply with calls for the first ``called`` of ``messages``."""
        stand_in: Message = {"role": "assistant", "content": self._sentinel}
        if called:
            function = {"name": self._stand_in_name, "arguments": {"x": self._sentinel}}
            calls = [{"id": m["tool_call_id"], "type": "function", "function": function} for m in messages[:called]]
            stand_in["tool_calls"] = calls
        text = self.template([_QUESTION, stand_in, *self._converted(messages)], tools)
        _, found, after = text.rpartition(self._sentinel)
        if not found:
            raise GatewayError("the chat template drops replies, so no turn can continue another: use another template")
        return after

    def _converted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        converted: list[dict[str, Any]] = []
        for n, message in enumerate(messages):
            plain = for_template(message)
            # Replies may contain the model's own markers; other texts may not contain any special token.
            guard = self._guard_replies if plain["role"] == "assistant" else self._guard
            if isinstance(plain["content"], list) and not self._takes_images:
                at = f"messages[{n}]"
                raise Refusal(400, f"'{at}' contains an image, and this model takes none: leave it out", param=at)
            plain["content"] = guard.value(plain["content"])
            if "reasoning_content" in plain:
                plain["reasoning_content"] = guard.text(plain["reasoning_content"])
            try:
                for name in ("tool_calls", "tool_call_id"):
                    if name in plain:
                        plain[name] = self._guard.value(plain[name])
            except RecursionError:  # arguments are text, so the depth of the request's JSON does not bound them
                at = f"messages[{n}]"
                raise Refusal(400, f"'{at}' has arguments nested too deeply: flatten them", param=at) from None
            converted.append(plain)
        return converted

    def _guarded(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        """``tools`` with guarded texts. Those of a usual size are kept, since sessions share them."""
        try:
            text = orjson.dumps(tools) if tools else b""
        except TypeError:
            text = b""
        return self._guard_json(text) if 0 < len(text) <= _USUAL_TOOLS else self._guard.value(tools)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a plain text."""
        return tuple(self._encoded(text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._guard.split(text):
            turns = piece.split(self._cuts) if self._cuts else [piece]
            for turn in turns[:-1]:
                turn += self._cuts
                ids += self._cached(turn) if len(turn) > _LONG else self._encoded(turn)
            ids += self._encoded(turns[-1])
        return ids

    def _encoded(self, text: str) -> array[int]:
        return array("i", self._backend.encode(text, add_special_tokens=False).ids)

    def _can_cut(self) -> str:
        """Return the end-of-turn token if texts can be split after it without changing their ids, else ''."""
        if self._end is None:
            return ""
        end = self._texts[self._end]
        token = self._backend.get_added_tokens_decoder()[end]
        if token.lstrip or token.rstrip or token.single_word or token.normalized:
            return ""
        encode = self._backend.encode
        for text in ("a", " a", "\n", "\n a", "é", "."):
            if encode(self._end + text, add_special_tokens=False).ids != [
                end,
                *encode(text, add_special_tokens=False).ids,
            ]:
                return ""
        return self._end

    # Ids to messages

    def decoder(self) -> Decoder:
        """Return a decoder for the ids of one reply."""
        return Decoder(self._alphabet)

    def parser(self, tools: Sequence[Mapping[str, Any]] = (), prompt: Sequence[int] = ()) -> ReplyParser:
        """Return a parser for the text of one reply to the ids ``prompt``. Without ``tools``, calls are text."""
        return ReplyParser(self._calls, tools, reasoning=self._opens_reasoning(tuple(prompt[-8:])))

    # Identity and checks

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of tokenizer, template and its variables."""
        about = [self._backend.to_str(), self.template.source, self.template.variables]
        return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return what identifies this renderer in a run manifest."""
        template = hashlib.sha256(self.template.source.encode()).hexdigest()
        return {"renderer_sha256": self.digest, "chat_template_sha256": template, "call_style": self.call_parser}

    def check(self) -> list[str]:
        """Return the problems of the chat template and the tokenizer in words; empty if there are none."""
        problems = template_problems(self.template)
        if self.call_parser is None:
            known = ", ".join(parsers.names())
            problems.append(f"writes calls that no known parser reads ({known}): calls stay text")
        if not self._shows_results:
            problems.append("does not render tool results after a reply of a continued conversation")
        if self._end is None:
            problems.append("ends a reply without a token: the following text may be tokenized differently in training")
        text = "Größe: 3 < 4\n\n  def f(x): return {'a': \"b\"}\t\U0001f600"
        if self._backend.decode(self._encode(text), skip_special_tokens=False).strip() != text:
            problems.append("the tokenizer does not preserve all text: tools may get other arguments")
        return problems

    def _turn_end(self) -> str | None:
        """Return the token with which the template ends a reply, or None."""
        said = {"role": "assistant", "content": self._sentinel}
        after = self.template([_QUESTION, said], (), generation=False).partition(self._sentinel)[2]
        tokens = sorted(self._texts, key=len, reverse=True)
        match = re.search("|".join(map(re.escape, tokens)), after) if tokens else None
        return match.group() if match else None

    def _tail_needs_calls(self) -> bool:
        """Whether tool results are rendered differently after a reply with calls."""
        try:
            with_calls = self._after_stand_in([_TOOL], (), 1)
        except Refusal:
            return False  # the template does not support tools, or not in this form
        try:
            plain = self._after_stand_in([_TOOL], (), 0)
        except Refusal:
            return True
        return not with_calls.endswith(plain.partition(self._end)[2] if self._end else plain)

    def _tail_shows_results(self) -> bool:
        """Whether a tool result is rendered after a stand-in reply, without the stand-in's name."""
        self._shows_results = True
        content = f"result{self._guard.mark[::-1]}"
        try:
            after = self._after([{**_TOOL, "content": content}], ())
        except Refusal:
            return False
        return content in after and self._stand_in_name not in after

    def _tail_needs_tools(self) -> bool:
        """Whether tool definitions are rendered after a reply."""
        tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
        for messages in ([_QUESTION], [_TOOL]):
            try:
                if self._after(messages, ()) != self._after(messages, [tool]):
                    return True
            except Refusal:
                continue
        return False


def _load(tokenizer: str | Path) -> tuple[Path, Any]:
    """Return the model folder and the tokenizer loaded from it."""
    try:
        folder = model_folder(tokenizer, weights=False)
        loaded = load_tokenizer(folder)
    except EngineError as error:
        raise GatewayError(str(error)) from error
    except ImportError as error:
        raise MissingDependency(
            f"the gateway renders with transformers ({error}): pip install 'clawgym[gateway]'"
        ) from error
    if not hasattr(loaded, "backend_tokenizer"):
        raise GatewayError(f"{tokenizer}: not a fast tokenizer: save it with a tokenizer.json")
    return folder, loaded


def _template_of(loaded: Any, name: str) -> str:
    try:
        return loaded.get_chat_template(tools=[{}])
    except ValueError as error:
        raise GatewayError(f"{name}: has no chat template ({error}): give one with chat_template") from error


def _eos_of(loaded: Any, folder: Path) -> set[int]:
    """Return the ids that end a reply according to the generation config and the tokenizer."""
    found = {loaded.eos_token_id} - {None}
    file = folder / "generation_config.json"
    if not file.exists():
        return found
    try:
        eos = read_settings(file).get("eos_token_id")
    except EngineError as error:
        raise GatewayError(str(error)) from error
    return found | set(eos if isinstance(eos, list) else [eos] if isinstance(eos, int) else [])
