"""Traces over OTLP/HTTP, for those who set `OTEL_EXPORTER_OTLP_ENDPOINT`. Nothing of it is on the cold path.

Starts and requests are remembered as references until the first request is complete; only then is OpenTelemetry imported,
on a thread of its own, and spans are made after the fact, with the times that were recorded anyway. All other `OTEL_…`
variables that OpenTelemetry's SDK and exporter know work as they do elsewhere (headers, certificates, resource, sampler).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from runtime.server.jobs import COMPLETED, Job
from runtime.server.spans import Trace, TraceSpan, trace_of_job, trace_of_start

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
KEPT_BEFORE_FIRST = 64
"""Starts and failed requests that wait for the first complete one; the oldest go first."""
MAX_BEHIND = 256
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)
_Entry = Job | Mapping[str, Any]


class Tracing:
    """Takes starts and ended requests on the event loop, exports them on a thread. Does nothing where it is not enabled.

    Args:
        version: of the service, for the resource.
        is_enabled: by default whether the endpoint's variable is set.
    """

    def __init__(self, version: str, is_enabled: bool | None = None) -> None:
        self._version = version
        self._is_enabled = bool(os.environ.get(ENDPOINT)) if is_enabled is None else is_enabled
        self._kept: deque[_Entry] = deque(maxlen=KEPT_BEFORE_FIRST)
        self._queue: queue.Queue[_Entry | None] = queue.Queue(MAX_BEHIND)
        self._thread: threading.Thread | None = None

    def on_start(self, start: Mapping[str, Any]) -> None:
        """A worker has become ready."""
        self._take(start)

    def on_job(self, job: Job) -> None:
        """A job has changed; its end is what counts."""
        if job.is_active or job.expired:
            return
        self._take(job)
        if self._is_enabled and self._thread is None and job.status == COMPLETED:
            self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
            for entry in self._kept:
                self._queue.put_nowait(entry)
            self._kept.clear()
            self._thread.start()

    def _take(self, entry: _Entry) -> None:
        if not self._is_enabled:
            return
        if self._thread is None:
            return self._kept.append(entry)
        try:
            self._queue.put_nowait(entry)
        except queue.Full:  # a receiver that does not answer must not cost memory
            log.warning("a trace was dropped: the receiver is too slow")

    def close(self) -> None:
        """Export what is left, for at most `CLOSE_TIMEOUT_S`. Blocks. What still waits for a first request is dropped."""
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            exporter = _Exporter(self._version)
        except ImportError as error:
            self._is_enabled = False
            log.warning(
                "no traces: OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed",
                extra={"missing": error.name, "hint": "pip install 'coldframe[otel]'"},
            )
            return
        while (entry := self._queue.get()) is not None:
            try:
                trace = trace_of_job(entry) if isinstance(entry, Job) else trace_of_start(entry)
                if trace is not None:
                    exporter.export(trace)
            except Exception:  # border: tracing never disturbs what it traces
                log.exception("a trace could not be exported")
        exporter.close()


class _Exporter:
    """OpenTelemetry's SDK behind one call for each trace: one export, no queue and no timer of its own.

    Raises: ImportError: the packages of the extra `otel` are missing.
    """

    def __init__(self, version: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        ours = Resource({"service.name": "coldframe", "service.version": version})
        named = Resource.create()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over our names
        unnamed = str(named.attributes.get("service.name", "")).startswith("unknown_service")
        resource = named.merge(ours) if unnamed else ours.merge(named)
        self._finished = InMemorySpanExporter()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._tracer = self._provider.get_tracer("coldframe", version)
        self._otlp = OTLPSpanExporter()
        self._last_start: SpanContext | None = None

    def export(self, trace: Trace) -> None:
        """Make the spans of a trace and send them in one request; the exporter logs what it cannot send."""
        from opentelemetry.trace import Link, SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        is_start = trace.root.name == "worker.start"
        caller = TraceContextTextMapPropagator().extract({"traceparent": trace.parent})
        links = [Link(self._last_start)] if trace.waited_for_start and self._last_start else []
        root = self._tracer.start_span(
            trace.root.name,
            caller,
            SpanKind.INTERNAL if is_start else SpanKind.SERVER,
            trace.root.attributes,
            links,
            trace.root.start_ns,
        )
        if is_start:
            self._last_start = root.get_span_context()
        inside = set_span_in_context(root)
        for child in trace.children:
            span = self._tracer.start_span(
                child.name, inside, attributes=child.attributes, start_time=child.start_ns
            )
            _end(span, child)
        _end(root, trace.root)
        finished = self._finished.get_finished_spans()
        self._finished.clear()
        if finished:
            self._otlp.export(finished)

    def close(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]
        self._provider.shutdown()


def _end(span: Span, recorded: TraceSpan) -> None:
    from opentelemetry.trace import StatusCode

    for name, t_ns in recorded.events:
        span.add_event(name, timestamp=t_ns)
    if recorded.error:
        span.set_status(StatusCode.ERROR, recorded.error)
    span.end(recorded.end_ns)
