"""A control plane of Modal for one machine: enough for the real `modal deploy` and the real container entry point.

Run with a Python that has modal: `python modal_stub.py PORT_FILE RECORD_FILE [INPUTS_FILE]`. Every request is appended to
RECORD_FILE as one JSON object a line (`{"rpc", "t", "request"}`). INPUTS_FILE is a JSON list of what a container gets:
`{"payload": {...}}`, `{"wait_for": path}`, or `{"cancel_after": path}` to cancel the input before it.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from grpclib.const import Handler
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

OK = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS


class ControlPlane(api_grpc.ModalClientBase):
    """Default answers for everything, and the few that a client looks at."""

    def __init__(self, record: Path, inputs: list[dict[str, Any]]) -> None:
        self._record = record
        self._inputs = list(inputs)
        self._count = 0
        self._volumes: dict[str, int] = {}
        self._cancelled = asyncio.Event()
        self._outputs = asyncio.Event()
        self._current = ""

    def __mapping__(self) -> dict[str, Handler]:
        handlers = {}
        for path, handler in super().__mapping__().items():
            name = path.rsplit("/", 1)[1]
            special = getattr(type(self), f"answer_{name}", None)
            handlers[path] = handler._replace(func=self._wrap(name, handler, special))
        return handlers

    def _wrap(self, name: str, handler: Handler, special: Any) -> Any:
        async def serve(stream: Any) -> None:
            request = await stream.recv_message()
            entry = {
                "rpc": name,
                "t": time.time(),
                "request": MessageToDict(request, preserving_proto_field_name=True),
            }
            with self._record.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            answer = special(self, request) if special else handler.reply_type()
            if asyncio.iscoroutine(answer):
                answer = await answer
            for message in answer if isinstance(answer, list) else [answer]:
                await stream.send_message(message)

        return serve

    def _id(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}-{self._count}"

    # ---- deploy

    def answer_ClientHello(self, request: Any) -> Any:
        return api_pb2.ClientHelloResponse(image_builder_version="2026.10")

    def answer_EnvironmentGetOrCreate(self, request: Any) -> Any:
        metadata = api_pb2.EnvironmentMetadata(name="main")
        metadata.settings.image_builder_version = "2026.10"
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def answer_AppCreate(self, request: Any) -> Any:
        return api_pb2.AppCreateResponse(app_id="ap-1", app_page_url="http://stub/app")

    def answer_AppGetOrCreate(self, request: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    def answer_AppPublish(self, request: Any) -> Any:
        return api_pb2.AppPublishResponse(url="http://stub/app")

    def answer_ImageGetOrCreate(self, request: Any) -> Any:
        result = api_pb2.GenericResult(status=OK)
        return api_pb2.ImageGetOrCreateResponse(
            image_id=self._id("im"),
            result=result,
            metadata=api_pb2.ImageMetadata(image_builder_version="2026.10"),
        )

    def answer_MountPutFile(self, request: Any) -> Any:
        return api_pb2.MountPutFileResponse(exists=True)

    def answer_MountGetOrCreate(self, request: Any) -> Any:
        return api_pb2.MountGetOrCreateResponse(mount_id=self._id("mo"))

    def answer_VolumeGetOrCreate(self, request: Any) -> Any:
        metadata = api_pb2.VolumeMetadata(version=request.version, name=request.deployment_name)
        return api_pb2.VolumeGetOrCreateResponse(volume_id=f"vo-{request.deployment_name}", metadata=metadata)

    def answer_DictGetOrCreate(self, request: Any) -> Any:
        return api_pb2.DictGetOrCreateResponse(dict_id=f"di-{request.deployment_name}")

    def answer_SecretGetOrCreate(self, request: Any) -> Any:
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{request.deployment_name}")

    def answer_FunctionPrecreate(self, request: Any) -> Any:
        function = self._id("fu")
        return api_pb2.FunctionPrecreateResponse(
            function_id=function, handle_metadata=self._handle(request.function_name)
        )

    def answer_FunctionCreate(self, request: Any) -> Any:
        function = request.existing_function_id or self._id("fu")
        ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=request.function)
        data = api_pb2.FunctionData(ranked_functions=[ranked])
        handle = self._handle(request.function.function_name)
        return api_pb2.FunctionCreateResponse(
            function_id=function, handle_metadata=handle, function_data=data
        )

    def _handle(self, name: str) -> Any:
        return api_pb2.FunctionHandleMetadata(
            function_name=name, function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION
        )

    def answer_ClassCreate(self, request: Any) -> Any:
        return api_pb2.ClassCreateResponse(class_id=self._id("cs"))

    # ---- a container

    async def answer_ContainerHeartbeat(self, request: Any) -> Any:
        if self._cancelled.is_set():
            self._cancelled.clear()
            event = api_pb2.CancelInputEvent(input_ids=[self._current], terminate_containers=False)
            return api_pb2.ContainerHeartbeatResponse(cancel_input_event=event)
        return api_pb2.ContainerHeartbeatResponse()

    async def answer_FunctionGetInputs(self, request: Any) -> Any:
        while self._inputs and "wait_for" in self._inputs[0]:
            await wait_for(self._inputs.pop(0)["wait_for"])
        if not self._inputs:
            return api_pb2.FunctionGetInputsResponse(inputs=[api_pb2.FunctionGetInputsItem(kill_switch=True)])
        item = self._inputs.pop(0)
        self._current = self._id("in")
        data = pickle.dumps(((item["payload"],), {}))
        given = api_pb2.FunctionInput(
            args=data, data_format=api_pb2.DATA_FORMAT_PICKLE, method_name="generate"
        )
        if "cancel_when" in item:
            asyncio.get_running_loop().create_task(self._cancel_when(item["cancel_when"]))
        return api_pb2.FunctionGetInputsResponse(
            inputs=[
                api_pb2.FunctionGetInputsItem(
                    input_id=self._current, function_call_id=self._id("fc"), input=given
                )
            ]
        )

    async def _cancel_when(self, path: str) -> None:
        await wait_for(path)
        self._cancelled.set()


ControlPlane.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # every RPC goes through `_wrap`


async def wait_for(path: str) -> None:
    while not Path(path).exists():
        await asyncio.sleep(0.005)


async def main() -> None:
    port_file, record = Path(sys.argv[1]), Path(sys.argv[2])
    inputs = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else []
    server = Server([ControlPlane(record, inputs)])
    await server.start("127.0.0.1", 0)
    port = server._server.sockets[0].getsockname()[1]
    part = port_file.with_suffix(".part")
    part.write_text(str(port))
    part.rename(port_file)
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
