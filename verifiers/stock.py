"""The ``reward.sh`` that every public ClawGym task ships: the mean of what its checker prints."""

from __future__ import annotations

from clawgym.records import DEFAULT_WORKSPACE

__all__ = ["STOCK_HOOK", "STOCK_REWARD_SH", "TESTS_REWARD_SH", "hook_in", "stock_reward_sh"]

STOCK_HOOK = f"python3 {DEFAULT_WORKSPACE}/reward/check.py {DEFAULT_WORKSPACE}"
"""The command whose output is averaged."""

# Byte for byte: the text is part of a task's content hash.
_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n\n"
_TAIL = (
    " | python3 -c 'import json, sys; raw = sys.stdin.read().strip(); data = json.loads(raw); "
    "print(sum(float(v) for v in data.values()) / len(data) if isinstance(data, dict) and data "
    "else float(data) if isinstance(data, (int, float)) else 0.0)'\n"
)


def stock_reward_sh(hook: str = STOCK_HOOK) -> bytes:
    """The script: mean of the JSON object that ``hook`` prints, or its number."""
    return f"{_HEAD}{hook}{_TAIL}".encode()


def hook_in(script: bytes) -> str | None:
    """The hook that :func:`stock_reward_sh` would make ``script`` of; ``None`` for any other script."""
    text = script.decode("utf-8", "replace")
    if not (text.startswith(_HEAD) and text.endswith(_TAIL)):
        return None
    return text[len(_HEAD) : -len(_TAIL)] or None


STOCK_REWARD_SH = stock_reward_sh().decode()


TESTS_REWARD_SH = """\
#!/usr/bin/env bash
set -euo pipefail

here="$(cd "$(dirname "$0")" && pwd)"
exec python3 -I -S -B "$here/run_tests.py" "$(dirname "$here")"
"""
"""The ``reward.sh`` of a task whose verifier is tests (:mod:`clawgym.tasks.swe.verifier`): 1 if all passed, else 0."""
