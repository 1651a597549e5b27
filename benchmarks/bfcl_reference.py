"""Judges replies with BFCL's own checker. Run by another interpreter, whose path has the package's wheel and mpmath.

    python -S bfcl_reference.py < cases.jsonl > verdicts.jsonl

A case has ``category``, ``row`` (of the package's data), ``truth`` and ``turns``: by turn, the calls of each reply, as
[name, arguments]. A list of models, which only says that names are written with ``_`` for ``.``, is replaced: it would
import the clients of all providers.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from typing import Any

MODEL = "model"
config: Any = types.ModuleType("bfcl_eval.constants.model_config")
config.MODEL_CONFIG_MAPPING = {MODEL: types.SimpleNamespace(underscore_to_dot=True)}
sys.modules[config.__name__] = config

from bfcl_eval.constants.enums import Language  # noqa: E402  # pyright: ignore[reportMissingImports]
from bfcl_eval.eval_checker.ast_eval.ast_checker import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    ast_checker,
)
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    multi_turn_checker,
)

LANGUAGES = {"simple_java": Language.JAVA, "simple_javascript": Language.JAVASCRIPT}


def verdict(case: dict[str, Any], number: int) -> bool | str:
    """Whether the set's own checker accepts the case; the name of an exception that it raises."""
    category, row, truth, turns = case["category"], case["row"], case["truth"], case["turns"]
    if "multi_turn" in category:
        if len(turns) != len(truth):
            return False
        written = [
            [[f"{n}({','.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in reply] for reply in turn if reply]
            for turn in turns
        ]
        return multi_turn_checker(written, truth, row, category, f"{MODEL}{number}")["valid"]
    calls = [{name: arguments} for name, arguments in turns[0][0]] if turns[0] else []
    if "relevance" in category:
        return bool(calls) != ("irrelevance" in category)
    language = LANGUAGES.get(category, Language.PYTHON)
    return ast_checker(row["function"], calls, truth, language, category, MODEL)["valid"]


def main() -> None:
    """One verdict for each line."""
    out = sys.stdout
    for number, line in enumerate(sys.stdin):
        with contextlib.redirect_stdout(sys.stderr):
            try:
                said = verdict(json.loads(line), number)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), file=out, flush=True)


if __name__ == "__main__":
    main()
