"""`app.py` with the real modal client and no account: a deploy against a control plane on this machine, and the real
container entry point. `PLATFORMS_PYTHON` names a Python that has modal and fal, if this one has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.service import ROOT, until

PYTHON = os.environ.get("PLATFORMS_PYTHON", sys.executable)
STUB, CONTAINER = ROOT / "tests/fakes/modal_stub.py", ROOT / "tests/fakes/modal_container.py"
FAKE_WORKER = f"{PYTHON} {ROOT / 'tests/fakes/worker.py'}"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def read_record(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_stub(
    directory: Path, inputs: list[dict[str, Any]] | None = None
) -> tuple[subprocess.Popen[bytes], int, Path]:
    directory.mkdir(exist_ok=True)
    port_file, record = directory / "port", directory / "record.jsonl"
    command = [PYTHON, str(STUB), str(port_file), str(record)]
    if inputs is not None:
        (directory / "inputs.json").write_text(json.dumps(inputs))
        command.append(str(directory / "inputs.json"))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(port_file.exists, "the stub listens")
    return process, int(port_file.read_text()), record


def environment(port: int = 0, **extra: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("COLDFRAME_", "MODAL_", "FAKE_"))
    }
    tokens = {
        "MODAL_SERVER_URL": f"http://127.0.0.1:{port}",
        "MODAL_TOKEN_ID": "ak-x",
        "MODAL_TOKEN_SECRET": "as-x",
    }
    return {**kept, **(tokens if port else {}), **extra}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record of `modal deploy app.py`."""
    process, port, record = start_stub(tmp_path_factory.mktemp("deploy"))
    settings = {
        "COLDFRAME_MODAL_GPU": "B200",
        "COLDFRAME_MODAL_REGIONS": "us-east,eu-west",
        "COLDFRAME_MODAL_SCALEDOWN_WINDOW": "14",
    }
    command = [PYTHON, "-m", "modal", "deploy", str(ROOT / "app.py")]
    done = subprocess.run(
        command,
        env=environment(port, **settings),
        capture_output=True,
        text=True,
        cwd=record.parent,
        check=False,
    )
    process.terminate()
    process.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return record


def function(record: Path, name: str) -> dict[str, Any]:
    requests = [entry["request"] for entry in read_record(record) if entry["rpc"] == "FunctionCreate"]
    return next(request["function"] for request in requests if request["function"]["function_name"] == name)


def test_the_gpu_class_as_configured(deployed: Path) -> None:
    worker = function(deployed, "Worker.*")
    assert worker["resources"]["gpu_config"] == {"count": 1, "gpu_type": "B200"}
    assert worker["resources"]["memory_mb"] == 192 * 1024
    assert (worker["timeout_secs"], worker["startup_timeout_secs"], worker["task_idle_timeout_secs"]) == (
        1800,
        300,
        14,
    )
    assert worker["scheduler_placement"]["regions"] == ["us-east", "eu-west"]
    assert worker["retry_policy"]["retries"] == 1
    assert worker["autoscaler_settings"] == {"min_containers": 0, "max_containers": 4, "scaledown_window": 14}
    weights, outputs = worker["volume_mounts"]
    assert (weights["mount_path"], weights["read_only"], weights["sub_path"]) == (
        "/weights",
        True,
        "/prepared",
    )
    assert (outputs["mount_path"], outputs.get("read_only", False)) == ("/out", False)
    assert "secret_ids" not in worker
    assert "checkpointing_enabled" not in worker
    assert "webhook_config" not in worker["method_definitions"]["generate"]
    assert "max_concurrent_inputs" not in worker


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("H200", ["H200", "1", ""]),
        (
            "B200:4",
            ["B200", "4", "python -m runtime.server.ranks 4 python -m runtime.parallel.launch worker"],
        ),
    ],
    ids=str,
)
def test_several_gpus_are_ranks_of_one_worker(gpu: str, expected: list[str]) -> None:
    code = "import app, json; print(json.dumps([app.GPU, app.RANKS, app.SETTING['WORKER_COMMAND']]))"
    done = subprocess.run(
        [PYTHON, "-c", code], env=environment(COLDFRAME_MODAL_GPU=gpu), capture_output=True, text=True, cwd=ROOT,
        check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(("gpu", "has_it"), [("H200", True), ("H100!:2", True), ("B200", False)], ids=str)
def test_flash_attention_3_is_installed_for_hopper_only(gpu: str, has_it: bool) -> None:
    code = "import app; print(any(pin.startswith('fa3-fwd==') for pin in app.pins(app.GPU_PINS)))"
    done = subprocess.run(
        [PYTHON, "-c", code], env=environment(COLDFRAME_MODAL_GPU=gpu), capture_output=True, text=True, cwd=ROOT,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(has_it)


@pytest.mark.parametrize(
    ("settings", "window"),
    [({}, "15"), ({"START_S": "20"}, "40"), ({"START_S": "0.4"}, "2"), ({"SCALEDOWN_WINDOW": "9"}, "9")],
    ids=["default", "measured", "least", "given"],
)
def test_idle_containers_are_kept_for_twice_the_measured_start(settings: dict[str, str], window: str) -> None:
    environ = environment(**{f"COLDFRAME_MODAL_{name}": value for name, value in settings.items()})
    code = "import app; print(app.SETTING['SCALEDOWN_WINDOW'])"
    done = subprocess.run(
        [PYTHON, "-c", code], env=environ, capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == window


def test_the_gateway_never_holds_a_gpu(deployed: Path) -> None:
    gateway = function(deployed, "Gateway.*")
    assert gateway["resources"]["gpu_config"] == {}
    assert gateway["checkpointing_enabled"] is True
    assert (gateway["max_concurrent_inputs"], gateway["target_concurrent_inputs"]) == (200, 100)
    webhook = gateway["method_definitions"]["web"]["webhook_config"]
    assert webhook["type"] == "WEBHOOK_TYPE_ASGI_APP"
    assert gateway["secret_ids"] == ["st-coldframe-keys"]
    assert gateway["volume_mounts"][0]["read_only"] is True


def test_prepare_alone_writes_weights_and_sees_the_token(deployed: Path) -> None:
    prepare = function(deployed, "prepare")
    assert prepare["secret_ids"] == ["st-huggingface"]
    assert "read_only" not in prepare["volume_mounts"][0]
    assert (prepare["timeout_secs"], prepare["retry_policy"]["retries"]) == (4 * 3600, 2)


def test_images_are_pinned_compiled_and_small(deployed: Path) -> None:
    built = [
        entry["request"]["image"] for entry in read_record(deployed) if entry["rpc"] == "ImageGetOrCreate"
    ]
    commands = [command for image in built for command in image.get("dockerfile_commands", [])]
    installs = [command for command in commands if "uv pip install" in command]
    assert len(installs) == 3
    assert all("--compile-bytecode" in command for command in installs)
    assert all(
        "==" in word for command in installs for word in command.split("--compile-bytecode ")[1].split()
    )
    assert not [
        c for c in installs if "torch" in c and "starlette" in c
    ]  # the gateway and the GPU have images of their own
    assert any(command.startswith("COPY --from=") and "/uv:0.13.9 " in command for command in commands)
    assert any("compileall" in command and "unchecked-hash" in command for command in commands)
    assert any("PYC_INVALIDATION_MODE=UNCHECKED_HASH" in command for command in commands)
    assert not [c for c in commands if "TOKEN" in c or "gcc" in c or "pip install modal" in c]
    mounts = [mount for name in ("Worker.*", "Gateway.*") for mount in function(deployed, name)["mount_ids"]]
    assert len(set(mounts)) == 3  # app.py of each class and the client: the packages lie in the image


def container(
    tmp_path: Path, deployed: Path, mp4: Path, inputs: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str, float]:
    """Run the real entry point to its end; record of the stub, output, Unix time at which the process was started."""
    import time

    process, port, record = start_stub(tmp_path / "stub", inputs)
    (tmp_path / "weights/minimax-h3").mkdir(parents=True)
    extra = {
        "COLDFRAME_MODAL_WEIGHTS_ROOT": str(tmp_path / "weights"),
        "COLDFRAME_MODAL_OUTPUTS_ROOT": str(tmp_path / "out"),
        "COLDFRAME_MODAL_WORKER_COMMAND": FAKE_WORKER,
        "FAKE_MP4": str(mp4),
        "FAKE_GATE": str(tmp_path / "gate"),
        "FAKE_LOG": str(tmp_path / "worker.log"),
        "MODAL_HEARTBEAT_INTERVAL": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [PYTHON, str(CONTAINER), str(port), str(deployed), "Worker.*", str(tmp_path / "arguments")]
    began = time.time()
    done = subprocess.run(
        command, env=environment(**extra), capture_output=True, text=True, cwd=ROOT, check=False
    )
    process.terminate()
    process.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    return read_record(record), done.stdout + done.stderr, began


def payload(number: int, prompt: str = "hello") -> dict[str, Any]:
    return {"payload": {"id": f"video_{number}", "request": {"prompt": prompt, "num_frames": 124}}}


def outputs(record: list[dict[str, Any]]) -> list[str]:
    results = [
        item["result"]
        for entry in record
        if entry["rpc"] == "FunctionPutOutputs"
        for item in entry["request"]["outputs"]
    ]
    return [result["status"].removeprefix("GENERIC_STATUS_") for result in results]


def test_a_container_from_start_to_exit(tmp_path: Path, deployed: Path, mp4: Path) -> None:
    record, text, _ = container(tmp_path, deployed, mp4, [payload(1), payload(2)])
    rpcs = [entry["rpc"] for entry in record]
    assert outputs(record) == ["SUCCESS", "SUCCESS"]
    assert rpcs.index("VolumeCommit") < rpcs.index("FunctionPutOutputs")  # the gateway must find the file
    assert (tmp_path / "out/video_2/video.mp4").read_bytes() == mp4.read_bytes()
    assert "background thread" not in text
    assert (tmp_path / "worker.log").read_text().splitlines()[-1] == "shutdown"
    times = {
        rpc: next(entry["t"] for entry in record if entry["rpc"] == rpc)
        for rpc in ("ContainerHello", "FunctionGetInputs")
    }
    assert (
        times["FunctionGetInputs"] - times["ContainerHello"] < 2.0
    )  # the start hook does not wait for the worker


def test_a_cancelled_call_leaves_a_container_that_takes_the_next_one(
    tmp_path: Path, deployed: Path, mp4: Path
) -> None:
    waiting = {**payload(1, "[gate@3]"), "cancel_when": str(tmp_path / "out/video_1")}
    record, _, _ = container(tmp_path, deployed, mp4, [waiting, payload(2)])
    assert outputs(record) == ["TERMINATED", "SUCCESS"]
    log = (tmp_path / "worker.log").read_text().splitlines()
    assert log.index("cancel video_1") < log.index("generate video_2")
    assert len([line for line in log if line.startswith("start")]) == 1
    assert not (tmp_path / "out/video_1/video.mp4").exists()


def test_importing_the_app_needs_modal_and_the_standard_library_only() -> None:
    code = (
        "import sys, json, modal; before = set(sys.modules); import app; "
        "print(json.dumps([name for name in set(sys.modules) - before if not name.startswith('modal')]))"
    )
    done = subprocess.run(
        [PYTHON, "-c", code],
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        cwd="/",
        check=True,
    )
    assert json.loads(done.stdout) == ["app"]


def test_the_command_line_of_one_video() -> None:
    command = [PYTHON, "-m", "modal", "run", str(ROOT / "app.py"), "--help"]
    done = subprocess.run(
        command, env=environment(COLUMNS="200"), capture_output=True, text=True, cwd="/", check=True
    )
    assert all(
        option in done.stdout for option in ("--prompt", "--out", "--seconds", "--first-frame", "--accel")
    )
