"""Verifiers that compare an answer, with math-verify for mathematics; and the layer with that library."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from clawgym.errors import ClawGymError
from clawgym.records import Layer, TaskFile, VerifierSpec
from clawgym.tasks import layers
from clawgym.verifiers import answers, checks, state
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["ANSWER_CHECK", "MATH_FOLDER", "checker", "math_layer", "math_verifier"]

MATH_FOLDER = "/opt/layers/math"
"""The folder in a sandbox with math-verify and its dependency sympy."""

_CHECK_PY = '''\
"""Grades one instance of {name}: prints named checks in [0, 1] as one JSON object."""

import json

import clawgym_answers as ca
import clawgym_checks as cg
{imports}
DATA = json.loads(r"""
{data}
""")
checks = cg.Checks()

{body}
checks.finish()
'''

ANSWER_CHECK = """
LIBRARY = ca.library(DATA["library"])

@checks("answer")
def _():
    return ca.equal(ca.answer_in(ca.final_message()), DATA["answer"], LIBRARY)
"""


def checker(name: str, data: dict[str, Any], body: str, *, world: bool = False) -> VerifierSpec:
    """A verifier whose ``check.py`` runs ``body``.

    ``body`` can use ``DATA`` (``data`` from JSON), ``checks``, and the helpers ``ca``
    (:mod:`clawgym.verifiers.answers`) and ``cg`` (:mod:`clawgym.verifiers.checks`); with ``world`` also ``cs``
    (:mod:`clawgym.verifiers.state`)."""
    helpers = (checks, answers, state)
    imports = "import clawgym_state as cs\n" if world else ""
    text = json.dumps(data, sort_keys=True)
    check = _CHECK_PY.format(name=name, imports=imports, data=text, body=body.strip("\n"))
    files = (
        TaskFile("reward.sh", standard_reward_sh(), executable=True),
        TaskFile("check.py", check.encode()),
        *(
            TaskFile(f"clawgym_{module.__name__.rpartition('.')[2]}.py", Path(module.__file__ or ""))
            for module in helpers[: 3 if world else 2]
        ),
    )
    return VerifierSpec(protocol="reward_sh", files=files)


def math_verifier(name: str, answer: str) -> VerifierSpec:
    """A verifier that compares the answer in the closing message with ``answer``. The task needs :func:`math_layer`."""
    return checker(name, {"answer": answer, "library": MATH_FOLDER}, ANSWER_CHECK)


@cache
def math_layer() -> tuple[Layer, str | None]:
    """The layer with math-verify, which is prepared at first use; and the reason if it cannot be prepared, or None. The
    digest is the same in both cases."""
    lock = layers.read_lock(resources.files("clawgym.tasks").joinpath("math_lock.json").read_text("utf-8"))
    if layers.cached(lock) is None:
        print("preparing math-verify on this machine (once) ...", file=sys.stderr)
    try:
        return layers.prepare(lock), None
    except ClawGymError as error:
        return Layer(lock.name, lock.digest, layers.layer_folder(lock)), f"math-verify is not available: {error}"
