"""Start the real container entry point of Modal for a class that a deploy has recorded.

Run with a Python that has modal: `python modal_container.py PORT RECORD_FILE FUNCTION_NAME ARGUMENTS_FILE`; it replaces
itself by the entry point, so that the process start is the container's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from google.protobuf.json_format import ParseDict
from modal_proto import api_pb2


def main() -> None:
    port, record, name, arguments_file = sys.argv[1:5]
    entries = [json.loads(line) for line in Path(record).read_text().splitlines()]
    created = next(
        entry["request"]["function"]
        for entry in entries
        if entry["rpc"] == "FunctionCreate" and entry["request"]["function"]["function_name"] == name
    )
    definition = ParseDict(created, api_pb2.Function(), ignore_unknown_fields=True)
    arguments = api_pb2.ContainerArguments(
        task_id="ta-1", function_id="fu-1", app_id="ap-1", function_def=definition
    )
    arguments.environment_name = "main"
    layout = arguments.app_layout
    layout.function_ids[name] = "fu-1"
    layout.class_ids[name.removesuffix(".*")] = "cs-1"
    handle = api_pb2.FunctionHandleMetadata(
        function_name=name, is_method=False, method_handle_metadata={
            method: api_pb2.FunctionHandleMetadata(function_name=f"{name.removesuffix('.*')}.{method}", is_method=True)
            for method in definition.method_definitions
        },
    )  # fmt: skip
    layout.objects.append(api_pb2.Object(object_id="fu-1", function_handle_metadata=handle))
    layout.objects.append(
        api_pb2.Object(object_id="cs-1", class_handle_metadata=api_pb2.ClassHandleMetadata())
    )
    for dependency in definition.object_dependencies:
        layout.objects.append(api_pb2.Object(object_id=dependency.object_id))
    Path(arguments_file).write_bytes(arguments.SerializeToString())
    environ = {
        **os.environ,
        "MODAL_IS_REMOTE": "1",
        "MODAL_TASK_ID": "ta-1",
        "MODAL_IMAGE_ID": "im-1",
        "MODAL_SERVER_URL": f"http://127.0.0.1:{port}",
        "MODAL_CONTAINER_ARGUMENTS_PATH": arguments_file,
    }
    os.execve(sys.executable, [sys.executable, "-m", "modal._container_entrypoint"], environ)


if __name__ == "__main__":
    main()
