"""Modal deployment: a CPU gateway with the HTTP API, a GPU worker class with plain methods, and a prepare function.

Every container of the app imports this file: nothing but the standard library and modal at the top. Settings are
`COLDFRAME_MODAL_*` variables at deploy time; they are baked into the images, so that containers see the same values.
"""

import time

STARTED_NS = time.time_ns()  # the worker's clock starts here, before the rest of this file

import math  # noqa: E402
import os  # noqa: E402
import pathlib  # noqa: E402

import modal  # noqa: E402

PREFIX = "COLDFRAME_MODAL_"
DEFAULTS = {
    "BUNDLE": "minimax-h3",  # name under /weights/prepared
    "REPOSITORY": "MiniMaxAI/MiniMax-H3",
    "REVISION": "main",
    "GPU": "H200",  # exact type: kernels belong to one architecture; "H200:2" puts two on every request
    "REGIONS": "us-east",
    "MAX_CONTAINERS": "4",
    "MIN_CONTAINERS": "0",
    "START_S": "7.2",  # measured start (the study's P50, seconds): an idle container is kept twice as long
    "SCALEDOWN_WINDOW": "",  # seconds to keep an idle container, instead
    "SNAPSHOT": "0",  # memory snapshot of the worker's parent process: measured, off unless it wins
    "WEIGHTS_VOLUME": "coldframe-weights",
    "OUTPUTS_VOLUME": "coldframe-outputs",
    "JOBS_DICT": "coldframe-jobs",
    "KEYS_SECRET": "coldframe-keys",
    "HF_SECRET": "huggingface",
    "INTERRUPTED": "rerun",
    "WEIGHTS_ROOT": "/weights",
    "OUTPUTS_ROOT": "/out",
    "WORKER_COMMAND": "",  # another worker program, for tests
}
SETTING = {name: os.environ.get(PREFIX + name, default) for name, default in DEFAULTS.items()}
SETTING["SCALEDOWN_WINDOW"] = SETTING["SCALEDOWN_WINDOW"] or str(
    min(3600, max(2, math.ceil(2 * float(SETTING["START_S"]))))  # what Modal takes
)
GPU, _, RANKS = SETTING["GPU"].partition(":")
RANKS = RANKS or "1"
ARCHITECTURES = {"H100": "sm_90a", "H200": "sm_90a", "B200": "sm_100a"}  # what kernels/aot compiles for
if RANKS != "1" and not SETTING["WORKER_COMMAND"]:
    SETTING["WORKER_COMMAND"] = (
        f"python -m runtime.server.ranks {RANKS} python -m runtime.parallel.launch worker"
    )
REGIONS = [region for region in SETTING["REGIONS"].split(",") if region]
PACKAGES = ("prepare", "runtime", "loader", "kernels", "manifests")
WEIGHTS, OUTPUTS = SETTING["WEIGHTS_ROOT"], SETTING["OUTPUTS_ROOT"]
HERE = pathlib.Path(__file__).parent
CODE = "/opt/coldframe"
UV_VERSION = "0.13.9"
GATEWAY_PINS = (
    "starlette",
    "msgspec",
    "python-multipart",
    "pillow",
    "numpy",
    "tokenizers",
    "uvicorn",
    "h11",
    "anyio",
    "idna",
)
GPU_PINS = ("torch", "numpy", "pillow", "av", "tokenizers", "cuda-bindings", "nvidia-libnvcomp-cu13")
if ARCHITECTURES.get(GPU.rstrip("!+")) == "sm_90a":
    GPU_PINS += ("fa3-fwd",)  # FlashAttention-3, for this architecture only


def pins(names):
    """`name==version` for each, as in constraints.txt; bare names inside a container, where no image is built."""
    constraints = HERE / "constraints.txt"
    if not constraints.is_file():
        return list(names)
    lines = [line.strip() for line in constraints.read_text().splitlines() if "==" in line]
    known = {line.partition("==")[0].lower().replace("_", "-"): line for line in lines}
    return [known.get(name, name) for name in names]


def image(names):
    """Small base without a compiler, pinned packages and this project, all with bytecode that never goes stale."""
    built = (
        modal.Image.from_registry("python:3.12-slim-bookworm")
        .entrypoint([])
        .env({"PYC_INVALIDATION_MODE": "UNCHECKED_HASH", "PYTHONPATH": CODE, "PYTHONSAFEPATH": "1"})
        .uv_pip_install(*pins(names), uv_version=UV_VERSION)
    )
    for package in PACKAGES:
        built = built.add_local_dir(
            HERE / package, f"{CODE}/{package}", copy=True, ignore=["**/__pycache__", "**/*.pyc"]
        )
    built = built.run_commands(f"python -m compileall -q -j 0 --invalidation-mode unchecked-hash {CODE}")
    return built.env({PREFIX + name: value for name, value in SETTING.items() if value})


app = modal.App("coldframe")
gateway_image, gpu_image = image(GATEWAY_PINS), image(GPU_PINS)
prepare_image = image((*GPU_PINS, "huggingface-hub"))
weights = modal.Volume.from_name(SETTING["WEIGHTS_VOLUME"], create_if_missing=True, version=2)
outputs = modal.Volume.from_name(SETTING["OUTPUTS_VOLUME"], create_if_missing=True, version=2)
jobs = modal.Dict.from_name(SETTING["JOBS_DICT"], create_if_missing=True)
prepared = weights.with_mount_options(read_only=True, sub_path="/prepared")


@app.cls(
    image=gpu_image,
    gpu=SETTING["GPU"],
    cpu=16.0,
    memory=192 * 1024,
    region=REGIONS,
    volumes={WEIGHTS: prepared, OUTPUTS: outputs},
    timeout=1800,
    startup_timeout=300,
    scaledown_window=int(SETTING["SCALEDOWN_WINDOW"]),
    min_containers=int(SETTING["MIN_CONTAINERS"]),
    max_containers=int(SETTING["MAX_CONTAINERS"]),
    retries=modal.Retries(max_retries=1, initial_delay=1.0),
    enable_memory_snapshot=SETTING["SNAPSHOT"] == "1",
)
class Worker:
    """One GPU, or several together. Plain methods: a call waits in the platform's queue, and no poll ever reaches this class."""

    @modal.enter()
    def boot(self):
        """Start the worker process and return: requests arrive while weights stream."""
        from runtime.platforms.modal_gpu import start_worker

        bundle, out = pathlib.Path(WEIGHTS) / SETTING["BUNDLE"], pathlib.Path(OUTPUTS)
        started_ns = (
            time.time_ns() if SETTING["SNAPSHOT"] == "1" else STARTED_NS
        )  # a restored clock starts at restore
        self.runtime = start_worker(bundle, out, started_ns, jobs)

    @modal.method()
    def generate(self, job: dict) -> dict:
        """Make one video; see runtime/platforms/gpu.py for what goes in and out."""
        answer = self.runtime.run(job)
        outputs.commit()
        return answer

    @modal.exit()
    def stop(self):
        self.runtime.close()


@app.cls(
    image=gateway_image,
    volumes={WEIGHTS: prepared},
    secrets=[modal.Secret.from_name(SETTING["KEYS_SECRET"])],
    enable_memory_snapshot=True,
    scaledown_window=300,
    timeout=3600,
    max_containers=1,  # one writer of job records; 200 concurrent requests are far below what it can do
)
@modal.concurrent(max_inputs=200, target_inputs=100)
class Gateway:
    """The HTTP API on a CPU: polls, downloads and fetches must never wake or hold a GPU."""

    @modal.enter(snap=True)
    def imports(self):
        """Modules land in the snapshot; nothing is opened yet."""
        import runtime.platforms.modal_gateway
        import runtime.server.app
        import runtime.server.schema  # noqa: F401

    @modal.asgi_app(label="coldframe", requires_proxy_auth=False)  # bearer keys are checked inside
    def web(self):
        from runtime.platforms.modal_gateway import build_gateway

        os.environ.setdefault("COLDFRAME_SERVE_INTERRUPTED", SETTING["INTERRUPTED"])
        bundle = pathlib.Path(WEIGHTS) / SETTING["BUNDLE"]
        return build_gateway(bundle, pathlib.Path("/tmp/coldframe"), Worker(), jobs, outputs)


@app.function(
    image=prepare_image,
    gpu=GPU,
    region=REGIONS,
    volumes={WEIGHTS: weights},
    secrets=[modal.Secret.from_name(SETTING["HF_SECRET"], required_keys=["HF_TOKEN"])],
    timeout=4 * 3600,
    ephemeral_disk=600 * 1024,
    retries=2,
)
def prepare(revision: str = SETTING["REVISION"], force: bool = False) -> str:
    """Download a checkpoint, repack it with the kernels of the GPU, publish it under its bundle name. Safe to repeat; resumes.

    Returns the SHA-256 of the manifest.
    """
    from runtime.platforms.bundles import prepare_bundle

    root = pathlib.Path(WEIGHTS)
    options = ["--ranks", RANKS] if RANKS != "1" else []
    if architecture := ARCHITECTURES.get(GPU.rstrip("!+")):
        options += ["--kernels", architecture]
    digest = prepare_bundle(
        SETTING["REPOSITORY"], revision, root, SETTING["BUNDLE"], force=force, options=options
    )
    weights.commit()
    print(f"manifest SHA-256: {digest}\nnext: modal run app.py::warm_region, then modal deploy app.py")  # noqa: T201 (remote output)
    return digest


@app.function(image=gateway_image, region=REGIONS, volumes={WEIGHTS: prepared}, timeout=3600, memory=4096)
def warm_region() -> dict:
    """Read the bundle once, so that the region's cache holds it; returns bytes and seconds."""
    from runtime.platforms.bundles import read_through

    return read_through(pathlib.Path(WEIGHTS) / SETTING["BUNDLE"])


@app.local_entrypoint()
def main(
    prompt: str = "Steam rises from a cup beside a rainy window.",
    out: str = "video.mp4",
    seconds: float = 5.0,
    size: str = "",
    seed: int = -1,
    accel: str = "",
    first_frame: str = "",
    last_frame: str = "",
):
    """One video from the shell: `modal run app.py --prompt "…" --out out.mp4`."""
    from runtime.platforms.shell import local_job, report

    job = local_job(
        prompt,
        seconds=seconds,
        size=size,
        seed=seed,
        accel=accel,
        first_frame=first_frame,
        last_frame=last_frame,
    )
    answer = Worker().generate.remote(job)
    if "error" not in answer:
        pathlib.Path(out).write_bytes(b"".join(outputs.read_file(f"{job['id']}/video.mp4")))
    raise SystemExit(report(answer, out))
