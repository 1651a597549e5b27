"""``clawgym serve``: serve a model that is trained on its use, behind a gate; and look at it, promote and roll back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.cli._options import DryRun, JsonFlag, Settings, tls_of
from clawgym.console import Console

if TYPE_CHECKING:
    from clawgym.online.config import ServiceFolder
    from clawgym.online.versions import Version, Versions

__all__ = ["app"]

app = typer.Typer(help="Serve a model that is trained on its use, behind a gate.")

Dir = Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="The folder of the service.")]
_DIR = Path("service")
_TRAINING = Path("service-training")
_ABOUT = ("actor/step_kl", "actor/advantage_abs_mean", "opd/turns_taught")


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="smollm2-135m, a folder, or a name on the Hub; of the first start.")
    ] = None,
    folder: Dir = _DIR,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="serve, serve-24gb, serve-8gpu, or a YAML file with settings.")
    ] = None,
    settings: Settings = None,
    host: Annotated[str, typer.Option(help="Address for clients. Any but loopback needs TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for clients; 0: any free port.")] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    train_elsewhere: Annotated[
        bool, typer.Option("--train-elsewhere", help="Train on another machine, by `clawgym serve train`.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Serve a model to clients of OpenAI and Anthropic, and train it on what they say.

    Prints the base_url, the key and the name of the model. Everything is kept in one folder. The same command starts
    the service again. --dry-run shows whether the model fits, without loading it.
    """
    if context.invoked_subcommand is not None:
        return
    from clawgym.cli.gateway import fast_loop
    from clawgym.online.config import ServiceFolder, load_service_config

    held = ServiceFolder(folder)
    if model is None and config is None and not settings and (folder / "service.json").exists():
        chosen = held.config
    else:
        known = held.config.training.model.path if model is None and (folder / "service.json").exists() else model
        chosen = load_service_config(config, known, settings or ())
    if dry_run:
        from clawgym.cli.doctor import check_model

        raise typer.Exit(check_model(chosen, weights=False))
    held.create(chosen)
    run = _serve(held, host, port, tls_of(tls_cert, tls_key), train_elsewhere)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(run)


async def _serve(folder: ServiceFolder, host: str, port: int, tls: Any, train_elsewhere: bool) -> None:
    from clawgym.cli._running import stop_on_signals
    from clawgym.cli.gateway import freeze_objects
    from clawgym.online.service import open_service

    console, out = Console(stderr=True), Console()
    stop = asyncio.Event()
    stop_on_signals(stop, lambda _: console.say("Stopping: running replies are recorded as aborted."))
    where: dict[str, Any] = {"host": host, "port": port, "tls": tls}
    async with open_service(folder, **where, say=console.say, train_elsewhere=train_elsewhere) as service:
        freeze_objects()
        for name, value in (
            ("base_url", service.base_url),
            ("api_key", service.keys.make("user")),
            ("model", service.gateway.model),
            ("version", service.versions.serving.number),
            ("folder", folder.path),
        ):
            out.say(f"{name + ':':<11}{value}")
        if train_elsewhere:
            url = service.base_url.removesuffix("/v1")
            out.say(f"to train:  clawgym serve train {url} --key-file {folder.training_key}")
        await stop.wait()


@app.command()
def status(folder: Dir = _DIR, as_json: JsonFlag = False) -> None:
    """Show whether the service runs, which version answers, what the gate measures, and what waits."""
    held, versions = _open(folder)
    from clawgym.online.conversations import source_of, waiting_sources
    from clawgym.pool import Pool

    where = held.where()
    with Pool(held.pool) as pool:
        counts: dict[str, int] = {"open": 0, "not judged yet": 0, "judged": 0}
        for episode in pool.episodes():
            if source_of(episode.channel) is not None:
                ended = "judged" if episode.state == "closed" else "not judged yet"
                counts["open" if episode.secret_sha256 else ended] += 1
        stats = pool.stats()
    found = {
        "running": where is not None,
        "base_url": None if where is None else where["base_url"],
        "serving": versions.serving.number,
        "versions": len(versions.all()),
        "conversations": counts,
        "to_train": waiting_sources(stats),
        "comparison": held.gate_report("latest"),
        "watch": held.gate_report("watch"),
        "failed_step": held.failed_step(),
    }
    console = Console()
    if as_json:
        console.json(found)
        return
    console.say(f"The service {'runs at ' + found['base_url'] if where else 'does not run'}.")
    console.say(f"Version {found['serving']} answers, of {_count(found['versions'], 'version')}.")
    console.say("Conversations: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + ".")
    if found["to_train"]:
        waiting = ", ".join(f"{count} of {source}" for source, count in found["to_train"].items())
        about = held.config
        console.say(
            f"To be trained on: {waiting}. A step takes {about.training.rollout.groups}; if several sources speak, at "
            f"most {about.source_share:.0%} of one."
        )
    if compared := found["comparison"]:
        console.say(
            f"The gate on version {compared['version']}: {compared['verdict']}: {'; '.join(compared['reasons'])}"
        )
        for name, one in compared["figures"].items():
            console.say(f"  {name:<8} {one['n']:>5} measured, {_interval(one)}")
    if (watched := found["watch"]) and watched["version"] == found["serving"]:
        console.say(f"Version {watched['version']} since its promotion: {watched['reason']}.")
    if failed := found["failed_step"]:
        when = f"{datetime.fromtimestamp(failed['time'], UTC):%Y-%m-%d %H:%M} UTC"
        console.say(f"Training step {failed['step']} made no version ({when}): {failed['reason']}.")


@app.command("train")
def train(
    url: Annotated[str, typer.Argument(metavar="URL", help="https://HOST:PORT of the service.")],
    key_file: Annotated[Path, typer.Option(help="A copy of the service's training.key.")],
    ca: Annotated[Path | None, typer.Option(help="The service's certificate (PEM), if the system has none.")] = None,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="FOLDER", help="For checkpoints; the same command resumes.")
    ] = _TRAINING,
    settings: Settings = None,
) -> None:
    """Train the versions of a service on this machine. The service runs elsewhere, with --train-elsewhere.

    --set changes what belongs to this machine: training.compute, training.verl, training.trainer, and where the model
    is (training.model.path).
    """
    from clawgym.cli._running import resume_command, stop_on_signals
    from clawgym.errors import ServiceError
    from clawgym.online.config import ServiceFolder
    from clawgym.online.elsewhere import ServiceLink
    from clawgym.online.training import train_elsewhere

    console = Console(stderr=True)
    try:
        link = ServiceLink(url, key_file.read_text("utf-8").strip(), ca)
    except (OSError, ValueError) as error:
        raise ServiceError(f"{key_file}: cannot be read ({error}): copy training.key of the service") from error

    async def run() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop, lambda _: console.say("Stopping: the step that runs is finished first."))
        console.say(f"Training for {url}. Checkpoints are in {folder}.")
        await train_elsewhere(ServiceFolder(folder), link, stop, settings or (), say=console.say)

    asyncio.run(run())
    console.say("Stopped. Resume with:")
    console.say(resume_command())


@app.command()
def history(folder: Dir = _DIR, as_json: JsonFlag = False) -> None:
    """Show all versions: what each was made from, what the gate said, and when it answered."""
    _, versions = _open(folder)
    console = Console()
    if as_json:
        console.json([_row(version) for version in versions.all()])
        return
    serving = versions.serving.number
    for version in versions.all():
        mark = "answers" if version.number == serving else version.state
        made = "the first version" if version.parent is None else (
            f"from version {version.parent}, trained on {_count(len(version.sessions), 'conversation')}"
        )  # fmt: skip
        console.say(f"{version.number:>5}  {_time(version.made)}  {mark:<10} {made}")
        if version.gate:
            console.say(f"       gate: {version.gate[-1].get('verdict')}: {'; '.join(version.gate[-1]['reasons'])}")
    for event in versions.events:
        console.say(f"{_time(event.at)}  {event.kind} to version {event.version} from {event.before}: {event.reason}")


@app.command()
def promote(
    version: Annotated[int, typer.Argument(help="A version of `clawgym serve history`.")], folder: Dir = _DIR
) -> None:
    """Let a candidate answer from the next request on, whatever the gate says."""
    _, versions = _open(folder)
    event = versions.promote(version, "by hand")
    Console().say(f"Version {event.version} answers from the next request on; before it was {event.before}.")


@app.command()
def rollback(
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="The version to go back to. Default: the one before.")
    ] = None,
    folder: Dir = _DIR,
) -> None:
    """Let an earlier version answer from the next request on."""
    _, versions = _open(folder)
    event = versions.roll_back("by hand", version)
    Console().say(f"Version {event.version} answers from the next request on; version {event.before} is withdrawn.")


@app.command()
def forget(
    session: Annotated[str, typer.Argument(help="A conversation: the `session` of an answer to feedback.")],
    folder: Dir = _DIR,
    roll_back: Annotated[
        bool, typer.Option("--rollback", help="If the version that answers was trained on it: go back first.")
    ] = False,
) -> None:
    """Delete a conversation, and erase all versions that were trained on it."""
    held, versions = _open(folder)
    from clawgym.online.service import forget as forget_session

    console = Console()
    exposed = [version.number for version in versions.exposed(session)]
    console.say(f"Versions trained on it: {', '.join(map(str, exposed)) or 'none'}.")
    if roll_back and versions.serving.number in exposed:
        event = versions.roll_back(f"to forget {session}", versions.last_without([session]).number)
        console.say(f"Version {event.version} answers from the next request on.")
    erased = forget_session(held, session)
    console.say(f"The conversation is deleted. Versions erased: {', '.join(map(str, erased)) or 'none'}.")


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="A source of conversations, such as a person or a program.")],
    folder: Dir = _DIR,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the key: it is refused from now on.")] = False,
) -> None:
    """Print the key of a source, which is made if there is none; or remove it."""
    held, _ = _open(folder)
    from clawgym.online.door import Keys

    if remove:
        Keys(held.keys).remove(name)
        Console().say(f"The key {name} is removed.")
    else:
        Console().say(Keys(held.keys).make(name))


def _open(folder: Path) -> tuple[ServiceFolder, Versions]:
    from clawgym.online.config import ServiceFolder
    from clawgym.online.versions import Versions

    held = ServiceFolder(folder)
    _ = held.config  # raises for a folder that is none
    return held, Versions(held.versions)


def _row(version: Version) -> dict[str, Any]:
    return {
        "version": version.number,
        "state": version.state,
        "parent": version.parent,
        "sessions": list(version.sessions),
        "made": version.made,
        "gate": [dict(result) for result in version.gate],
        "metrics": {name: value for name, value in version.about.get("metrics", {}).items() if name in _ABOUT},
    }


def _interval(one: Mapping[str, Any]) -> str:
    if one["mean"] is None:
        return "nothing to compare yet"
    return f"{one['mean']:+.3f} ({one['lower']:+.3f} to {one['upper']:+.3f}); needed: above {one['needed']:+.3f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
