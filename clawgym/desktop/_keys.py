"""Key names as X keysyms (X.Org's keysymdef.h). A character's keysym is its code point: Latin-1, or Unicode + 2^24."""

from __future__ import annotations

from clawgym.errors import SandboxError

__all__ = ["KEYSYMS", "keysym_of"]

KEYSYMS = {
    "backspace": 0xFF08,
    "tab": 0xFF09,
    "enter": 0xFF0D,
    "return": 0xFF0D,
    "esc": 0xFF1B,
    "escape": 0xFF1B,
    "delete": 0xFFFF,
    "insert": 0xFF63,
    "home": 0xFF50,
    "end": 0xFF57,
    "left": 0xFF51,
    "up": 0xFF52,
    "right": 0xFF53,
    "down": 0xFF54,
    "pageup": 0xFF55,
    "pagedown": 0xFF56,
    "space": 0x20,
    "menu": 0xFF67,
    "shift": 0xFFE1,
    "ctrl": 0xFFE3,
    "control": 0xFFE3,
    "alt": 0xFFE9,
    "meta": 0xFFEB,
    "super": 0xFFEB,
    "win": 0xFFEB,
    **{f"f{n}": 0xFFBD + n for n in range(1, 13)},
}
"""Names of non-character keys, in lower case, without ``-`` and ``_``."""


def keysym_of(name: str) -> int:
    """The keysym of a key name or a character. Raises :class:`SandboxError` if there is none.

    >>> hex(keysym_of("Page_Down")), hex(keysym_of("é")), hex(keysym_of("→"))
    ('0xff56', '0xe9', '0x1002192')
    """
    if len(name) == 1:
        code = ord(name)
        if name in "\n\t":
            return KEYSYMS["enter" if name == "\n" else "tab"]
        if name.isprintable():
            return code if code < 0x100 else 0x01000000 + code
        raise SandboxError(f"the character {name!r} cannot be typed: leave it out")
    found = KEYSYMS.get(name.lower().replace("_", "").replace("-", ""))
    if found is None:
        raise SandboxError(f"there is no key {name[:40]!r}: use one character, or one of {', '.join(KEYSYMS)}")
    return found
