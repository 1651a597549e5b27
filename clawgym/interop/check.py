"""Check the adapters with the real packages: an environment for each route, its tests there, and a table of what held.

Invariants: an environment with the mark ``.complete`` has the versions of its route, and is used again. What is not
complete is installed again by the same command. A route that was not asked for keeps its last result.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from clawgym.cache import cache_folder, only_one
from clawgym.errors import ClawGymError, DownloadError
from clawgym.registry import did_you_mean

__all__ = ["ROUTES", "Route", "RouteResult", "check_route", "kept_results", "page_of", "routes_named", "write_results"]

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = "tests/interop"
_PYTEST = (
    *("pytest>=8.3", "pytest-asyncio>=1.0", "pytest-timeout>=2.3", "pytest-rerunfailures>=16"),
    *("hypothesis>=6.120", "psutil>=6"),
)
_RESULTS = "docs/results/interop.json"
_PAGE = "docs/results/interop.md"


@dataclass(frozen=True, slots=True)
class Route:
    """A package of others by which a task is reached."""

    name: str
    """Also the name of its tests, ``tests/interop/test_NAME.py``."""
    title: str
    pins: tuple[str, ...]
    """Requirements with versions; the first is the package."""
    extras: tuple[str, ...] = ()
    """The extras of ClawGym that its tests need."""
    first: tuple[str, ...] = ()
    """Requirements that are installed before all others."""
    alone: tuple[str, ...] = ()
    """Requirements that are installed last and without their own, one of which cannot be had; ``pins`` has the rest."""
    python: str = ""
    """The version of Python that its package needs, such as ``3.13``; by default that of this process."""
    clash: bool = False
    """Whether pip finds that the requirements clash, and they work nevertheless."""
    apart: Route | None = None
    """An environment for the other side, where one cannot hold both. Tests get its Python in ``CLAWGYM_APART``."""

    @property
    def package(self) -> str:
        return self.pins[0].partition("==")[0]

    @property
    def version(self) -> str:
        return self.pins[0].partition("==")[2]


_ROUTES = (
    # fastmcp of openenv needs mcp 1; the extra "tools" needs mcp 2.
    Route(
        "openenv",
        "OpenEnv",
        ("openenv==0.10.0", "fastmcp==3.4.11", "mcp==1.30.0"),
        apart=Route("openenv-tools", "OpenEnv", ("mcp==2.3.0",), ("tools",), first=("openenv==0.10.0",), clash=True),
    ),
    Route(
        "trl",
        "TRL",
        ("trl==1.16.0", "transformers==5.10.4", "jmespath==1.1.0", "torch==2.13.0"),
        extras=("local",),
        first=("torch==2.13.0",),
    ),
    Route("inspect", "Inspect AI", ("inspect-ai==0.3.285", "inspect-evals==0.26.0"), extras=("gateway",)),
    Route(
        "verifiers",
        "verifiers",
        ("verifiers==0.4.0", "torch==2.13.0", "safetensors>=0.5", "datasets==5.2.0"),
        extras=("gateway",),
        first=("torch==2.13.0",),
    ),
    Route("mcp", "MCP", ("mcp==2.3.0",), extras=("tools",)),
    Route(
        "acp",
        "Agent Client Protocol",
        ("agent-client-protocol==0.12.1", "torch==2.13.0"),
        extras=("local",),
        first=("torch==2.13.0",),
    ),
    Route(
        "data",
        "Data sets",
        ("datasets==5.2.0", "verl==0.9.1", "openai==3.52.0", "torch==2.13.0"),
        extras=("verl",),
        first=("torch==2.13.0",),
    ),
    # SkyRL needs Python 3.12. tinker-cookbook asks for tml-renderers 0.4.1, which is on no public index; it is imported
    # for audio models only.
    Route(
        "tinker",
        "Tinker API",
        (
            *("tinker==0.38.0", "skyrl[jax,tinker]==0.3.0", "transformers==5.8.0", "torch==2.13.0", "pyyaml>=6"),
            *("blobfile>=3.0.0", "chz>=0.4.0", "cloudpickle>=3.0.0", "pyrage>=1.4.0", "termcolor>=2.0.0"),
            "tiktoken>=0.12.0",
        ),
        extras=("local",),
        first=("torch==2.13.0",),
        alone=("tinker-cookbook==0.6.1",),
        python="3.12",
    ),
    Route("gepa", "GEPA", ("gepa==0.1.4",)),
    Route(
        "observability",
        "Observability",
        (
            *("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"),
            *("opentelemetry-semantic-conventions==0.66b2", "mlflow==3.17.2", "wandb==0.31.0", "trackio==0.43.0"),
            *("tensorboard==2.21.0", "torch==2.13.0"),
        ),
        extras=("train",),
        first=("torch==2.13.0",),
    ),
    Route(
        "gymnasium",
        "Gymnasium",
        (
            *("gymnasium==1.4.0", "stable-baselines3==2.9.2", "pettingzoo==1.27.0", "gem-llm==0.1.0"),
            "torch==2.13.0",
        ),
        extras=("tools", "gui"),
        first=("torch==2.13.0",),
    ),
    Route(
        "traces",
        "Other trainers",
        (
            *("agentlightning==0.3.0", "torch==2.13.0"),
            # What SkyRL's generators import, without the rest of its extra, which needs CUDA.
            *("loguru==0.7.3", "ray==2.56.0", "omegaconf==2.3.1", "hydra-core==1.3.2", "jaxtyping==0.3.11"),
            *("torchdata>=0.11", "tensordict>=0.10", "pandas>=2.2", "datasets==5.2.0", "transformers==5.8.0"),
            # What the types and the batches of AReaL import, which asks for PyTorch below 2.11.
            *("aiofiles==25.1.0", "colorlog==6.12.0", "einops==0.8.2", "lark==1.3.1", "numba==0.68.1"),
            *("pillow==13.0.0", "tenacity==9.2.1"),
        ),
        extras=("pool",),
        first=("torch==2.13.0",),
        alone=("skyrl==0.3.0", "skyrl-gym==0.4.0", "areal==1.0.4"),  # SkyRL's LiteLLM is not that of Agent Lightning
        python="3.11",  # AReaL needs 3.11 or 3.12
    ),
    Route("kubernetes", "Kubernetes", ("kubernetes==37.0.2",)),
    Route("nemo_gym", "NeMo Gym", ("nemo-gym==0.4.0",), python="3.13"),
)
ROUTES: Mapping[str, Route] = {route.name: route for route in _ROUTES}
"""Name -> route."""


@dataclass(frozen=True, slots=True)
class RouteResult:
    """What one check of a route found."""

    route: str
    package: str
    version: str
    python: str
    date: str
    """ISO 8601, UTC."""
    passed: int
    failed: int
    skipped: int
    held: tuple[str, ...]
    """One sentence for each test that says what it showed."""

    @property
    def holds(self) -> bool:
        return self.passed > 0 and self.failed == 0


def routes_named(names: Sequence[str]) -> list[Route]:
    """The routes of these names; all if there are none. Raises :class:`ClawGymError` for an unknown name."""
    for name in names:
        if name not in ROUTES:
            raise ClawGymError(f"there is no route {name!r}.{did_you_mean(name, ROUTES)} Known: {', '.join(ROUTES)}")
    return [ROUTES[name] for name in names or ROUTES]


def check_route(route: Route, say: Callable[[str], None]) -> tuple[RouteResult, str]:
    """Run the tests of ``route`` with its package. Returns the result, and the output of the tests.

    Raises:
        ClawGymError: this is no clone of the repository, which has the tests.
        DownloadError: the packages cannot be installed.
    """
    if not (_ROOT / _TESTS).is_dir():
        raise ClawGymError("the tests of the adapters are in the repository: clone it, and run this command there")
    python = _environment(route, say)
    outside = _outside() | ({"CLAWGYM_APART": str(_environment(route.apart, say))} if route.apart else {})
    say(f"{route.title}: running its tests")
    with tempfile.TemporaryDirectory(prefix="clawgym-") as folder:
        report = Path(folder, "report.xml")
        test = f"{_TESTS}/test_{route.name}.py"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [str(python), "-P", "-m", "pytest", *options, test]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, env=outside, check=False)
        output = done.stdout + done.stderr
        if not report.is_file():
            raise ClawGymError(f"the tests of {route.name} did not run: {output[-2000:].strip()}; correct this first")
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")}
    failed = counts["failure"] + counts["error"] + (done.returncode != 0 and not counts["failure"] + counts["error"])
    version = subprocess.run([str(python), "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    result = RouteResult(
        route=route.name,
        package=route.package,
        version=route.version,
        python=version,
        date=datetime.now(UTC).date().isoformat(),
        passed=sum(
            len(case.findall("failure") + case.findall("error") + case.findall("skipped")) == 0 for case in cases
        ),
        failed=failed,
        skipped=counts["skipped"],
        held=tuple(
            str(one.get("value"))
            for case in cases
            if case.find("failure") is None and case.find("error") is None
            for one in case.iter("property")
            if one.get("name") == "held"
        ),
    )
    return result, output


def _environment(route: Route, say: Callable[[str], None]) -> Path:
    """The Python of the environment of ``route``, which is made if it is not complete."""
    extras = f"[{','.join(route.extras)}]" if route.extras else ""
    wanted = [f"-e{_ROOT}{extras}", *_PYTEST, *route.pins]
    told = json.dumps([wanted, route.first, *filter(None, [route.alone]), route.python or platform.python_version()])
    folder = cache_folder("interop") / f"{route.name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    python, mark = folder / "bin/python", folder / ".complete"
    with only_one(folder, lambda what, done, total: say(what)):
        if not mark.exists():
            say(f"{route.title}: installing {', '.join(route.pins)} in {folder}")
            _run([_interpreter(route.python), "-m", "venv", str(folder)])
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
            for packages in filter(None, (list(route.first), wanted)):
                _run([*pip, *packages])
            if not route.clash:
                _run([str(python), "-m", "pip", "check"])
            if route.alone:
                _run([*pip, "--no-deps", *route.alone])
            mark.touch()
    return python


def _interpreter(version: str) -> str:
    """The path of Python ``version``; of this one without a version. Raises :class:`DownloadError`."""
    if not version or platform.python_version().startswith(f"{version}."):
        return sys.executable
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    try:
        # With several Pythons of pyenv, the variable says which of them answers to the name.
        found = subprocess.run(
            command, capture_output=True, text=True, env=_outside() | {"PYENV_VERSION": version}, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise DownloadError(f"the route needs Python {version}, which is not here: install python{version}") from error
    return found.stdout.strip()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=_outside(), check=False)
    if done.returncode:
        shown = (done.stdout + done.stderr).strip()[-2000:]
        raise DownloadError(
            f"{' '.join(command[1:4])} failed ({shown}): run the same command again, or correct the pins"
        )


def _outside() -> dict[str, str]:
    """The variables of this process without those that lead to packages of its own environment."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


def kept_results() -> dict[str, RouteResult]:
    """Route -> the last result that was written."""
    try:
        rows = json.loads((_ROOT / _RESULTS).read_text())
    except FileNotFoundError:
        return {}
    return {row["route"]: RouteResult(**{**row, "held": tuple(row["held"])}) for row in rows}


def write_results(found: Iterable[RouteResult]) -> Path:
    """Write the results and the page that shows them; routes without a new result keep theirs. Returns the page."""
    results = {**kept_results(), **{result.route: result for result in found}}
    rows = [results[name] for name in ROUTES if name in results]
    text = json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)
    (_ROOT / _RESULTS).write_text(text + "\n")
    page = _ROOT / _PAGE
    page.write_text(page_of(rows))
    return page


def page_of(results: Sequence[RouteResult]) -> str:
    """The page of the documentation, Markdown."""
    lines = [
        "# Other packages",
        "",
        "The same tasks, reached from other packages. Each adapter is tested with the real package of the other side, "
        "in an environment of its own. This command writes this page:",
        "",
        "```console",
        "$ clawgym interop check",
        "```",
        "",
        "| route | package | Python | date | tests |",
        "|---|---|---|---|---|",
    ]
    for one in results:
        tests = f"{one.passed} passed" + (f", {one.failed} failed" if one.failed else "")
        tests += f", {one.skipped} skipped" if one.skipped else ""
        title = f"[{ROUTES[one.route].title}](../how-to/interop/{one.route}.md)"
        lines.append(f"| {title} | `{one.package}` {one.version} | {one.python} | {one.date} | {tests} |")
    for one in results:
        lines += ["", f"## {ROUTES[one.route].title}", "", *(f"- {sentence}" for sentence in one.held)]
    return "\n".join(lines) + "\n"
