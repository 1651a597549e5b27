"""Traces in a collector of OpenTelemetry on the loopback, and metrics in real trackers, offline.

Needs the packages ``opentelemetry-sdk``, ``mlflow``, ``wandb``, ``tensorboard`` and ``trackio``.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import clawgym
from clawgym.errors import RunFolderError
from clawgym.interop.otel import trace_run
from clawgym.sandbox import Backend

from ..engines.fake_openai import USAGE, FakeOpenAI, call, fake_openai, reply
from ..trainers.runs import Said, small

__all__ = ["fake_openai"]

pytestmark = pytest.mark.timeout(900)  # the first import of MLflow alone takes minutes on a slow machine
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


async def test_model_calls_of_an_episode(
    backend: Backend,
    tmp_path: Path,
    collector: tuple[str, list[Any]],
    fake_openai: FakeOpenAI,
    record_property: Held,
) -> None:
    address, got = collector
    secret = "a text of the model that no collector gets"
    fake_openai.script += [
        reply(secret, tool_calls=[call("bash", {"command": "ls; echo a-secret-argument"}, "a")]),
        reply(None, tool_calls=[call("submit", {}, "b")]),
    ]
    agent = clawgym.make_agent("tool-loop", model="m-1", base_url=fake_openai.base_url, api_key="k")
    tasks, run = clawgym.load("terminal-basic:heldout", limit=1), tmp_path / "run"
    await clawgym.evaluate(clawgym.EvalConfig(task_set=tasks, agent=agent, backend=backend, out=run))
    await agent.aclose()
    command = [str(Path(sys.executable).with_name("clawgym")), "runs", "trace", str(run), "--collector", address]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (request,) = got
    assert secret.encode() not in request.SerializeToString()
    assert b"a-secret-argument" not in request.SerializeToString()
    spans = [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]
    (root,) = (span for span in spans if not span.parent_span_id)
    inner = sorted((span for span in spans if span is not root), key=lambda span: span.start_time_unix_nano)
    names = [span.name for span in inner if span.name.startswith(("chat", "execute_tool"))]
    assert names == ["chat m-1", "execute_tool bash", "chat m-1", "execute_tool submit"]
    for span in inner:
        if span.name == "chat m-1":
            about = {one.key: one.value for one in span.attributes}
            assert about["gen_ai.operation.name"].string_value == "chat"
            assert about["gen_ai.provider.name"].string_value == "openai"
            assert about["gen_ai.request.model"].string_value == "m-1"
            assert about["gen_ai.usage.input_tokens"].int_value == USAGE["prompt_tokens"]
            assert about["gen_ai.usage.output_tokens"].int_value == USAGE["completion_tokens"]
            assert span.kind == span.SPAN_KIND_CLIENT
    whole = {one.key: one.value for one in root.attributes}
    assert whole["gen_ai.usage.input_tokens"].int_value == 2 * USAGE["prompt_tokens"]
    assert whole["clawgym.outcome"].string_value == "failed"
    record_property("held", "`clawgym runs trace` sends model and tool calls with their tokens, and no texts")


async def test_mlflow_takes_the_traces(backend: Backend, tmp_path: Path, record_property: Held) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: clawgym interop check observability")
    run = await run_of(backend, tmp_path / "run")
    store = f"sqlite:///{tmp_path / 'traces.db'}"
    client = mlflow.MlflowClient(store)
    experiment = client.create_experiment("traces", (tmp_path / "artifacts").as_uri())
    with mlflow_server(store, tmp_path) as url:
        command = [str(Path(sys.executable).with_name("clawgym")), "runs", "trace", str(run), "--collector", url]
        headers = {"OTEL_EXPORTER_OTLP_HEADERS": f"x-mlflow-experiment-id={experiment}"}
        headers["OTEL_EXPORTER_OTLP_TIMEOUT"] = "600"  # seconds; its first request imports much
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env={**os.environ, **headers}, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    traces = client.search_traces([experiment])
    assert len(traces) == 2
    for trace in traces:
        (root,) = (span for span in trace.data.spans if span.parent_id is None)
        assert root.name == "invoke_agent oracle"
        assert root.attributes["clawgym.outcome"] == "solved"
        assert {"grade", "sandbox setup", "sandbox teardown"} <= {span.name for span in trace.data.spans}
    record_property("held", "the server of MLflow takes the traces by OTLP, and its client reads them back")


@contextlib.contextmanager
def mlflow_server(store: str, folder: Path) -> Iterator[str]:
    """The address of a server of MLflow on the loopback, once it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--backend-store-uri", store, "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", port]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            while "startup complete" not in said:
                line = process.stdout.readline()
                said += line
                assert line, said
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)


async def test_no_collector(backend: Backend, tmp_path: Path) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")

    class Refuses(export.SpanExporter):
        def export(self, spans: Any) -> Any:
            return export.SpanExportResult.FAILURE

        def shutdown(self) -> None: ...

    run = await run_of(backend, tmp_path / "run")
    with pytest.raises(RunFolderError, match="check --collector"):
        trace_run(run, exporter=Refuses())


NAMES = ("wandb", "mlflow", "tensorboard", "trackio")
Curves = dict[str, list[tuple[int, float]]]
"""Metric -> its steps and values."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Curves]]:
    """A small training that was stopped and resumed, and what it told its trackers, of which one always fails."""
    if not all(map(importlib.util.find_spec, (*NAMES, "torch"))):  # Trackio reads its folder when it is imported
        pytest.skip("needs all trackers: clawgym interop check observability")
    from clawgym.registry import trackers
    from clawgym.trainers.local.main import train

    told: Curves = {}

    @trackers.register("told")
    class Told:
        def __init__(self, run: Any) -> None: ...

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                told.setdefault(name, []).append((step, value))

        def close(self) -> None: ...

    @trackers.register("broken")
    class Broken(Told):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError("the disk is full")

        def close(self) -> None:
            raise OSError("the disk is full")

    @trackers.register("absent")
    class Absent(Told):
        def __init__(self, run: Any) -> None:
            raise ConnectionError("nobody answers")

    out = tmp_path_factory.mktemp("runs") / "tracked"
    tracking = {"absent": None, "broken": None, "told": None, **dict.fromkeys(NAMES)}
    tracking["wandb"] = {"mode": "offline"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(out / "trackio"))
        for steps in (2, 3):
            config = small(tracking=tracking, budget={"steps": steps})
            asyncio.run(train(config, out, "rl", view=Said()))
        yield out, told


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file of wandb, a log of LevelDB: blocks of 32 KiB, with parts of records (CRC, size, kind)."""
    assert data.startswith(b":W&B")
    place, record = 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # no header fits into the rest of the block
            place += 2**15 - place % 2**15
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield record
            record = b""


def wandb_curves(out: Path) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            items = Record.FromString(data).history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            for name in row.keys() - {"step"}:
                if not name.startswith("_"):
                    curves.setdefault(name, []).append((row["step"], row[name]))
    return curves


def mlflow_curves(out: Path) -> Curves:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("clawgym").experiment_id])
    assert run.info.status == "FINISHED"
    read = client.get_metric_history
    return {name: [(one.step, one.value) for one in read(run.info.run_id, name)] for name in run.data.metrics}


def tensorboard_curves(out: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    return {name: [(one.step, one.value) for one in board.Scalars(name)] for name in board.Tags()["scalars"]}


def trackio_curves(out: Path) -> Curves:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("clawgym")
    assert (out / "trackio").is_dir()
    curves: Curves = {}
    for row in SQLiteStorage.get_logs("clawgym", run.name, run_id=run.id):
        for name in row.keys() - {"step", "timestamp"}:
            curves.setdefault(name, []).append((row["step"], row[name]))
    return curves


@pytest.mark.parametrize("name", NAMES)
def test_tracker_has_all_metrics(name: str, trained: tuple[Path, Curves], record_property: Held) -> None:
    out, told = trained
    found = globals()[f"{name}_curves"](out)
    assert found.keys() == told.keys()
    for metric, curve in told.items():
        steps, values = zip(*sorted(found[metric]), strict=True)
        wanted_steps, wanted = zip(*sorted(curve), strict=True)
        assert steps == wanted_steps, metric
        assert values == pytest.approx(wanted, rel=1e-6), metric  # TensorBoard keeps float32
    record_property("held", f"{name}: all {len(told)} metrics of a training that was resumed, by its own reader")


def test_failing_trackers_stop_no_training(trained: tuple[Path, Curves], record_property: Held) -> None:
    out, told = trained
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    name = "rollout/avg_reward_submitted"
    assert told[name] == [(row["step"], row[name]) for row in rows]
    record_property("held", "a tracker that does not start and one that fails at every step stop no training")


def test_mlflow_server_that_does_not_answer_costs_seconds(tmp_path: Path, record_property: Held) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: clawgym interop check observability")
    from clawgym.trainers.common.tracking import TrackedRun, Trackers

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        made = Trackers(TrackedRun(tmp_path, "rl", small(tracking={"mlflow": {"uri": url}})))
        made.log(1, {"actor/entropy": 0.5})
        made.close()
        assert time.monotonic() - begin < 60
    record_property("held", "an MLflow server that does not answer costs a training seconds")
