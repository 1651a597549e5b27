"""What OpenClaw tells the model beside the user's own words: reactions to replies (thumbs and other emoji), and
heartbeats.

OpenClaw sends no reaction by itself. It puts a line before the user's next message of the same session, or before the
next heartbeat::

    System: [2026-11-26 07:21:58 UTC] Signal reaction added: 👍 by Person msg 1795677718779 from +15550100001

    Conversation info (untrusted metadata): {"message_id": "1795677719798", ...}

    And how many lakes?

The id is that of the bot's message in the channel, which the model's API does not know. Ids of Telegram, Signal, Slack
and Discord grow with time, so the reply is the last one to a message with a smaller id. With other channels it is the
last reply.

Invariant: only such lines at the beginning of a user message count, and not those that a model wrote to a sub-agent.
OpenClaw (2026.4.1) rewrites text of other people that looks like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from clawgym.gateway.calls import text_of
from clawgym.records import Turn
from clawgym.records.judge import Message

__all__ = ["is_heartbeat", "reactions"]

_HEARTBEAT = "HEARTBEAT_OK"
"""What OpenClaw's default heartbeat asks for if nothing is to be done. OpenClaw then takes it out of its history."""
_CHANNELS = "Discord|Matrix|Mattermost|Signal|Slack|Telegram"
_EVENT = re.compile(
    rf"(?:{_CHANNELS}) reaction (?P<what>added|removed): (?P<emoji>\S+) by .*? (?:msg|post) (?P<id>\S+)"
)
_TAPBACK = re.compile(  # BlueBubbles
    r".+? (?:reacted with (?P<added>\S+)|removed (?P<removed>\S+) reaction) \[\[reply_to:(?P<id>[^\]]+)\]\]"
)
_LINE = re.compile(r"System: (?:\[[^\]]*\] )?(?P<event>.*)")
_ASKED = re.compile(r'\AConversation info \(untrusted metadata\):\n```json\n\{\n\s*"message_id": "(?P<id>[^"]+)"', re.M)
_NUMBER = re.compile(r"\d{1,40}(?:\.\d{1,40})?")
_TINTS = re.compile("[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]")
_GOOD = frozenset(
    """
    👍 ❤ 🔥 👏 🎉 🙏 👌 💯 ✅ 🤩 🥰
    +1 thumbsup heart fire clap tada pray ok_hand 100 white_check_mark star-struck smiling_face_with_3_hearts
    """.split()  # noqa: SIM905
)
_BAD = frozenset("👎 💩 🤮 🤬 ❌ 😡 -1 thumbsdown poop hankey face_vomiting x rage".split())  # noqa: SIM905


def reactions(turns: Sequence[Turn]) -> dict[int, int]:
    """Index of a turn -> 1 or -1, what the user's last reaction to its reply says. Other emoji say nothing."""
    found: dict[int, int] = {}
    for index, turn in enumerate(turns):
        for place, message in enumerate(() if turn.role == "subagent" else turn.messages):
            for added, emoji, id in _events(_said(message)):
                reply, score = _reply(turns, index, place, id), _score(emoji)
                if reply is None or not score:
                    continue
                if added:
                    found[reply] = score
                elif found.get(reply) == score:
                    del found[reply]
    return found


def is_heartbeat(messages: Sequence[Message]) -> bool:
    """Whether the last message is a heartbeat, which nobody wrote."""
    return bool(messages) and _HEARTBEAT in _said(messages[-1])


def _events(text: str) -> Iterator[tuple[bool, str, str]]:
    """(whether it was added, emoji, id of the message) of each reaction before a user message."""
    for line in text.split("\n\n", 1)[0].splitlines():
        told = _LINE.fullmatch(line)
        if told is None:
            return
        if event := _EVENT.match(told["event"]):
            yield event["what"] == "added", event["emoji"], event["id"]
        elif event := _TAPBACK.match(told["event"]):
            yield event["added"] is not None, event["added"] or event["removed"], event["id"]


def _score(emoji: str) -> int:
    name = _TINTS.sub("", emoji).strip(":").split("::", 1)[0]  # Slack: +1::skin-tone-3
    return (name in _GOOD) - (name in _BAD)


def _reply(turns: Sequence[Turn], index: int, place: int, id: str) -> int | None:
    """The turn whose reply has the channel's ``id``, as known before message ``place`` of turn ``index``."""
    path = [index]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    asked: Decimal | None = None
    replies: list[tuple[int, Decimal | None]] = []
    for turn in reversed(path):
        here = turns[turn].messages[:place] if turn == index else turns[turn].messages
        for message in here:
            asked = _id(_said(message)) or asked
            if message.get("role") == "assistant" and (known := _stored(turns[:index], message)) is not None:
                replies.append((known, asked))
        if turn != index:
            replies.append((turn, asked))
    own = Decimal(id) if _NUMBER.fullmatch(id) else None
    if own is None or all(to is None for _, to in replies):
        return replies[-1][0] if replies else None
    return next((turn for turn, to in reversed(replies) if to is not None and to < own), None)


def _stored(turns: Sequence[Turn], message: Message) -> int | None:
    """The last turn with this reply, for a history that continues no turn."""
    text = text_of(message).strip()
    same = (n for n in reversed(range(len(turns))) if str(turns[n].reply.get("content") or "").strip() == text)
    return next(same, None) if text else None


def _id(text: str) -> Decimal | None:
    """The channel's id of a user message."""
    found = next(filter(None, map(_ASKED.match, (text, text.split("\n\n", 1)[-1]))), None)
    return Decimal(found["id"]) if found is not None and _NUMBER.fullmatch(found["id"]) else None


def _said(message: Message) -> str:
    """The text of a user message."""
    return text_of(message) if message.get("role") == "user" else ""
