"""`POST /v1/videos`, with its blocking and streaming forms, and `POST /v1/videos/sync`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Awaitable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from runtime.server.body import Upload, read_body
from runtime.server.bundle import Admitted
from runtime.server.content import sync_response
from runtime.server.errors import ApiError
from runtime.server.jobs import COMPLETED, Idempotency, Job, new_job_id
from runtime.server.peers import Canonical, canonical
from runtime.server.pictures import Picture, load_picture
from runtime.server.service import Service
from runtime.server.stream import event_stream
from runtime.server.views import dynamo_object, job_failure_status, server_timing, video_object

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_PREFER_WAIT = re.compile(r"\bwait=(\d{1,5})\b")
ADMISSION_TIMEOUT_S = 30.0

Validated = tuple[Admitted, dict[str, Picture]]


async def create_video(request: Request) -> Response:
    """Store a job and answer with its object, its result, or its event stream, as the request asks."""
    service: Service = request.app.state.service
    job, canon, replayed = await _admit(service, request)
    headers = {"Idempotency-Replayed": "true"} if replayed else {}
    wait = _PREFER_WAIT.search(request.headers.get("prefer", ""))
    if canon.stream:
        return event_stream(service, job, 0, headers)
    if wait is not None:
        with contextlib.suppress(TimeoutError):  # then the object says how far it is
            job = await _wait(service, job, request, float(wait[1]))
        headers["Preference-Applied"] = wait[0]
    if canon.blocks:
        job = await _finished(service, job, request)
        return await _dynamo_response(service, job, canon.response_format or "url", headers)
    headers |= {
        "Server-Timing": server_timing(job),
        "openai-poll-after-ms": str(service.config.poll_after_ms),
    }
    return JSONResponse(video_object(job), headers=headers)


async def create_sync(request: Request) -> Response:
    """The finished file in the answer."""
    service: Service = request.app.state.service
    job, _, replayed = await _admit(service, request, as_file=True)
    job = await _finished(service, job, request)
    return sync_response(service, job, {"Idempotency-Replayed": "true"} if replayed else {})


# ---- admission


async def _admit(service: Service, request: Request, as_file: bool = False) -> tuple[Job, Canonical, bool]:
    """From bytes to a stored job. Nothing after the store may fail: a client would repeat the creation.

    as_file: the answer is the file itself, whatever else the body may ask for is refused.
    """
    owner: str = request.scope["owner"]
    service.refuse_if_unavailable()
    key = _idempotency_key(request)
    if key is None:
        service.admission.check(owner)  # before the body is read; with a key the job may exist already
    canon = canonical(await read_body(request, service.config, service.body_budget))
    if as_file:
        _refuse_other_answers(canon)
    model = await asyncio.to_thread(service.bundle.check_model, canon.model)
    idempotency = Idempotency(key, body_hash(canon)) if key is not None else None
    if idempotency is not None and (known := service.store.idempotent(owner, idempotency)):
        return known, canon, True
    service.admission.check(owner)
    async with service.admissions:
        admitted, pictures = await _in_time(asyncio.to_thread(_validate, service, canon))
    if idempotency is not None and (known := service.store.idempotent(owner, idempotency)):
        return known, canon, True
    service.admission.take(owner)
    job = _new_job(service, owner, model, admitted, pictures, request.scope)
    service.store.create(job, {name: picture.data for name, picture in pictures.items()}, idempotency)
    service.engine.pump()
    return service.store.get(job.id) or job, canon, False


def _refuse_other_answers(canon: Canonical) -> None:
    name = "stream" if canon.stream else "response_format" if canon.response_format == "b64_json" else None
    if name is not None:
        raise ApiError(
            "this route answers with the file itself", code="unsupported_parameter", where=name,
            hint="POST /v1/videos has the other answers",
        )  # fmt: skip


async def _in_time(validation: Awaitable[Validated]) -> Validated:
    """A picture or an address that keeps a thread busy for too long does not keep the client waiting."""
    try:
        return await asyncio.wait_for(validation, ADMISSION_TIMEOUT_S)
    except TimeoutError:
        limit = f"{ADMISSION_TIMEOUT_S:g} s"
        raise ApiError("the request could not be checked in time", status=408, expected=limit) from None


def _validate(service: Service, canon: Canonical) -> Validated:
    config = service.config
    pictures = {
        name: load_picture(source.value, source.where, config.max_picture_bytes, service.fetcher)
        for name, source in canon.pictures.items()
    }
    return service.bundle.admit(canon.fields, pictures), pictures


def _new_job(
    service: Service,
    owner: str,
    model: str,
    admitted: Admitted,
    pictures: dict[str, Picture],
    scope: Scope,
) -> Job:
    return Job(
        id=new_job_id(),
        owner=owner,
        model=model,
        created_at=service.store.clock(),
        request=admitted.fields,
        video=admitted.video,
        pictures={name: f"{name}.{picture.kind}" for name, picture in pictures.items()},
        request_id=scope["request_id"],
        traceparent=scope.get("traceparent", ""),
        bundle_id=service.bundle.identity,
    )


def body_hash(canon: Canonical) -> str:
    """SHA-256 of what the client asked for, however it was encoded."""
    content: dict[str, Any] = dataclasses.asdict(dataclasses.replace(canon, pictures={}))
    content["pictures"] = {
        name: hashlib.sha256(source.value.data).hexdigest()
        if isinstance(source.value, Upload)
        else source.value
        for name, source in canon.pictures.items()
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and _KEY.fullmatch(key) is None:
        raise ApiError(
            "not a key",
            where="Idempotency-Key",
            code="invalid_idempotency_key",
            expected="1 to 255 visible ASCII characters",
        )
    return key


# ---- waiting


async def _finished(service: Service, job: Job, request: Request) -> Job:
    """The completed job. Raises: ApiError: it failed, or the limit passed (the job goes on).

    A client that leaves takes its job along, unless that has a key: then others may wait for it, and a repeat is expected.
    """
    is_only_waiter = _idempotency_key(request) is None
    try:
        job = await _wait(service, job, request, service.config.sync_timeout_s, cancel_if_gone=is_only_waiter)
    except TimeoutError:
        raise ApiError(
            "the result is not there yet; the job goes on", status=504, code="wait_timeout",
            headers={"x-should-retry": "false"}, extra={"job_id": job.id},
        ) from None  # fmt: skip
    if job.status != COMPLETED:
        error = job.error or {}
        raise ApiError(
            str(error.get("message", "the job was deleted")), status=job_failure_status(error),
            code=str(error.get("code", "deleted")), where=error.get("param"), headers={"x-should-retry": "false"},
            extra={"job_id": job.id},
        )  # fmt: skip
    return job


async def _wait(
    service: Service, job: Job, request: Request, timeout_s: float, cancel_if_gone: bool = False
) -> Job:
    """The job after its last event. Raises: TimeoutError; ApiError: the client left."""
    ended = asyncio.create_task(service.feeds.ended(job))
    gone = asyncio.create_task(_disconnected(request))
    try:
        done, _ = await asyncio.wait({ended, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        gone.cancel()
    if ended in done:
        return service.store.get(job.id) or dataclasses.replace(job, status="failed")
    if gone in done:
        if cancel_if_gone:
            await service.engine.cancel(job.id)
        raise ApiError("the client left", code="client_gone")
    raise TimeoutError


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _dynamo_response(service: Service, job: Job, form: str, headers: dict[str, str]) -> Response:
    if form == "b64_json":
        data = await asyncio.to_thread(service.store.video_path(job.id).read_bytes)
        entry = {"b64_json": base64.b64encode(data).decode()}
    else:
        entry = {"url": f"/v1/videos/{job.id}/content"}
    headers["Server-Timing"] = server_timing(job)
    return JSONResponse(dynamo_object(job, entry), headers=headers)
