"""Save what a persistent shell holds, and set it in another shell: for forks, which hold files alone.

Held: the working folder and the folder stack, variables with their attributes, functions, aliases, options, traps, the
umask, the positional parameters and ``$?``. Not held: jobs, ``$!``, the state of ``$RANDOM``, limits (``ulimit``) and
open files, of which the last are refused.

Invariant: a restored shell has been read again and equals the saved one; otherwise :class:`SandboxError` is raised.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from shlex import quote

from clawgym.errors import SandboxDied, SandboxError
from clawgym.sandbox.protocol import Sandbox, Shell

__all__ = ["ShellState", "restored_shell", "saved_shell"]

_MAX_STATE = 2**18
"""Most bytes of a saved state."""
_SECONDS = 20.0
_BASH_OWN = (
    "BASH|BASHOPTS|BASHPID|BASH_ALIASES|BASH_ARGC|BASH_ARGV|BASH_ARGV0|BASH_CMDS|BASH_COMMAND|BASH_EXECUTION_STRING|"
    "BASH_LINENO|BASH_MONOSECONDS|BASH_REMATCH|BASH_SOURCE|BASH_SUBSHELL|BASH_TRAPSIG|BASH_VERSINFO|BASH_VERSION|"
    "COMP_WORDBREAKS|DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|RANDOM|"
    "SECONDS|SHELLOPTS|SRANDOM|UID|_|__clawgym_*"
)
"""Variables that bash sets itself, as a pattern of ``case``."""
# In a subshell, so that nothing of the shell changes; its exit code is the $? that it began with. Options are read
# first, as some of them (noglob, posix, xtrace) are then switched off. A backslash keeps aliases out.
_SAVE = r"""( __clawgym_r=$? __clawgym_o=
for __clawgym_n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  if [ -f /dev/fd/$__clawgym_n ] || [ -d /dev/fd/$__clawgym_n ] || [ -S /dev/fd/$__clawgym_n ]; then
    __clawgym_o+="$__clawgym_n "
  fi
done
\exec 2>/dev/null
\builtin printf '\0%s\0' NONCE
\builtin printf '%s\0' "$__clawgym_r" "$PWD" "$(\builtin umask)"
\builtin shopt -p; \builtin printf '\0'; \builtin set +o; \builtin printf '\0'
\builtin set +eux +o posix
\builtin trap -p; \builtin printf '\0'; \builtin alias -p; \builtin printf '\0'
\builtin declare -f; \builtin printf '\0'; \builtin declare -F; \builtin printf '\0'
\builtin mapfile -t __clawgym_v < <(\builtin compgen -v)
for __clawgym_n in "${__clawgym_v[@]}"; do
  case $__clawgym_n in OWN) ;; *) \builtin declare -p "$__clawgym_n" ;; esac
done
\builtin printf '\0'
[ $# -eq 0 ] || \builtin printf '%q ' "$@"
\builtin printf '\0'
[ ${#DIRSTACK[@]} -le 1 ] || \builtin printf '%q ' "${DIRSTACK[@]:1}"
\builtin printf '\0%s\0%s\0' "$__clawgym_o" NONCE
\builtin exit "$__clawgym_r" )"""


@dataclass(frozen=True, slots=True)
class ShellState:
    """What a shell held; texts are bash's own, and come from a sandbox."""

    status: str
    cwd: str
    umask: str
    shopt: str
    options: str
    traps: str
    aliases: str
    functions: str
    flags: str
    variables: str
    parameters: str
    folders: str


async def saved_shell(shell: Shell) -> ShellState:
    """Read the state of an idle shell, and leave it as it is.

    Raises:
        SandboxError: the state cannot be read or held: over 256 KiB, open files, redirected output.
        SandboxDied: the sandbox ended.
    """
    nonce = secrets.token_hex(8)
    command = _SAVE.replace("NONCE", nonce).replace("OWN", _BASH_OWN)
    done = await shell.run(command, timeout=_SECONDS, max_output=_MAX_STATE)
    mark = f"\0{nonce}\0".encode()
    parts = done.output.partition(mark)[2].split(b"\0")
    if (
        done.omitted_bytes
        or done.timed_out
        or len(parts) != 15
        or parts[13] != nonce.encode()
        or not parts[0].isdigit()
    ):
        raise SandboxError(
            "the shell's state cannot be read: do not redirect its own output (exec >FILE), and hold at most 256 KiB "
            "in variables and functions"
        )
    *texts, descriptors = (part.decode("utf-8", "surrogateescape") for part in parts[:13])
    if descriptors:
        numbers = ", ".join(word for word in descriptors.split() if word.isdigit())
        raise SandboxError(f"the shell has open files (descriptors {numbers}): close them first (exec N>&-)")
    return ShellState(*texts)


async def restored_shell(sandbox: Sandbox, state: ShellState) -> Shell:
    """Start a shell that holds ``state``.

    Raises:
        SandboxError: the state cannot be set here, for example because its working folder was removed.
        SandboxDied: the sandbox ended.
    """
    shell = await sandbox.shell()
    await shell.run(_script(state), timeout=_SECONDS)
    try:
        found = await saved_shell(shell)
    except SandboxDied:
        raise
    except SandboxError as error:
        raise SandboxError(f"the shell's state was not restored: {error}") from None
    if found != state:
        what = ", ".join(name for name in ShellState.__slots__ if getattr(found, name) != getattr(state, name))
        raise SandboxError(f"the shell's state was not restored ({what}): take the snapshot before it is changed so")
    return shell


def _script(state: ShellState) -> str:
    """The commands that set ``state`` in a new shell. Each ``eval`` is parsed after what is before it was run."""
    lines = [
        f"\\eval {quote(state.shopt)}",
        f"\\builtin cd {quote(state.cwd)} || exit",
        f"for __clawgym_n in $(\\compgen -v); do case $__clawgym_n in {_BASH_OWN}) ;; *) \\unset -v $__clawgym_n ;; "
        "esac; done",
        "\\unset -v __clawgym_n",
        f"\\set -- {state.folders}",
        'while [ $# -gt 0 ]; do \\builtin pushd -n "${!#}"; \\set -- "${@:1:$#-1}"; done',
        f"\\eval {quote(state.variables)}",
        f"\\builtin umask {quote(state.umask)}",
        f"\\builtin set -- {state.parameters}",
        f"\\eval {quote(state.traps)}",
        # Not before this: functions may have the names of builtins.
        f"\\eval {quote(state.functions)}",
        f"\\eval {quote(_builtin(state.flags))}",
        f"\\eval {quote(state.aliases)}",
        # Last, and with the status: errexit would end the shell, xtrace would show these lines.
        f"\\eval {quote(_builtin(state.options))}"
        + (f" && __clawgym_rc {state.status}" if state.status != "0" else ""),
    ]
    return "{ " + "\n".join(lines) + "\n} >/dev/null 2>&1"


def _builtin(commands: str) -> str:
    return "\n".join(f"\\builtin {line}" for line in commands.splitlines())
