"""Traces in a collector of OpenTelemetry on the loopback, and metrics in real trackers, offline.

Needs the packages ``opentelemetry-sdk``, ``mlflow`` and ``wandb``.
"""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import clawgym
from clawgym.errors import RunFolderError
from clawgym.interop.otel import trace_run
from clawgym.sandbox import Backend

Held = Callable[..., None]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of a service that takes OTLP over HTTP, and the requests that it got, parsed."""
    pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry: clawgym interop check observability")
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    got: list[Any] = []

    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append(proto.ExportTraceServiceRequest.FromString(body))
            answer = proto.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    thread.join()
    server.server_close()


async def run_of(backend: Backend, out: Path) -> Path:
    tasks = clawgym.load("terminal-basic:heldout", limit=2)
    agent = clawgym.make_agent("oracle")
    await clawgym.evaluate(clawgym.EvalConfig(task_set=tasks, agent=agent, backend=backend, out=out))
    return out


async def test_a_collector_gets_the_episodes(
    backend: Backend, tmp_path: Path, collector: tuple[str, list[Any]], record_property: Held
) -> None:
    gen_ai = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    address, got = collector
    run = await run_of(backend, tmp_path / "run")
    assert await asyncio.to_thread(trace_run, run, endpoint=address) == 2
    spans = [span for one in got for group in one.resource_spans for scope in group.scope_spans for span in scope.spans]
    roots = [span for span in spans if not span.parent_span_id]
    assert [span.name for span in roots] == ["invoke_agent oracle"] * 2
    assert len({span.trace_id for span in spans}) == 2
    known = {value for name, value in vars(gen_ai).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    for root in roots:
        inner = [span for span in spans if span.trace_id == root.trace_id and span.parent_span_id]
        assert {"grade", "sandbox setup", "sandbox teardown"} <= {span.name for span in inner}
        assert any(span.name.startswith("execute_tool ") for span in inner)
        for span in (root, *inner):
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
            names = {one.key for one in span.attributes}
            assert {name for name in names if name.startswith("gen_ai.")} <= known
        (grade,) = (span for span in inner if span.name == "grade")
        scores = {one.key: one.value for event in grade.events for one in event.attributes}
        assert scores["gen_ai.evaluation.score.value"].double_value == 1.0
        assert scores.keys() <= known
    record_property("held", f"a collector on the loopback gets 2 traces of {len(spans)} spans, with known names")


async def test_no_collector(backend: Backend, tmp_path: Path) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")

    class Refuses(export.SpanExporter):
        def export(self, spans: Any) -> Any:
            return export.SpanExportResult.FAILURE

        def shutdown(self) -> None: ...

    run = await run_of(backend, tmp_path / "run")
    with pytest.raises(RunFolderError, match="check --collector"):
        trace_run(run, exporter=Refuses())


METRICS = [(step, {"actor/entropy": 0.5 / (step + 1), "rollout/avg_reward_submitted": step / 4}) for step in range(3)]


def tracked(name: str, path: Path, **options: Any) -> None:
    """Log the metrics with the tracker ``name``; the run is killed once and resumes."""
    from clawgym.registry import trackers
    from clawgym.trainers.common.tracking import TrackedRun
    from clawgym.trainers.config import TrainConfig

    path.mkdir(exist_ok=True)
    run = TrackedRun(path, "rl", TrainConfig())
    for part in (METRICS[:2], METRICS[2:]):
        one = trackers.make(name, run, **options)
        for step, metrics in part:
            one.log(step, metrics)
        one.close()


def test_mlflow(tmp_path: Path, record_property: Held) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: clawgym interop check observability")
    tracked("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run/mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("clawgym").experiment_id])
    assert run.info.status == "FINISHED"
    for name in METRICS[0][1]:
        history = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in history] == [(step, metrics[name]) for step, metrics in METRICS]
    record_property("held", "MLflow keeps the metrics of a run that was resumed in one run, under the same names")


def test_wandb(tmp_path: Path, record_property: Held) -> None:
    pytest.importorskip("wandb", reason="needs wandb: clawgym interop check observability")
    tracked("wandb", tmp_path / "run", mode="offline")
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))) == 2
    record_property("held", "wandb writes the metrics offline")
