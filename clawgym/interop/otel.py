"""OpenTelemetry: the episodes of a run as traces, by the semantic conventions for generative AI.

    clawgym runs trace RUN --collector http://127.0.0.1:4318

Needs ``opentelemetry-sdk`` and ``opentelemetry-exporter-otlp-proto-http``.

Invariants: an episode is one trace, made from its records after its end, so that tracing never changes a run. Texts of
messages, tool arguments and outputs are not sent. Names that a model chose are bounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from clawgym.errors import MissingDependency, RunFolderError
from clawgym.evaluation.summary import official, strict
from clawgym.records import Outcome
from clawgym.records.run_folder import RunFolder
from clawgym.reporting.transcripts import stored_steps

__all__ = ["trace_run"]

_STEPS = 2000
"""Most steps of an episode that become spans."""
_NAME = 200
_PHASES = ("boot", "setup", "agent", "verify", "teardown")
_SPANS = {"boot": "sandbox boot", "setup": "sandbox setup", "verify": "grade", "teardown": "sandbox teardown"}


def trace_run(
    path: Path,
    *,
    endpoint: str = "http://127.0.0.1:4318",
    exporter: Any = None,
    progress: Callable[[int], None] = lambda done: None,
) -> int:
    """Send each episode of the run folder ``path`` as one trace. Returns the number of episodes.

    Args:
        endpoint: a collector that takes OTLP over HTTP.
        exporter: an OpenTelemetry ``SpanExporter`` instead.
        progress: called with the number of episodes that were sent.

    Raises:
        RunFolderError: ``path`` is no run folder, or the collector does not take the traces.
        MissingDependency: a package of OpenTelemetry is missing.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    except ImportError as error:
        raise MissingDependency(
            f"OpenTelemetry is needed ({error}): pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    from clawgym import __version__

    run = RunFolder.read(path)
    made = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "clawgym", "service.version": __version__}))
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("clawgym", __version__)
    count = 0
    try:
        for row in run.latest.values():
            if row["outcome"] == Outcome.UNSUPPORTED:
                continue
            _episode(tracer, run, row)
            if exporter.export(made.get_finished_spans()) is not SpanExportResult.SUCCESS:
                raise RunFolderError(f"{path}: the collector took {count} episodes only: check --collector {endpoint}")
            made.clear()
            count += 1
            progress(count)
    finally:
        provider.shutdown()
        exporter.shutdown()
    return count


def _episode(tracer: Any, run: RunFolder, row: Mapping[str, Any]) -> None:
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    engine = run.manifest.engine
    seconds = {phase: float((row.get("seconds") or {}).get(phase, 0.0)) for phase in _PHASES}
    end = _nanoseconds(row.get("finished")) or 0
    begin = end - round(sum(seconds.values()) * 1e9)
    model = str(engine.get("model") or run.manifest.agent.get("model") or "")[:_NAME]
    provider = {"gen_ai.provider.name": str(engine["name"])[:_NAME]} if engine.get("name") else {}
    about = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": str(row.get("agent"))[:_NAME],
        "gen_ai.conversation.id": str(row["key"]),
        "clawgym.run": run.path.name,
        "clawgym.task.id": str(row["task_id"]),
        "clawgym.task.hash": str(row.get("task_hash")),
        "clawgym.sample": int(row["sample"]),
        "clawgym.outcome": str(row["outcome"]),
        **({"clawgym.cause": str(row["cause"])[:_NAME]} if row.get("cause") else {}),
        **({"gen_ai.request.model": model} if model else {}),
        **provider,
    }
    root = tracer.start_span(f"invoke_agent {about['gen_ai.agent.name']}", start_time=begin, attributes=about)
    inside = set_span_in_context(root)
    usage = row.get("usage") or {}
    root.set_attribute("gen_ai.usage.input_tokens", int(usage.get("prompt_tokens") or 0))
    root.set_attribute("gen_ai.usage.output_tokens", int(usage.get("completion_tokens") or 0))
    now = begin
    for phase, spent in seconds.items():
        until = now + round(spent * 1e9)
        if phase == "agent":
            _steps(tracer, run, row, inside, model, provider, now, until)
        elif spent:
            span = tracer.start_span(_SPANS[phase], context=inside, start_time=now)
            if phase == "verify" and row.get("result"):
                for name, value in (("strict", strict(row)), ("official", official(row))):
                    score = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": float(value)}
                    label = {"gen_ai.evaluation.score.label": str(row["outcome"])}
                    span.add_event("gen_ai.evaluation.result", {**score, **label}, timestamp=until)
            span.end(until)
        now = until
    if row["outcome"] == Outcome.INFRA:
        root.set_attribute("error.type", "infra")
        root.set_status(Status(StatusCode.ERROR, str(row.get("cause") or "")[:_NAME]))
    root.end(end)


def _steps(
    tracer: Any,
    run: RunFolder,
    row: Mapping[str, Any],
    inside: Any,
    model: str,
    provider: Mapping[str, str],
    begin: int,
    end: int,
) -> None:
    """A span for each model call and each tool call. The records have the time at which a step was complete, so a call
    begins where the step before ended, and tool calls have no length of their own."""
    from opentelemetry.trace import SpanKind

    steps = stored_steps(run.path, row["task_id"], row["sample"])
    now = begin
    for step in itertools.islice((one for one in steps if one.get("source") == "agent"), _STEPS):
        until = min(max(_nanoseconds(step.get("timestamp")) or now, now), end)
        used = str(step.get("model_name") or model)[:_NAME]
        metrics = step.get("metrics") or {}
        if used or metrics:
            call: dict[str, Any] = {"gen_ai.operation.name": "chat", **provider}
            call |= {"gen_ai.request.model": used} if used else {}
            for name, key in (("input", "prompt_tokens"), ("output", "completion_tokens")):
                if isinstance(metrics.get(key), int):
                    call[f"gen_ai.usage.{name}_tokens"] = metrics[key]
            chat = f"chat {used}".strip()
            client = SpanKind.CLIENT
            tracer.start_span(chat, context=inside, kind=client, start_time=now, attributes=call).end(until)
        for one in (step.get("tool_calls") or ())[:100]:
            named = str(one.get("function_name"))[:_NAME]
            tool = {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": named,
                "gen_ai.tool.call.id": str(one.get("tool_call_id"))[:_NAME],
            }
            tracer.start_span(f"execute_tool {named}", context=inside, start_time=until, attributes=tool).end(until)
        now = until


def _nanoseconds(when: Any) -> int | None:
    """The time of an ISO 8601 text since 1970, in nanoseconds."""
    try:
        return round(datetime.fromisoformat(when).timestamp() * 1e9)
    except (TypeError, ValueError, OverflowError):
        return None
