"""SkyRL's Tinker-API server on a CPU: ``python skyrl_server.py MODEL FOLDER`` prints its port.

Samples, gradients, updates and checkpoints are those of SkyRL. Some routes are translated: SkyRL 0.3.0 speaks an
older version of the protocol than the SDK 0.38: ``forward_backward`` gets protobuf and passes JSON on,
``retrieve_future`` answers with protobuf, ``asample`` names each sample, ``load_weights`` makes a model, whose name is
replaced in later requests, and a session can be ended. SkyRL's engine is started with this Python, not with ``uv run``.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import Depends, Request, Response
from skyrl.tinker import api
from skyrl.tinker.config import EngineConfig, config_to_argv
from tinker.proto import tinker_public_pb2 as pb

_SESSION = Depends(api.get_session)
FORWARD, RETRIEVE, SAMPLE = "/api/v1/forward_backward", "/api/v1/retrieve_future", "/api/v1/asample"
LOAD = "/api/v1/load_weights"
NAMES: dict[str, str] = {}
"""The SDK's name of a model that was made from a checkpoint -> SkyRL's."""


def numbers(tensor: Any) -> list[Any]:
    """The numbers of a dense tensor."""
    return np.frombuffer(tensor.dense, {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}[tensor.dtype]).tolist()


def request_of(body: bytes) -> tuple[bool, dict[str, Any]]:
    """Whether only a forward pass is asked for, and the request as SkyRL takes it."""
    message = pb.ForwardBackwardRequest.FromString(body)
    data = [
        {
            "model_input": {
                "chunks": [
                    {
                        "type": "encoded_text",
                        "tokens": np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist(),
                    }
                    for chunk in datum.model_input
                ]
            },
            "loss_fn_inputs": {name: {"data": numbers(tensor)} for name, tensor in datum.loss_fn_inputs.items()},
        }
        for datum in message.data
    ]
    given = {"data": data, "loss_fn": message.loss_fn, "loss_fn_config": dict(message.loss_fn_config) or None}
    return message.forward_only, {"model_id": NAMES.get(message.model_id, message.model_id), "given": given}


def message_of(found: Any) -> Any:
    """The protobuf of a result; None for one that stays JSON."""
    if "sequences" in found:
        reasons = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
        logprobs = found.get("prompt_logprobs")
        return pb.SampleResponse(
            sequences=[
                pb.SampledSequence(
                    stop_reason=reasons[one["stop_reason"]],
                    tokens=np.array(one["tokens"], np.int32).tobytes(),
                    logprobs=np.array(one["logprobs"], np.float32).tobytes(),
                )
                for one in found["sequences"]
            ],
            prompt_logprobs=logprobs and np.array([np.nan, *logprobs], np.float32).tobytes(),
        )
    if "loss_fn_outputs" in found:
        record = pb.ArrayRecord(type_tag="ArrayRecord", num_datums=len(found["loss_fn_outputs"]))
        for name in found["loss_fn_outputs"][0]:
            parts = [np.array(one[name]["data"], np.float32) for one in found["loss_fn_outputs"]]
            ends = np.cumsum([0, *(part.nbytes for part in parts)], dtype=np.int64)
            record.fields[name].CopyFrom(
                pb.BatchedTensor(data=np.concatenate(parts).tobytes(), offsets=ends.tobytes(), dtype=pb.DTYPE_FLOAT32)
            )
        return pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    return None


def translated(app: Any) -> Any:
    """``app`` with these routes."""
    app.router.routes[:] = [route for route in app.router.routes if route.path not in (FORWARD, RETRIEVE, SAMPLE, LOAD)]

    async def forward_backward(request: Request, session: Any = _SESSION) -> Any:
        only, about = request_of(await request.body())
        if only:
            asked = api.ForwardRequest(model_id=about["model_id"], forward_input=about["given"])
            return await api.forward(asked, session)
        asked = api.ForwardBackwardRequest(model_id=about["model_id"], forward_backward_input=about["given"])
        return await api.forward_backward(asked, session)

    async def retrieve_future(request: api.RetrieveFutureRequest, req: Request) -> Any:
        found = await api.retrieve_future(request, req)
        message = message_of(found)
        if message is None:
            return found
        return Response(message.SerializeToString(), media_type="application/x-protobuf")

    async def asample(request: api.SampleRequest, req: Request, session: Any = _SESSION) -> Any:
        future = await api.asample(request, req, session)
        names = [f"{future.request_id}-{number}" for number in range(request.num_samples)]
        return future.model_dump() | {"sample_sequence_ids": names}

    async def load_weights(request: Request, session: Any = _SESSION) -> Any:
        asked = await request.json()
        if "model_id" not in asked:
            source = await api.get_model(session, api.types.TinkerPath.parse(asked["path"]).primary_id)
            lora = api.LoRAConfig(rank=source.lora_config["rank"])
            given = {"session_id": asked["session_id"], "base_model": source.base_model, "lora_config": lora}
            made = await api.create_model(api.CreateModelRequest(**given), session)
            asked["model_id"] = NAMES[f"{asked['session_id']}:train:{asked['model_seq_id']}"] = made.model_id
        about = api.LoadWeightsRequest(model_id=asked["model_id"], path=asked["path"])
        return await api.load_weights(about, request, session)

    async def finish() -> None: ...

    # Annotations are texts here; FastAPI looks them up among the names of the module.
    forward_backward.__annotations__ = {"request": Request, "session": Any}
    retrieve_future.__annotations__ = {"request": api.RetrieveFutureRequest, "req": Request}
    load_weights.__annotations__ = {"request": Request, "session": Any}
    app.post(LOAD)(load_weights)
    asample.__annotations__ = {"request": api.SampleRequest, "req": Request, "session": Any}
    app.post(FORWARD)(forward_backward)
    app.post(SAMPLE)(asample)
    app.post("/api/v1/sessions/{session}/finish")(finish)
    app.post(RETRIEVE)(retrieve_future)
    return renamed(app)


def renamed(app: Any) -> Any:
    """``app`` with SkyRL's names of models in place of the SDK's."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not NAMES:
            return await app(scope, receive, send)
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        if not scope["path"].endswith(FORWARD):
            for theirs, ours in NAMES.items():
                body = body.replace(theirs.encode(), ours.encode())
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return parts.pop() if parts else await receive()

        return await app(scope, again, send)

    return call


def main(model: str, folder: Path) -> None:
    backend = {"max_lora_adapters": 8, "max_lora_rank": 8, "sample_max_num_sequences": 8, "train_micro_batch_size": 4}
    config = EngineConfig(
        base_model=model,
        backend_config=backend,
        checkpoints_base=folder / "checkpoints",
        database_url=f"sqlite:///{folder / 'tinker.db'}",
    )
    api._build_uv_run_cmd_engine = lambda parent, given: [
        *(sys.executable, "-m", "skyrl.tinker.engine"),
        *config_to_argv(given),
    ]
    api.app.state.engine_config = config
    listening = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
    server = uvicorn.Server(uvicorn.Config(translated(api.app), log_level="warning"))
    server.run(sockets=[listening])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
