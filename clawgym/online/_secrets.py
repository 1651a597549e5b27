"""Finds keys, tokens and passwords in a text.

A key or token of a well-known format is found anywhere (:func:`clawgym.credentials.secret_shapes`). Any other value is
found only behind a name, such as ``api_key=`` or ``the password is``, because texts of agents are full of hashes and
ids that look as random as keys.

Invariant: the time is linear in the length of the text. Every repetition is bounded, or cannot begin again within what
it has matched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from clawgym.credentials import looks_random, secret_shapes

__all__ = ["secrets"]

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = "-----END "
_MAX_PEM = 16_384
"""The characters in which the end of a private key is looked for: an RSA key of 8,192 bits has 6,400."""
_PEM_BODY = re.compile(r"[A-Za-z0-9+/=\s]{24,}")
_TAIL = re.compile(r"[A-Za-z0-9_-]{0,200}")
"""What may follow the part of a token that a detector knows: some look at the first characters only."""

_NAMED = re.compile(
    r"(?:(?P<strong>passwor[dt]|passwd|passphrase|passcode|pwd|kennwort|mot de passe|contrase[nñ]a)"
    r"|(?:api|access|auth|account|private|secret|signing|encryption|master|service)[ _-]?key|secret|token|credential)"
    r"(?=(?P<suffix>[\w-]{0,24})[\\\"'`*)\]]{0,4}(?P<verb>(?: [\w'-]{1,16}){0,4} (?:is|was|ist|est|es)(?=[ :]))?"
    r"(?P<sign>[ \t]{0,8}(?::=|=>|={1,3}|[:>|]| to )?)(?P<opening>[ \t\\\"'`*]{0,8}))",
    re.IGNORECASE,
)
"""The name of a secret, and what stands between it and its value. Another name may begin in between."""
_OPTION = re.compile(r"--[\w-]{0,48}\Z")
_NO_SECRET_AFTER = re.compile(
    r"[_-]?(?:id|name|type|ur[il]|path|file|count|limit|hash|sha\d*|md5|digest|salt|field|length|len|arn|endpoint|ttl"
    r"|version|pattern|policy)s?\Z",
    re.IGNORECASE,
)
"""Ends of names like ``token_count`` and ``secret_name``."""
_NO_SECRET_BEFORE = re.compile(
    r"(?:next|page|continuation|sync|cursor|eos|bos|pad|cls|sep|mask|unk|special|idempotency)[ _-]?(?:page)?[ _-]?\Z",
    re.IGNORECASE,
)
"""Beginnings of names like ``next_page_token`` and ``pad_token``."""
_QUOTED = {quote: re.compile(rf"[^\n\\{quote}]{{1,256}}(?=\\?{quote})") for quote in "\"'`"}
_BARE = re.compile(r"[^\s\"'`<>|,;\\(){}\[\]]{1,256}")
_TOKEN = re.compile(r"[\w+/.~-]{16,}={0,2}")
_BEARER = re.compile(
    r"(?:\bbearer|authorization[\\\"']{0,2}[ \t]?[:=][ \t]?[\\\"']{0,2}basic)[ \t]{1,8}(?P<value>[\w+/.~-]{16,}={0,2})",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"://[^\s/:@\"'<>]{0,64}:(?P<value>[^\s/@\"'<>]{3,128})@")
_CURL = re.compile(
    r"\b(?:curl|wget|https?)\b[^\n]{0,200}? (?:-u|--user)[ =][\"']?[^\s:\"']{1,64}:(?P<value>[^\s\"']{6,128})"
)

_WORDS = re.compile(r"(?:[A-Za-z]{1,15}\d{0,4}|[vV]?\d{1,4})(?:[-_./](?:[A-Za-z]{1,15}\d{0,4}|[vV]?\d{1,4}))*+")
"""Names, paths and versions, such as ``prod/my-secret-v2``."""
_WORD, _NUMBER = re.compile(r"[A-Z]?[a-z]{3,}"), re.compile(r"\d+")
_PATH = re.compile(r"[~.]{0,2}/[\w.-]{1,64}/")
_PLACEHOLDER = re.compile(
    r"example|placeholder|your|changeme|change-me|dummy|redacted|removed|xxxx|12345678|abcdefgh|0000000|\.\.\.|…",
    re.IGNORECASE,
)
_WEAK_PASSWORD = re.compile(r"passw|secret|test|admin|demo|1234|abc123|qwerty|foo|bar", re.IGNORECASE)
"""Passwords that are written where any would do."""
_NO_PASSWORD = re.compile(
    r"[/~$%.@#<]|\.{1,2}/|https?:|(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*\Z|\d+[-+]?[a-z]+\Z"
    r"|(?:sha|md|aes|utf|rsa|base|argon|pbkdf|ascii|iso|rfc)-?\d",
    re.IGNORECASE,
)
"""Paths, variables, attributes such as ``args.password2``, lengths such as ``8-characters``, and algorithms."""


def secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in ``text``, in no order; they may overlap.

    Raises ImportError without detect-secrets.
    """
    for match in _PEM.finditer(text):
        yield from _private_key(text, match)
    for _, pattern in secret_shapes():
        for match in pattern.finditer(text):
            tail = _TAIL.match(text, match.end())
            start, stop = match.start(), tail.end() if tail else match.end()
            value = text[start:stop]
            if not text[max(0, start - 1) : start].isalnum() and looks_random(value[:512]) and not _dull(value[:512]):
                yield start, stop
    for match in _NAMED.finditer(text):
        yield from _named(text, match)
    for match in _BEARER.finditer(text):
        if _is_token(match["value"]):
            yield match.span("value")
    for pattern in (_IN_ADDRESS, _CURL):
        for match in pattern.finditer(text):
            if _is_password(match["value"]) or _is_token(match["value"]):
                yield match.span("value")


def _private_key(text: str, head: re.Match[str]) -> Iterator[tuple[int, int]]:
    """The whole block of a private key; without an end, what looks like its body."""
    end = text.find(_PEM_END, head.end(), head.end() + _MAX_PEM)
    if end >= 0 and _PEM_BODY.search(text, head.end(), end):
        close = text.find("-----", end + len(_PEM_END), end + 80)
        yield head.start(), end + len(_PEM_END) if close < 0 else close + 5
    elif body := _PEM_BODY.match(text, head.end(), head.end() + _MAX_PEM):
        yield head.start(), body.end()


def _named(text: str, match: re.Match[str]) -> Iterator[tuple[int, int]]:
    """The value behind a name, if it is a secret."""
    before = text[max(0, match.start() - 50) : match.start()]
    if _NO_SECRET_AFTER.search(match["suffix"]) or _NO_SECRET_BEFORE.search(before):
        return
    if not (match["verb"] or match["sign"].strip() or (match["sign"] and _OPTION.search(before))):
        return
    start = match.end("opening")
    quoted = _QUOTED.get(text[start - 1])
    value = quoted.match(text, start) if quoted else None
    value = value or _BARE.match(text, start)
    if value is None or text[value.end() : value.end() + 1] in ("(", "["):  # a call, or an element of something
        return
    found = value.group() if quoted else value.group().rstrip(".,:!?*")
    if match["strong"] and _is_password(found) and not ("/" in found and match["strong"].lower() == "pwd"):
        yield start, start + len(found)
        return
    token = _TOKEN.match(text, start)
    # Behind "&" is the next parameter of an address.
    whole = token and (token.end() >= start + len(found) or text[token.end()] == "&")
    if token and whole and _is_token(token.group()):
        yield start, token.end()


def _is_token(value: str) -> bool:
    """Whether ``value`` looks like a key that a program made."""
    return len(value) >= 16 and looks_random(value) and not _dull(value)


def _is_password(value: str) -> bool:
    """Whether ``value`` looks like a password: at least 6 characters, with letters and digits."""
    return (
        6 <= len(value) <= 256
        and not _WEAK_PASSWORD.search(value)
        and not re.search(r"\s", value)
        and any(c.isalpha() for c in value)
        and any(c.isdigit() for c in value)
        and not _NO_PASSWORD.match(value)
        and not _PLACEHOLDER.search(value)
    )


def _dull(value: str) -> bool:
    """Whether ``value`` is made of words, is a path, or stands for a value."""
    if _WORDS.fullmatch(value) or _PATH.match(value) or _PLACEHOLDER.search(value):
        return True
    in_words = sum(map(len, _WORD.findall(value)))
    return len(_NUMBER.findall(value)) == 1 and in_words >= 0.6 * len(value)  # an identifier, such as base64KeyOfUser
