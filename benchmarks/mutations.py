"""Sample small mutations over all rooms and count those that the tests notice.

    CLAWGYM_REQUIRE=namespace,chroot \\
        .venv/bin/python benchmarks/mutations.py --count 320 --seed 23 --out runs/mutations

Works in a copy of the tree, so that nothing else sees a mutation. For each room the tests that mirror it run once under
coverage, which tells the tests that execute a line. Each mutation (cosmic-ray's operators) then runs against the tests
that execute its line, nearest first, until one fails. A mutation is killed by a failure or by running out of time. A
file without measured lines (it runs in a process of its own) is tried against the tests that ``NEAR`` names, or all
tests of its room. As root on Linux the tests run in a pid namespace of their own: no mutation of what kills processes
reaches another, and nothing outlives a run. Name in ``CLAWGYM_REQUIRE`` what works here, or a sandbox that a mutation
broke is a skipped test, and no failed one.

Results are kept in ``--out``: run the same command again to resume; give another folder where the sources changed.
``--since main`` samples only lines that changed.
Survivors that change no behaviour are listed in ``equivalent_mutations.json`` with the reason.
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutations.json")
_MIRRORED = (
    *("agents", "cli", "desktop", "engines", "envs", "evaluation", "gateway", "live", "pool", "records", "redteam"),
    *("online", "reporting", "rewards", "rollout", "sandbox", "simulation", "tools"),
)
ROOMS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (f"clawgym/{name}", (f"tests/{name}",)) for name in _MIRRORED},
    "hub": ("clawgym/hub", ("tests/test_hub.py",)),
    "clawgym": ("clawgym/*.py", ("tests/test_statistics.py", "tests/evaluation", "tests/pool")),
    "tasks": ("tasks", ("tests/tasks",)),
    "verifiers": ("verifiers", ("tests/verifiers",)),
    "leaderboards": ("leaderboards", ("tests/leaderboards",)),
    "trainers": (
        "trainers/*.py",
        (
            *(
                f"tests/trainers/{p}"
                for p in (
                    "test_algorithms.py",
                    "test_batching.py",
                    "test_algorithms_properties.py",
                    "test_config.py",
                    "test_credit.py",
                )
            ),
        ),
    ),
    "trainers.common": ("trainers/common", ("tests/trainers/common", "tests/trainers/local")),
    "trainers.local": ("trainers/local", ("tests/trainers/local",)),
    "trainers.verl": ("trainers/verl", ("tests/trainers/verl",)),
}
"""A room's sources, and the tests that mirror it."""
FLOOR = 8
"""Mutations of a small room."""
_HERE = ("-k", "not ray and not docker")
_ESCAPE = "tests/redteam/test_escape.py::"
_CONFORMANCE = tuple(
    f"tests/sandbox/test_conformance_{name}.py" for name in ("shell", "limits", "files", "listen", "connect", "mounts")
)
_IN_SANDBOXES = (*_CONFORMANCE, "tests/sandbox/test_what_is_shown.py", "-k", "not ray and not docker and not installed")
_OWNERS = (
    "tests/sandbox/test_leases.py",
    *_CONFORMANCE[:2],
    "tests/invariants/test_nothing_left.py::test_killed_owner_of_sandboxes",
    "tests/invariants/test_nothing_left.py::test_killed_owner_and_supervisor",
    "tests/invariants/test_hostile_workspaces.py::test_what_cannot_be_removed_stops_nobody",
    *_HERE,
)
_SWE = ("tests/tasks/test_swe_rows.py", "tests/invariants/test_tests_hold.py")


def _mirrored(sources: str, tests: str, names: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """For each file below ``sources``, the test files below ``tests`` that ``names`` has for it."""
    return {f"{sources}/{file}.py": tuple(f"{tests}/{test}.py" for test in of.split()) for file, of in names.items()}


NEAR: dict[str, tuple[str, ...]] = {
    **{
        f"clawgym/sandbox/{name}.py": (*_CONFORMANCE, *_HERE)
        for name in ("inside/guest", "linux/syscalls", "inside/become", "chroot/rootdir")
    },
    **{
        f"clawgym/sandbox/{name}.py": _IN_SANDBOXES
        for name in (
            "namespace/unshare",
            "linux/supervisor",
            "linux/zygote",
            "linux/rootfs",
            "extract",
            "inside/trees",
        )
    },
    **{
        f"clawgym/sandbox/{name}.py": _OWNERS
        for name in ("leases", "chroot/jail", "chroot/clones", "linux/supervised", "chroot/backend")
    },
    "clawgym/sandbox/linux/cgroups.py": ("tests/sandbox/test_cgroups.py", _CONFORMANCE[1], *_HERE),
    "clawgym/sandbox/linux/seccomp.py": ("tests/sandbox/test_seccomp.py", _CONFORMANCE[1], *_HERE),
    "clawgym/sandbox/docker/removal.py": ("tests/sandbox/test_docker.py",),
    "clawgym/sandbox/docker/container.py": ("tests/sandbox/test_docker.py", *_CONFORMANCE, "-k", "docker"),
    "clawgym/sandbox/ray/layers.py": ("tests/sandbox/test_ray.py", _CONFORMANCE[2], "-k", "ray"),
    "clawgym/envs/_runtime.py": (
        "tests/invariants/test_nothing_left.py::test_a_script_that_never_closes_ends_quietly",
        "tests/envs/test_terminal.py",
        *_HERE,
    ),
    "clawgym/redteam/escape/": (
        f"{_ESCAPE}test_every_row_has_probes_and_every_probe_a_row",
        f"{_ESCAPE}test_what_a_probe_asks_of_the_kernel_is_what_it_says",
        f"{_ESCAPE}test_without_a_sandbox_the_probes_reach_the_host",
        f"{_ESCAPE}test_a_bare_bubblewrap_lets_through_what_it_is_known_to",
        f"{_ESCAPE}test_a_backend_that_connects_nowhere_gets_no_credit_for_it",
        f"{_ESCAPE}test_a_broken_promise_is_found",
        f"{_ESCAPE}test_a_backend_stops_what_it_claims_to_stop[namespace]",
    ),
    "clawgym/redteam/exploits/tests_run.py": ("tests/invariants/test_tests_hold.py",),
    "clawgym/redteam/exploits/": ("tests/redteam/test_exploits.py",),
    "verifiers/_tests_runner.py": _SWE,
    "verifiers/_tests_session.py": _SWE,
    **_mirrored(
        "tasks",
        "tests/tasks",
        {
            "formats/_files": "test_clawgym_format test_task_files test_harbor",
            "formats/_osworld_setup": "test_osworld",
            "formats/_tables": "test_rows",
            "formats/harbor": "test_harbor",
            "formats/rows": "test_rows test_math_rows",
            "formats/swe_rows": "test_swe_rows",
            "layers": "test_layers test_tools_and_layers",
            "curation/mutable": "test_rules test_properties test_clawgym_format",
            "worlds/servers/_session": "worlds/test_interpreter worlds/test_tools",
            "worlds/servers/clawgym_tools": "worlds/test_tools worlds/test_worlds",
            "worlds/servers/interpreter": "worlds/test_interpreter",
            "worlds/servers/world_mail": "worlds/test_worlds worlds/test_tools packs/test_toolcall_basic",
            "sets": "test_sets test_cli_tasks",
            **{
                f"worlds/sites/{name}": "worlds/test_sites packs/test_gui_basic"
                for name in ["_fields", "_page", "forms", "mail", "server", "settings", "shop", "table"]
            },
            "swe/patching": "swe/test_patching swe/test_make",
            "swe/words": "swe/test_words swe/test_make",
            "swe/make": "swe/test_make packs/test_swe_basic",
            "swe/repository": "test_swe_rows swe/test_make",
            "swe/scripts": "swe/test_make packs/test_swe_basic",
            "swe/sources": "swe/test_make test_swe_rows packs/test_swe_basic",
        },
    ),
    **_mirrored(
        "clawgym",
        "tests",
        {
            "agents/__init__": "agents/test_make_agent",
            "agents/_protocols": "agents/test_text_protocol agents/test_tool_loop",
            "agents/tool_loop": "agents/test_tool_loop",
            "agents/blackbox/agent": "agents/blackbox/test_agent",
            "agents/blackbox/sandboxes": "agents/blackbox/test_sandboxes agents/blackbox/test_agent",
            "agents/programs/_npm": "agents/openclaw/test_install",
            "agents/openclaw/_tools": "agents/openclaw/test_tools",
            "agents/programs/_tree": "agents/openclaw/test_install",
            "agents/openclaw/dense": "agents/openclaw/test_dense",
            "desktop/actions": "desktop/test_actions",
            "desktop/browser": "desktop/test_browser desktop/test_web",
            "desktop/desktop": "desktop/test_desktop",
            "desktop/relay": "desktop/test_web desktop/test_browser desktop/test_watch",
            "desktop/screen": "desktop/test_x11 desktop/test_desktop",
            "desktop/spares": "desktop/test_spares",
            "envs/_human": "envs/test_terminal envs/test_toolcall",
            "envs/_single": "envs/test_terminal envs/test_write_an_environment",
            "envs/_tasks": "envs/test_terminal",
            "envs/_vector": "envs/test_terminal envs/test_many envs/test_toolcall",
            "envs/_runner": "envs/test_terminal envs/test_toolcall",
            "envs/swe": "envs/test_swe",
            "live/page": "live/test_live",
            "live/registry": "live/test_live",
            "hub/_card": "test_hub",
            "hub/_checkpoint": "test_hub",
            "hub/push": "test_hub cli/test_push",
            "cli/attack": "redteam/test_exploits redteam/test_escape",
            "cli/doctor": "cli/test_cli",
            "cli/gateway": "cli/test_gateway cli/test_openclaw",
            "cli/ledger": "invariants/test_ledger",
            "cli/tasks": "tasks/test_cli_tasks cli/test_cli",
            "tools/__init__": "tools/test_served tools/test_shell",
            "tools/_arguments": "tools/test_arguments",
            "tools/_server": "tools/test_served invariants/test_tools_hold",
            "tools/computer": "desktop/test_seen_by_a_model desktop/test_web",
            "tools/served": "tools/test_served invariants/test_tools_hold",
            "records/task": "records/test_records evaluation/test_runner",
            "records/run_folder": "records/test_run_folder",
        },
    ),
}
"""What pytest is given for files that run in processes of their own, where nothing is measured, and for those whose
room is slow to measure. A name that ends with ``/`` is a folder's."""
FILE_SECONDS, MUTANT_SECONDS, TEST_SECONDS = 600, 300, 20.0
"""Limits: measuring one test file, trying one mutation, and the tests chosen for one (as they took when measured)."""
LONG = (
    "redteam/test_escape.py",
    "redteam/test_exploits.py",
    "gateway/test_openclaw",
    "local/test_programs.py",
    "local/test_beside_vllm.py",
    "pool/test_fetch_machine.py",
    "test_vllm_real.py",
    "verl/test_end_to_end.py",
)
"""Whole programs, which are not measured: what they execute, shorter tests should."""


@dataclass(frozen=True)
class Mutation:
    """One small change, by cosmic-ray's names."""

    room: str
    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.operator}:{self.occurrence}:{self.before}"


# -- the sample


def files_of(room: str) -> list[Path]:
    where = ROOMS[room][0]
    found = ROOT.glob(where) if where.endswith(".py") else (ROOT / where).rglob("*.py")
    return sorted(path for path in found if "/packs/" not in path.as_posix())


def _said_only(tree: ast.AST) -> set[int]:
    """Lines that only say something: messages, annotations of fields, ``__all__``, ``__repr__``."""
    lines: set[int] = set()

    def leave_out(node: ast.AST | None) -> None:
        if node is not None and hasattr(node, "lineno"):
            lines.update(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]

    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            leave_out(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name in ("__repr__", "__str__"):
                leave_out(node)
        elif (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)) or (
            isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets)
        ):
            leave_out(node)
    return lines


def _annotations(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand: ``int | None`` is no computation. Aliases of types count too."""
    spans = []
    for node in ast.walk(tree):
        for held in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if held is not None:
                spans.append(((held.lineno, held.col_offset), (held.end_lineno, held.end_col_offset)))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id[:1].isupper():
            spans.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and "None" in ast.unparse(node.right):
            spans.append(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))
    return spans


def mutations_of(room: str, path: Path, only: set[int] | None) -> Iterator[list[Mutation]]:
    """All mutations of a file, those of one place together."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = path.read_text()
    tree = ast.parse(source)
    left_out, types = _said_only(tree), _annotations(tree)
    nodes = list(ast_nodes(get_ast(source)))
    lines = source.splitlines()
    places: dict[tuple[Any, str], list[tuple[str, int]]] = collections.defaultdict(list)
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue
        positions = (place for node in nodes for place in kind().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if start[0] in left_out or (only is not None and start[0] not in only):
                continue
            if any(begin <= start < end for begin, end in types):
                continue
            family = re.sub(r"^core/(ReplaceBinaryOperator|ReplaceComparisonOperator|[A-Za-z]+).*", r"\1", name)
            places[(start, family)].append((name, occurrence))
    for (start, _), found in sorted(places.items()):
        yield [
            Mutation(room, path.relative_to(ROOT).as_posix(), start[0], name, n, lines[start[0] - 1].strip(), "")
            for name, n in found
        ]


def after(mutation: Mutation) -> tuple[str, str]:
    """The mutated source, and its line."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / mutation.file).read_text()
    mutated = mutate_code(source, get_operator(mutation.operator)(), mutation.occurrence)
    assert mutated is not None
    changed = [b for a, b in zip(source.splitlines(), mutated.splitlines(), strict=False) if a != b]
    return mutated, (changed or [""])[0].strip()


def sample(count: int, seed: int, since: str | None) -> list[Mutation]:
    """A seeded sample: places are drawn in proportion to a room's size with a minimum, then one mutation of each."""
    changed = changed_lines(since) if since else None
    places: dict[str, list[list[Mutation]]] = {}
    for room in ROOMS:
        places[room] = []
        for path in files_of(room):
            only = None if changed is None else changed.get(path.relative_to(ROOT).as_posix(), set())
            if only is None or only:
                places[room] += mutations_of(room, path, only)
    everything = sum(map(len, places.values())) or 1
    drawn: list[Mutation] = []
    for room, found in places.items():
        chance = random.Random(f"{seed}-{room}")
        wanted = min(len(found), max(FLOOR if since is None else 1, round(count * len(found) / everything)))
        picked = chance.sample(found, len(found))
        for place in picked:
            if wanted == 0:
                break
            mutation = chance.choice(place)
            try:
                mutated, line = after(mutation)
                with warnings.catch_warnings(action="ignore"):
                    compile(mutated, mutation.file, "exec")
            except (SyntaxError, AttributeError):  # cosmic-ray knows no exceptions with a dot in their names
                continue
            drawn.append(Mutation(**{**asdict(mutation), "after": line}))
            wanted -= 1
    return drawn


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def changed_lines(base: str) -> dict[str, set[int]]:
    """The lines of each file that differ from ``base``."""
    found: dict[str, set[int]] = collections.defaultdict(set)
    name = ""
    for line in _git("diff", "-U0", base, "--", "*.py").splitlines():
        if line.startswith("+++ b/"):
            name = line[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, size = int(match[1]), int(match[2] or 1)
            found[name].update(range(start, start + size))
    return found


# -- the copy, and what its tests execute


def copied(to: Path) -> Path:
    """A copy of the tree as it is now, with an environment of its own, which imports the copy."""
    tree = to / "tree"
    tree.mkdir(exist_ok=True)
    for old in tree.iterdir():
        if old.name not in (".venv", ".git"):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    left_out = {".git", ".lint", "runs", "__pycache__", ".hypothesis", ".pytest_cache"}
    if (tree / ".venv" / "copied").exists():
        left_out.add(".venv")
    shutil.copytree(
        ROOT, tree, symlinks=True, dirs_exist_ok=True,
        ignore=lambda folder, names: {n for n in names if n in left_out},
    )  # fmt: skip
    if ".venv" not in left_out:
        for path in [*tree.glob(".venv/bin/*"), *tree.glob(".venv/lib/*/site-packages/__editable__*")]:
            if path.is_file() and not path.is_symlink() and str(ROOT).encode() in (data := path.read_bytes())[:200_000]:
                path.write_bytes(data.replace(f"{ROOT}/".encode(), f"{tree}/".encode()))
        (tree / ".venv" / "copied").touch()
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    return tree


PLUGIN = """
import json, os, pytest, coverage
_cov = coverage.Coverage(
    data_file=os.environ["MAP_DATA"], source=json.loads(os.environ["MAP_SOURCE"]), context="import"
)
_cov.start()
_seen = open(os.environ["MAP_TESTS"], "a")

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    _cov.switch_context(item.nodeid)
    yield

def pytest_runtest_logreport(report):
    if report.when == "call":
        _seen.write(json.dumps([report.nodeid, report.outcome, report.duration]) + "\\n")
        _seen.flush()

def pytest_sessionfinish(session):
    _cov.stop()
    _cov.save()
"""

SERVER = """
import importlib, json, os, signal, sys, time

for name in (
    "pytest _pytest.main pytest_asyncio.plugin pytest_timeout xdist.plugin pytest_rerunfailures hypothesis.strategies"
    " _hypothesis_pytestplugin coverage numpy torch pydantic aiohttp.web httpx jinja2 transformers tokenizers PIL.Image"
    " gymnasium mcp.server safetensors.torch yaml rich.console typer psutil orjson sqlalchemy peft"
).split():
    try:
        importlib.import_module(name)
    except ImportError:
        pass
assert "clawgym" not in sys.modules
with os.fdopen(os.dup(0)) as asked, os.fdopen(os.dup(1), "w") as said:
    for line in asked:
        about = json.loads(line)
        child = os.fork()
        if not child:
            os.setsid()
            log = os.open(about["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            asked.close()
            said.close()
            os.environ.update(about["environment"])
            sys.path[:0] = about["path"]
            sys.argv = [".venv/bin/pytest", *about["argv"]]
            importlib.invalidate_caches()
            import pytest
            status = 70
            try:
                status = int(pytest.main(about["argv"]))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        end, status = time.monotonic() + about["seconds"], None
        while status is None and time.monotonic() < end:
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
            else:
                time.sleep(0.05)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if status is None:
            os.waitpid(child, 0)
        print(json.dumps(status), file=said, flush=True)
"""


class Tests:
    """Runs pytest in the copy, each time in a fork of a process that has imported what is slow to import.

    Nothing of the library is imported before the fork. As root that process is in a pid namespace of its own."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        argv = [".venv/bin/python", "-c", SERVER]
        if sys.platform == "linux" and os.geteuid() == 0:
            argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *argv]
        self._server = subprocess.Popen(
            argv, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threads}
        )

    def run(
        self,
        arguments: list[str],
        seconds: float,
        log: Path,
        environment: dict[str, str] | None = None,
        path: list[str] | None = None,
    ) -> int | None:
        """Returns pytest's exit status; None where time ran out."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        argv = ["-q", "-p", "no:cacheprovider", "--no-header", *arguments]
        about = {"argv": argv, "path": path or [], "log": str(log), "seconds": seconds}
        about["environment"] = {"COLUMNS": "500", **(environment or {})}
        print(json.dumps(about), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@dataclass
class Executed:
    """Which tests execute a line."""

    lines: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]

    def tests(self, mutation: Mutation) -> tuple[list[str], str]:
        """The tests to run, nearest first, and how they were found."""
        of_file = self.lines.get(mutation.file, {})
        tests = {t for t in of_file.get(mutation.line, ()) if t in self.seconds}
        how = "line"
        if not tests and (given := near(mutation.file)):
            return list(given), "near"
        if not tests:
            tests, how = {t for found in of_file.values() for t in found if t in self.seconds}, "file"
        if not tests:
            tests, how = set(self.seconds), "room"
        if not tests:
            raise SystemExit(f"{mutation.file}: nothing is known to test it: name its tests in NEAR")
        stem = Path(mutation.file).stem.strip("_")
        ordered = sorted(tests, key=lambda t: (stem not in t.partition("::")[0], self.seconds[t]))
        chosen, spent = [], 0.0
        for test in ordered:
            if spent + self.seconds[test] < TEST_SECONDS or not chosen:
                chosen.append(test)
                spent += self.seconds[test]
        return chosen[:150], how


def near(file: str) -> tuple[str, ...] | None:
    """What :data:`NEAR` has for a file."""
    for name, given in NEAR.items():
        if file == name or (name[-1] == "/" and file.startswith(name)):
            return given
    return None


def test_files(room: str) -> list[Path]:
    """The test files that mirror a room."""
    found: list[Path] = []
    for name in ROOMS[room][1]:
        path = ROOT / name
        found += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [path for path in found if not any(part in path.as_posix() for part in LONG)]


def measured(room: str, tests: Tests, out: Path) -> Executed:
    """Run each test file of a room once under coverage; kept until the file changes."""
    import coverage

    plugin, maps = out / "plugin", out / "maps" / room
    plugin.mkdir(exist_ok=True)
    maps.mkdir(parents=True, exist_ok=True)
    (plugin / "_executed.py").write_text(PLUGIN)
    source = json.dumps([str(tests.tree / ROOMS[room][0].removesuffix("/*.py"))])
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for path in test_files(room):
        name = path.relative_to(ROOT).as_posix()
        kept = maps / f"{hashlib.sha256(name.encode() + (tests.tree / name).read_bytes()).hexdigest()[:16]}.coverage"
        took = kept.with_suffix(".tests")
        if not took.exists():
            began = time.monotonic()
            environment = {"MAP_DATA": str(kept), "MAP_TESTS": str(took), "MAP_SOURCE": source}
            tests.run(
                ["-p", "_executed", f"--timeout={TEST_SECONDS * 4:g}", name], FILE_SECONDS,
                kept.with_suffix(".log"), environment, [str(plugin)],
            )  # fmt: skip
            took.touch()
            print(f"measured {name} in {time.monotonic() - began:.0f} s", flush=True)
        for line in took.read_text().splitlines():
            test, outcome, duration = json.loads(line)
            if outcome == "passed":
                seconds[test] = duration
        if kept.exists():
            held = coverage.CoverageData(basename=str(kept))
            held.read()
            for executed in held.measured_files():
                of_file = lines[Path(executed).relative_to(tests.tree).as_posix()]
                for number, contexts in held.contexts_by_lineno(executed).items():
                    of_file[number].update(c.partition("|")[2] for c in contexts)  # "import|" and a test
    return Executed(lines, seconds)


def tried(mutation: Mutation, running: Tests, executed: Executed, out: Path) -> dict[str, Any]:
    """Apply one mutation, run its tests, and take it back."""
    mutated, _ = after(mutation)
    path = running.tree / mutation.file
    tests, how = executed.tests(mutation)
    began = time.monotonic()
    log = out / "last.log"
    while True:
        try:
            _write(path, mutated)
            given = ["-x", "-p", "no:rerunfailures", "--timeout=90", *tests]
            status = running.run(given, MUTANT_SECONDS, log)
        finally:
            _write(path, (ROOT / mutation.file).read_text())
        text = log.read_text(errors="replace")
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*)$", text, re.MULTILINE)
        if "ERROR: file or directory not found" in text:
            raise SystemExit(f"{mutation.file}: {text[-300:]}\nmend NEAR")
        named = re.match(r"\S+::.*?(?= - |$)", failed[0]) if status == 1 and failed else None
        if not named or named[0] in executed.seconds or _passes(named[0], running, out):
            break
        tests += ["--deselect", named[0]]  # it fails here without the mutation too
    result = "survived" if status in (0, 5) else "killed"
    return {
        **asdict(mutation),
        "result": result,
        "by": "time" if status is None else (failed or [text[-300:]])[0] if result == "killed" else "",
        "tests": len(tests),
        "chosen_by": how,
        "seconds": round(time.monotonic() - began, 1),
    }


def _passes(test: str, running: Tests, out: Path) -> bool:
    """Whether a test passes without a mutation, here and today; kept for the next time."""
    kept = out / "unmutated.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if test not in known:
        known[test] = running.run(["--timeout=90", test], MUTANT_SECONDS, out / "unmutated.log") == 0
        kept.write_text(json.dumps(known, indent=1))
    return known[test]


_WRITTEN = [int(time.time()) + 10]


def _write(path: Path, text: str) -> None:
    """Write with a time that no earlier bytecode has."""
    path.write_text(text)
    _WRITTEN[0] += 1
    os.utime(path, (_WRITTEN[0], _WRITTEN[0]))


def _drawn(out: Path, count: int, seed: int, since: str | None) -> list[Mutation]:
    """The sample of this folder: drawn once."""
    kept = out / "sample.jsonl"
    if not kept.exists():
        drawn = sample(count, seed, since)
        kept.write_text("".join(json.dumps(asdict(m)) + "\n" for m in drawn))
    return [Mutation(**json.loads(line)) for line in kept.read_text().splitlines()]


# -- the table


def equivalent() -> dict[str, str]:
    """Why mutations change no behaviour, by key."""
    return {entry["key"]: entry["why"] for entry in json.loads(EQUIVALENT.read_text())} if EQUIVALENT.exists() else {}


def table(results: list[dict[str, Any]]) -> str:
    known = equivalent()
    rows, total = [], collections.Counter[str]()
    for room in ROOMS:
        found = [r for r in results if r["room"] == room]
        if not found:
            continue
        count = collections.Counter(
            "equivalent" if r["result"] == "survived" and key_of(r) in known else r["result"] for r in found
        )
        total.update(count)
        rows.append(_row(room, count))
    rows.append(_row("**all**", total))
    head = "| room | mutations | killed | equivalent | survived | killed of those that change something |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def _row(name: str, count: collections.Counter[str]) -> str:
    real = count["killed"] + count["survived"]
    share = f"{100 * count['killed'] / real:.0f} %" if real else "-"
    numbers = f"{count.total()} | {count['killed']} | {count['equivalent']} | {count['survived']}"
    return f"| {name} | {numbers} | {share} |"


def key_of(result: dict[str, Any]) -> str:
    return f"{result['file']}:{result['operator']}:{result['occurrence']}:{result['before']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--since", help="only lines that differ from this commit")
    parser.add_argument("--rooms", nargs="*", default=[], choices=ROOMS, help="only these")
    parser.add_argument("--again", action="store_true", help="try survivors again, with the tests as they are now")
    parser.add_argument("--table", action="store_true", help="only print the table of what has been tried")
    parser.add_argument("--out", type=Path, default=Path("runs/mutations"))
    given = parser.parse_args()
    base = out = given.out.resolve()
    if given.since:  # what has changed is another thing at each commit
        commits = (_git("rev-parse", "--short", name) for name in (given.since, "HEAD"))
        out = base / "since-{}-{}".format(*commits)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.jsonl"
    results = {key_of(r): r for r in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    if not given.table:
        drawn = _drawn(out, given.count, given.seed, given.since)
        if not drawn:
            print(f"no line that can be mutated differs from {given.since}")
            return
        running = Tests(copied(base))
        known = equivalent()
        for room in given.rooms or ROOMS:
            todo = [m for m in drawn if m.room == room]
            todo = [m for m in todo if m.key not in results or (given.again and results[m.key]["result"] == "survived")]
            if not todo:
                continue
            mapped = all(near(mutation.file) for mutation in todo)
            executed = Executed({}, {}) if mapped else measured(room, running, out)
            for mutation in todo:
                if mutation.key in known:
                    result = {**asdict(mutation), "result": "survived", "by": "", "chosen_by": "known as equivalent"}
                else:
                    result = tried(mutation, running, executed, out)
                results[mutation.key] = result
                with kept.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(
                    f"{result['result']:9}{mutation.file}:{mutation.line}  {mutation.before}  =>  {mutation.after}",
                    flush=True,
                )
        running.close()
    print(table(list(results.values())))


if __name__ == "__main__":
    sys.exit(main())
