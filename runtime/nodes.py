"""The nodes of a worker's start. Adding a component to the start means adding a node here.

On the main thread: spawn (the uploader, which reads as well, and torch's libraries on their way into memory, first: all of
that goes on while the manifest is parsed) → manifest → load → family → torch → models → compute → warm-up. Beside it,
on the request's thread: parse → tokens (of another process), pictures, packed layout, embedding rows; on another, for that
request: the libraries' warm-up as soon as torch is there, then the conditioner's. A request that a worker is sent while it
starts is taken until the operators are chosen: what is left of all this runs for it. During the import compiled operators are
opened, and what a request uses first is used once natively. The conditioner and the first step follow in
`runtime.pipeline`, behind the load, because every group is waited for where it is used.

Import, models and launches share one interpreter lock: what is not Python is done without it, and what is Python and not torch's import
is done elsewhere or before the libraries are mapped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loader.errors import CapabilityError, RequestError
from runtime.startup import Graph, Node, Results
from runtime.timeline import Timeline

if TYPE_CHECKING:
    from kernels.cubin import KernelSet
    from loader.manifest import GroupRecord, Manifest
    from loader.options import StreamOptions
    from loader.reader_link import ChildReader
    from loader.stream import WeightStream
    from loader.uploader_link import UploaderProcess
    from runtime.compute import Compute
    from runtime.engine import Engine
    from runtime.family import Family, ImageResolver, Prepared
    from runtime.first_request import FirstRequest
    from runtime.settings import Settings
    from runtime.torch_import import TorchImport
    from runtime.torch_preload import Preload
    from runtime.weights import WeightSet

_LOADING_MODULES = ("loader.manifest", "loader.stream", "runtime.family", "runtime.weights")


def start_engine(
    settings: Settings,
    timeline: Timeline,
    body: Mapping[str, object] | None,
    resolve_image: ImageResolver | None,
    on_family: Callable[[Family], None] | None = None,
    first: FirstRequest | None = None,
) -> tuple[Engine, Prepared | None]:
    """Run the startup graph; see `runtime.bootstrap.start`."""
    return run_start(WorkerStart(settings, timeline, body, resolve_image, on_family, first), timeline)


def run_start(start: WorkerStart, timeline: Timeline) -> tuple[Any, Prepared | None]:
    """Run a start's nodes; its engine and the first request. Raises: the first failure, with nothing left running."""
    try:
        results = Graph(start.nodes(), timeline).run()
    except BaseException:
        start.give_up()
        raise
    return start.engine(results), results["request"]


class WorkerStart:
    """What the nodes of one start share."""

    def __init__(
        self,
        settings: Settings,
        timeline: Timeline,
        body: Mapping[str, object] | None,
        resolve_image: ImageResolver | None,
        on_family: Callable[[Family], None] | None,
        first: FirstRequest | None = None,
    ) -> None:
        self.settings = settings
        self.timeline = timeline
        self.body = body
        self.resolve_image = resolve_image
        self.on_family = on_family
        self.first = first
        self.directory = Path(settings.bundle)
        self.device = choose_device(settings.device)
        self.order = ""
        self.weights: WeightSet | None = None
        self.reader: ChildReader | None = None
        self.uploader: UploaderProcess | None = None
        self.preload: Preload | None = None
        self.finish_import: Callable[[], TorchImport] | None = None
        self.done_natively: set[str] = set()

    def nodes(self) -> list[Node]:
        return [
            Node("spawn", self.spawn, cancel=self.stop_loading),
            Node("manifest", self.manifest),
            Node("load", self.load, needs=("spawn", "manifest"), cancel=self.stop_loading),
            # What follows imports a lot: after `load`, so that it does not delay the first read.
            Node("family", self.family, needs=("load",)),
            Node("first request", self.await_request, ("load",), "request", cancel=self.take_no_request),
            Node("request", self.request, needs=("family", "first request"), thread="request"),
            Node("torch", self.torch, needs=("load",)),
            Node("torch check", self.check_torch, needs=("torch",), thread="checks"),
            Node("engine", self.import_engine, needs=("torch check",), thread="checks"),
            Node("models", self.models, needs=("torch",)),
            Node("kernels", self.open_kernels, needs=("load",), thread="native"),
            Node("compute", self.compute, needs=("models", "kernels")),
            Node("native kernels", self.use_kernels_natively, needs=("family",), thread="native"),
            Node("native warm-up", self.warm_up_natively, needs=("request",), thread="native"),
            Node("library warm-up", self.warm_up_libraries, needs=("torch", "request"), thread="libraries"),
            Node("conditioner warm-up", self.warm_up_conditioner, needs=("compute",), thread="libraries"),
            Node("last call", self.take_no_request, needs=("compute",)),
            Node("warm-up", self.warm_up, needs=("compute", "request")),
        ]

    def spawn(self, results: Results) -> None:
        """Spawn the process that reads, for a GPU the uploader's; without it the loader's fallbacks decide."""
        if not self.settings.bundle:
            raise RequestError(
                "no prepared directory given", where="bundle", hint="coldframe prepare makes one"
            )
        try:
            self.spawn_processes()
        except OSError as error:
            self.timeline.note(spawn=f"not spawned early: {error}")
        self.import_loading()
        if self.device == "cuda":
            from runtime.torch_preload import let_openmp_sleep

            let_openmp_sleep()
        if self.settings.torch_trims == "all":
            from runtime.torch_preload import start_preload

            self.preload = start_preload(first=self.open_driver)

    def open_driver(self) -> None:
        """The driver's library for the loader, which needs it while torch's are being mapped."""
        if self.device == "cuda":
            from loader.cuda_library import cuda_library

            with contextlib.suppress(CapabilityError):  # the loader will say so
                cuda_library()

    def spawn_processes(self) -> None:
        """The uploader for a GPU, which reads as well, or a reader, unless a rung of the loader is forced that has neither."""
        self.spawn_uploader()
        if self.uploader is None and self.settings.loader_path in ("", "A"):
            self.spawn_reader()

    def spawn_uploader(self) -> None:
        if self.device == "cuda" and self.settings.loader_path in ("", "U"):
            from loader.uploader_link import spawn_uploader

            self.uploader = spawn_uploader(self.device)

    def spawn_reader(self) -> None:
        from loader.reader_link import spawn_reader

        self.reader = spawn_reader()

    def import_loading(self) -> None:
        """What the nodes `manifest` and `load` import, all of it before torch's libraries are being mapped.

        Importing an extension module waits for the dynamic linker's lock, which that mapping holds for long.
        """
        wiring = "loader.device_start" if self.device == "cuda" else "loader.cpu_start"
        for name in (*_LOADING_MODULES, wiring):
            importlib.import_module(name)

    def manifest(self, results: Results) -> Manifest:
        from loader.manifest import read_manifest

        return read_manifest(self.directory, self.settings.manifest_sha256 or None)

    def family(self, results: Results) -> Any:
        from runtime.family import family_for

        manifest = results["manifest"]
        family = family_for(manifest, self.directory, self.settings.task, self.settings.schedule)
        if self.on_family is not None:
            self.on_family(family)
        return family

    def load(self, results: Results) -> WeightSet:
        from runtime.family import likely_order
        from runtime.weights import WeightSet

        manifest, settings = results["manifest"], self.settings
        if self.first is not None:
            self.body = self.body_to_load_by(self.first)
        self.order = order = likely_order(manifest, self.body, settings.task, settings.schedule)
        self.weights = WeightSet(lambda groups: self.start_stream(manifest, groups))
        self.weights.ensure(manifest.orders[order])
        entry = _entry_bytes(manifest, manifest.orders[order])
        self.timeline.note(order=order, device=self.device, entry_bytes=entry)
        return self.weights

    def body_to_load_by(self, first: FirstRequest) -> Mapping[str, object] | None:
        """The request if it is there by now; for one that was announced it is worth to wait a moment."""
        from runtime.first_request import FOLLOWS_S

        return first.wait(FOLLOWS_S if first.follows else 0)

    def start_stream(self, manifest: Manifest, groups: Sequence[str]) -> WeightStream:
        from loader.load_plan import plan_load
        from loader.stream import start

        reader, self.reader = self.reader, None  # the first stream takes the processes over
        uploader, self.uploader = self.uploader, None
        return start(
            plan_load(manifest, groups),
            self.directory,
            device=self.device,
            options=self.stream_options(),
            reader=reader,
            uploader=uploader,
        )

    def stream_options(self) -> StreamOptions:
        from loader.options import StreamOptions

        return StreamOptions(
            verify=self.settings.verify,
            ring_bytes=round(self.settings.ring_gib * 2**30) // 4096 * 4096 or None,
            threads=self.settings.reader_threads or None,
            storage_gbps=self.settings.storage_gbps or None,
            path=self.settings.loader_path or None,
        )

    def stop_loading(self) -> None:
        if self.weights is not None:
            self.weights.close()
        spawned = [process for process in (self.uploader, self.reader) if process is not None]
        self.uploader = self.reader = None
        for process in spawned:
            process.stop()
            process.close()

    def give_up(self) -> None:
        """After a failure: nothing is left loading, and no library is half-way in when the process ends.

        A library that is being initialised while the process exits aborts it.
        """
        self.stop_loading()
        if self.preload is not None:
            self.preload.join()

    def await_request(self, results: Results) -> None:
        """Wait for a first request: until it is there, or `last call`."""
        if self.first is not None:
            self.body = self.first.wait()

    def take_no_request(self, results: Results | None = None) -> None:
        """Nothing is left here for a request that comes now: whoever gets it prepares it."""
        if self.first is not None:
            self.first.close()

    def request(self, results: Results) -> Prepared | None:
        """Prepare the first request. What is wrong with one that came meanwhile is its sender's: the start goes on."""
        if self.body is None:
            return None
        try:
            prepared = self.prepare_request(results["family"], self.body)
        except Exception as error:  # a request's border: it is raised again where the request came from
            if self.first is None:
                raise
            self.first.settle(error)
            return None
        if self.first is not None:
            self.first.settle(prepared)
        for tensor, rows in prepared.rows.items():
            results["load"].fetch_rows(tensor, rows)
        return prepared

    def prepare_request(self, family: Family, body: Mapping[str, object]) -> Prepared:
        if self.device == "cuda":
            family.spawn_tokenizer()
        try:
            if self.preload is not None:
                self.preload.join()  # what follows imports extensions: see `import_loading`
            return family.prepare(family.parse(body, self.resolve_image))
        finally:
            family.stop_tokenizer()

    def torch(self, results: Results) -> None:
        from runtime.torch_import import begin_import, choose_trims

        trims = choose_trims(self.settings.torch_trims)
        done, self.finish_import = begin_import(self.device, self.settings.cpu_threads, trims, self.preload)
        self.timeline.note(torch=done.facts())
        self.timeline.mark("torch_ready")

    def check_torch(self, results: Results) -> None:
        """Before the first request, and beside what runs on zeros: does the trimmed torch compute what it should?"""
        assert self.finish_import is not None, "torch was imported"
        self.timeline.note(torch=self.finish_import().facts())

    def import_engine(self, results: Results) -> None:
        """What the end of the start imports, while the main thread waits for the driver."""
        import runtime.engine  # noqa: F401 (the import is the work)

    def models(self, results: Results) -> None:
        """Import the numerical modules, so that no import is left for the first step."""
        results["family"].import_models()

    def open_kernels(self, results: Results) -> KernelSet | None:
        """Hand compiled operators to the driver while torch is being imported; None: left to `compute`.

        Not before torch's libraries are mapped: opening the driver would wait for that with the interpreter's lock.
        """
        if self.device != "cuda" or self.preload is None:
            return None
        self.preload.join()
        from runtime.compute import open_early

        return open_early(self.directory, results["manifest"].kernels)

    def compute(self, results: Results) -> Compute:
        from runtime.compute import choose_compute

        backend, kernels = self.settings.attention, results["manifest"].kernels
        compute = choose_compute(self.device, self.directory, kernels, backend, results["kernels"])
        self.timeline.note(**compute.report())
        return compute

    @property
    def has_first_uses(self) -> bool:
        """A GPU's libraries and kernels are loaded on first use; a CPU has nothing to gain."""
        return self.device == "cuda"

    def use_kernels_natively(self, results: Results) -> None:
        """First uses during the import of torch, where the settings ask for them: what does not depend on a request."""
        self.run_natively(results, "native_kernels", None)

    def warm_up_natively(self, results: Results) -> None:
        """The rest of them, for a request that is there before torch is."""
        if results["request"] is None:
            return
        if self.has_first_uses and "torch" in results:
            self.timeline.note(native_warm_up={"problems": ["torch was ready before the request"]})
        else:
            self.run_natively(results, "native_warm_up", results["request"])

    def run_natively(self, results: Results, note: str, request: Prepared | None) -> None:
        setting, preload = self.settings.native_warm_up, self.preload
        if not self.has_first_uses or setting == "none" or preload is None:
            return
        from runtime.native_warm_up import OF_ANY_REQUEST, chosen_items, warm_natively
        from runtime.torch_preload import find_torch

        install = find_torch()
        chosen, problem = chosen_items(setting, install.version)
        items = tuple(item for item in chosen if (item in OF_ANY_REQUEST) == (request is None))
        if items:
            preload.join()
            problem = preload.problem
        if problem:
            self.timeline.note(**{note: {"problems": [problem]}})
        if problem or not items:
            return
        facts = warm_natively(
            install,
            self.device,
            items,
            lambda native, chosen: results["family"].native_operations(request, native, chosen),
            is_over=lambda: "torch" in results or results.is_cancelled,
        )
        self.timeline.note(**{note: facts})
        if facts["is_complete"]:
            self.done_natively.update(items)

    def warm_up_libraries(self, results: Results) -> None:
        """First uses of a waiting request that need torch alone, while the models are being imported."""
        if self.has_first_uses and results["request"] is not None:
            results["family"].warm_up_libraries(results["request"], self.device)

    def warm_up_conditioner(self, results: Results) -> None:
        """The rest of its conditioner's first uses, on the same thread: most of it is waiting for the driver.

        Left out where nothing is left of it but its own work, and the conditioner need not wait for weights.
        """
        request = results["request"]
        if not self.has_first_uses or request is None:
            return
        is_warm = self.done_natively.issuperset(("kernels", "operators"))
        if is_warm and not self.has_time(request.order, results["manifest"]):
            self.timeline.note(conditioner_warm_up="not needed")
        else:
            results["family"].warm_up_conditioner(request, results["compute"])

    def warm_up(self, results: Results) -> None:
        """Initialise libraries on dummy data so that the first step pays for nothing."""
        if not self.has_first_uses:
            return
        if not self.warm_up_denoiser(results):
            results["family"].warm_up(results["request"], results["compute"])
        self.timeline.note(**results["compute"].report())

    def warm_up_denoiser(self, results: Results) -> bool:
        """The first evaluation of a waiting request, while weights are still to come; whether that was all there is.

        By default only with at least a fifth of the groups before the first evaluation missing, which is as long as it
        takes: beside a conditioner that has its weights it would delay the entry by more than it saves.
        """
        if results["request"] is None:
            return False
        items = warm_up_items(self.settings.warm_up)
        if self.settings.warm_up == "all" and not self.has_time(
            results["request"].order, results["manifest"]
        ):
            items = ()
        self.timeline.note(warm_up=list(items))
        with self.timeline.span("denoiser warm-up"):
            done: bool = results["family"].warm_up_denoiser(results["request"], results["compute"], items)
        return done

    def has_time(self, order: str, manifest: Manifest) -> bool:
        assert self.weights is not None, "the load has started"
        self.weights.ensure(manifest.orders[order])
        groups = _entry_groups(manifest, manifest.orders[order])
        return 5 * sum(not self.weights.is_ready(group.name) for group in groups) > len(groups)

    def engine(self, results: Results) -> Engine:
        from runtime.engine import Engine

        manifest, family = results["manifest"], results["family"]
        return Engine(self.settings, self.timeline, manifest, family, results["load"], results["compute"])


def warm_up_items(setting: str) -> tuple[str, ...]:
    """What `warm_up` of the settings asks for; `all` leaves out what another item covers."""
    if setting in ("all", "none"):
        return ("memory", "step") if setting == "all" else ()
    return tuple(item.strip() for item in setting.split(",") if item.strip())


def _entry_bytes(manifest: Manifest, order: Sequence[str]) -> int:
    """Bytes of the groups that come before the first entry into the denoiser's blocks."""
    return sum(group.end - group.start for group in _entry_groups(manifest, order))


def _entry_groups(manifest: Manifest, order: Sequence[str]) -> list[GroupRecord]:
    groups = [manifest.groups[name] for name in order]
    first_block = next(
        (i for i, group in enumerate(groups) if group.name.startswith("transformer/blocks.")), 0
    )
    return groups[:first_block]


def choose_device(wanted: str) -> str:
    """`cpu` or `cuda`. `auto` looks for the driver's device node, without loading the driver, and whether it is hidden.

    Raises: CapabilityError: CUDA was asked for by name, and there is no device node or `CUDA_VISIBLE_DEVICES` names none.
    """
    has_node = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))  # noqa: PTH110 (cold path)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    # The driver takes the list up to the first name of another kind.
    is_hidden = not (first.isdecimal() or first.startswith(("GPU-", "MIG-")))
    if wanted == "auto":
        return "cuda" if has_node and not is_hidden else "cpu"
    if wanted == "cuda" and not has_node:
        raise CapabilityError("no NVIDIA device here", where="device", hint="use --device cpu")
    if wanted == "cuda" and is_hidden:
        raise CapabilityError("CUDA_VISIBLE_DEVICES hides all GPUs", where="device", hint="use --device cpu")
    return wanted
