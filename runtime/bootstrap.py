"""The first code of a worker. Its first statement is t = 0; it imports the standard library only.

`start` builds the startup graph and returns a running engine: the reader is reading and torch is being imported before
anything else of this project is loaded. What runs when is in `runtime.nodes`.
"""

import time

T0_NS = time.monotonic_ns()

# ruff: noqa: E402 (the clock starts before the other imports)
import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.family import Family, ImageResolver, Prepared
    from runtime.first_request import FirstRequest
    from runtime.settings import Settings


def start(
    settings: "Settings",
    body: "Mapping[str, object] | None" = None,
    resolve_image: "ImageResolver | None" = None,
    origin_ns: int | None = None,
    on_family: "Callable[[Family], None] | None" = None,
    first: "FirstRequest | None" = None,
) -> "tuple[Engine, Prepared | None]":
    """Start a worker, with its first request if there is one already.

    Args:
        settings: deployment.
        body: the first request's fields; its validation and preparation run beside the load.
        resolve_image: fetches pictures that the request names (None: only data URIs are accepted).
        origin_ns: t = 0 of the timeline; this module's first statement if None.
        on_family: called as soon as the manifest is read, so that requests can be validated during the load.
        first: in place of `body`, a request that may come during the start; its errors do not fail the start. With several
            ranks it comes to rank 0, which tells the others; with ranks on several hosts nothing is loaded by it.
    Returns: the engine, and the first request, ready to be passed to `Engine.run`. Where a launcher started several
        ranks, on rank 0 only: the others serve it and then leave the process.
    Raises: WorkerError: the first cause of whatever failed; nothing is left running.
    """
    from runtime.nodes import start_engine
    from runtime.parallel.environment import rank_environment
    from runtime.timeline import Timeline, process_start_ns

    timeline = Timeline(T0_NS if origin_ns is None else origin_ns)
    process_ns = process_start_ns()
    if process_ns is not None:
        timeline.note(interpreter_start_s=round((timeline.origin_ns - process_ns) / 1e9, 3))
    environment = rank_environment()
    if environment.size > 1:
        from runtime.parallel.start import start_on_ranks

        return start_on_ranks(environment, settings, timeline, body, resolve_image, on_family, first)
    with without_collector():
        return start_engine(settings, timeline, body, resolve_image, on_family, first)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """A start makes no garbage: plans and manifests would be walked for nothing, 20 ms before the first read."""
    has_collector = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if has_collector:
            gc.enable()
