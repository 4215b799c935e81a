"""fal deployment: one GPU runner with the same worker. `fal run fal_app.py::H3Worker --local` serves it here.

fal's queue supplies submit, status and result, so `/` blocks. While weights load nothing answers 503: one 503 ends the
runner. Module level holds what the deploy needs; the rest is imported in methods.
"""

import os
import time

import fal
from fal.exceptions import AppException, FieldException, RequestCancelledException
from fal.toolkit import File
from pydantic import BaseModel, ConfigDict, Field

STARTED_NS = time.time_ns()
PREFIX = "COLDFRAME_FAL_"
BUNDLE = os.environ.get(PREFIX + "BUNDLE", "/data/prepared/minimax-h3")
WORKER_COMMAND = os.environ.get(PREFIX + "WORKER_COMMAND", "")
REPOSITORY = os.environ.get(
    PREFIX + "REPOSITORY", "fal_v3"
)  # where finished files go; `in_memory` = data uri
RATIOS = r"^(21:9|16:9|4:3|1:1|3:4|9:16|auto)$"


class VideoIn(BaseModel):
    """The request fields of the HTTP API that make sense behind a queue; a test holds the two together."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1, max_length=65536)
    size: str | None = Field(None, pattern=r"^[1-9][0-9]{1,3}x[1-9][0-9]{1,3}$")
    width: int | None = None
    height: int | None = None
    aspect_ratio: str | None = Field(None, pattern=RATIOS)
    short_edge: int | None = None
    seconds: float | None = Field(None, gt=0, le=15)
    num_frames: int | None = Field(None, ge=1, le=362)
    fps: int | None = None
    seed: int | None = Field(None, ge=0, le=2**63 - 1)
    num_inference_steps: int | None = None
    task: str | None = Field(None, pattern="^(t2va|fl2va)$")
    first_frame: str | None = Field(None, description="data:image/png|jpeg|webp;base64,…")
    last_frame: str | None = None
    accel: str | None = None


class VideoOut(BaseModel):
    video: File
    seed: int | None = None
    result: dict = Field(default_factory=dict)
    start: dict | None = None


class H3Worker(
    fal.App,
    name="coldframe",
    keep_alive=30,
    compile_bytecode=True,
    python_version="3.12",
):
    """One GPU, one job at a time."""

    machine_type = "GPU-H200"
    num_gpus = 1
    app_auth = "private"
    requirements = [  # noqa: RUF012 (fal reads plain class attributes)
        "torch==2.13.0",
        "numpy==2.4.6",
        "pillow==13.0.0",
        "av==18.1.0",
        "tokenizers==0.23.3",
        "cuda-bindings==13.5.0",
        "nvidia-libnvcomp-cu13==6.0.0.12",
        "fa3-fwd==0.0.3",  # FlashAttention-3, for the machine type above
    ]
    local_python_modules = ["prepare", "runtime", "loader", "kernels", "manifests"]  # noqa: RUF012
    data_mounts = ["/data"]  # noqa: RUF012
    min_concurrency = 0
    max_concurrency = 4
    max_multiplexing = 1
    request_timeout = 1800
    startup_timeout = 300
    termination_grace_period_seconds = 60

    def setup(self):
        """Start the worker process and return: fal delivers nothing before."""
        import pathlib
        import tempfile

        from runtime.platforms.fal_gpu import FalRuntime

        outputs = pathlib.Path(tempfile.mkdtemp(prefix="coldframe-"))
        self.runtime = FalRuntime(
            pathlib.Path(BUNDLE), outputs, started_ns=STARTED_NS, command=WORKER_COMMAND.split()
        )

    @fal.endpoint("/")
    def generate(self, inp: VideoIn) -> VideoOut:
        """Make one video. Blocks until it is there."""
        from runtime.platforms.fal_gpu import Cancelled, Refused

        request_id = self.current_request.request_id if self.current_request is not None else None
        try:
            answer, path = self.runtime.run(inp.model_dump(exclude_none=True), request_id)
        except Cancelled:
            raise RequestCancelledException("cancelled by the client") from None
        except Refused as refusal:
            if refusal.field is not None:
                raise FieldException(refusal.field, refusal.message) from None
            raise AppException(refusal.message, refusal.status) from None
        try:
            video = File.from_path(path, content_type="video/mp4", repository=REPOSITORY)
        finally:
            self.runtime.discard(path)
        result = answer.get("result") or {}
        return VideoOut(video=video, seed=result.get("seed"), result=result, start=answer.get("start"))

    @fal.endpoint("/cancel")
    def cancel(self) -> dict:
        """fal posts here with the request id of the job to stop."""
        request_id = self.current_request.request_id if self.current_request is not None else None
        return {"cancelled": self.runtime.cancel(request_id)}

    @fal.endpoint("/ready", health_check=fal.HealthCheck(start_period_seconds=300, call_regularly=True))
    def ready(self) -> dict:
        """Always 200 while the worker loads or runs; the phase is in the body."""
        from runtime.platforms.fal_gpu import Refused

        try:
            return self.runtime.health()
        except Refused as failure:
            raise AppException(failure.message, failure.status) from None

    def teardown(self):
        self.runtime.close()
