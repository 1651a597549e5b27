"""Finds and removes what looks like a secret: keys, tokens and passwords.

:func:`find_secrets` names the places in a file that is to be published. It also uses the detectors of detect-secrets,
which the extras ``hub`` and ``serve`` install, as does :func:`secret_shapes`. :func:`without_secrets` takes secrets out
of a text that is stored. It uses only the patterns of this module, so that a run manifest is the same whatever is
installed.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from clawgym.tars import open_tar

__all__ = ["find_secrets", "looks_random", "secret_shapes", "texts_of", "without_secrets"]

REMOVED = "[removed]"
"""What :func:`without_secrets` writes for a secret."""

_SHAPES = {
    "a Hugging Face token": r"hf_[A-Za-z0-9]{20,}",
    "an API key (sk-...)": r"sk-[A-Za-z0-9_-]{20,}",
    "an AWS access key": r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    "a GitHub token": r"(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})",
    "a Slack token": r"xox[abprs]-[A-Za-z0-9-]{10,}",
    "a Google key": r"AIza[A-Za-z0-9_-]{35}",
    "a JSON web token": r"eyJ[A-Za-z0-9_-]{10,1000}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
}
_TOKENS = {kind: rf"(?<![A-Za-z0-9_]){pattern}" for kind, pattern in _SHAPES.items()}
_SHAPED = {kind: re.compile(pattern) for kind, pattern in _TOKENS.items()}
_AROUND = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    "a password in an address": re.compile(r"://[^/\s:@\"']+:[^/\s@\"']{3,}@"),
}
_DETECTORS = {
    "aws": "AWSKeyDetector",
    "azure_storage_key": "AzureStorageKeyDetector",
    "discord": "DiscordBotTokenDetector",
    "gitlab_token": "GitLabTokenDetector",
    "pypi_token": "PypiTokenDetector",
    "sendgrid": "SendGridDetector",
    "slack": "SlackDetector",
    "square_oauth": "SquareOAuthDetector",
    "stripe": "StripeDetector",
    "telegram_token": "TelegramBotTokenDetector",
    "twilio": "TwilioKeyDetector",
}
"""Module in ``detect_secrets.plugins`` -> its detector, of those that recognize a token by its shape alone."""

_TAKEN = re.compile(
    "|".join(_TOKENS.values())
    # More than is found: shorter keys, keys that an endpoint shows with asterisks, and what is always a secret.
    + r"|\b(?:sk|hf|ghp|xox[bp])[-_][\w-]{12,}|\bsk-[\w-]*\*[\w*-]*|Bearer\s+\S+|(?<=://)[^/\s@]+@"
    + r"|-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*-----|\Z)",
    re.DOTALL,
)
_ALWAYS = re.compile(r"api_?key|secret|password|authorization|credential|(^|_)token$", re.IGNORECASE)
"""Names whose values are secrets, whatever they look like."""
_NAME = re.compile(r"(?:^|[_.-])(?:key|keys|secrets?|tokens?|passwords?|passwd|credentials?|auth)$", re.IGNORECASE)
"""Names whose values are secrets if they look random."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LINE = re.compile(r"^[\s|`>-]*(?:export\s+)?`?([A-Za-z][\w.-]*)`?\s*[=:|]\s*[\"'`]?([\w+/=.-]{16,})", re.MULTILINE)
_VALUE = re.compile(r"[\w+/=.-]{16,}")
_MAX_UNPACKED = 512 * 2**20
_BITS = 3.0
"""Bits of entropy per character above which a value counts as random: 32 random hex digits have at least 3.4."""


def without_secrets(text: str, name: str = "") -> str:
    """``text`` with :data:`REMOVED` for each secret in it. ``name``: the name of the setting whose value it is."""
    return REMOVED if text and _ALWAYS.search(name) else _TAKEN.sub(REMOVED, text)


def find_secrets(name: str, text: str) -> list[str]:
    """Search ``text``, the content of the file ``name``. Needs the extra ``hub``.

    Well-known formats are found anywhere; random values are found if their key names a secret.

    Returns:
        ``NAME, place: what it looks like`` for each finding, never the value.
    """
    found = [
        f"{name}, line {text.count(chr(10), 0, match.start()) + 1}: looks like {kind}"
        for kind, pattern in (*_AROUND.items(), *secret_shapes())
        for match in pattern.finditer(text)
    ]
    for key, value in (*_LINE.findall(text), *_leaves(_parsed(name, text))):
        if _NAME.search(_CAMEL.sub("_", key)) and _VALUE.fullmatch(value) and looks_random(value):
            found.append(f"{name}, {key}: looks like the value of a secret")
    return list(dict.fromkeys(found))


def texts_of(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    """The (name, text) pairs to search in a file: of a ``.tar.gz``, one for each file in it.

    Raises ValueError for an archive that is damaged or larger than 512 MiB.
    """
    if not name.endswith((".tar.gz", ".tgz")):
        yield name, data.decode("utf-8", "replace")
        return
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            tar = packed.read(_MAX_UNPACKED + 1)
        if len(tar) > _MAX_UNPACKED:
            raise ValueError(f"larger than {_MAX_UNPACKED >> 20} MiB")
        with open_tar(tar) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                text = f"{member.name}\n{member.linkname}\n" + (file.read().decode("utf-8", "replace") if file else "")
                yield f"{name}: {member.name[:200]!r}", text
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"a damaged archive ({error})") from error


@cache
def secret_shapes() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """The keys and tokens of well-known formats: what each is called, and its pattern.

    Raises ImportError without detect-secrets.
    """
    from importlib import import_module

    made = [getattr(import_module(f"detect_secrets.plugins.{module}"), name) for module, name in _DETECTORS.items()]
    detected = ((f"a secret ({one.secret_type})", pattern) for one in made for pattern in one.denylist)
    return (*_SHAPED.items(), *detected)


def looks_random(value: str) -> bool:
    """Whether ``value`` has letters, digits and at least :data:`_BITS` of entropy per character."""
    counts = Counter(value)
    bits = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return bits >= _BITS and any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _parsed(name: str, text: str) -> Any:
    import yaml

    try:
        if name.endswith(".json"):
            return json.loads(text)
        return yaml.safe_load(text) if name.endswith((".yaml", ".yml")) else None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every string in ``value``, with its path of keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, where)
    elif isinstance(value, str):
        yield where, value
