"""The ASGI application: routes, and the service's life bound to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from loader.errors import WorkerError
from runtime.server import operations, videos
from runtime.server.content import get_content
from runtime.server.create import create_sync, create_video
from runtime.server.gate import Gate, on_http_exception, on_worker_error
from runtime.server.service import Service


class VideoIdConvertor(StringConvertor):
    """One segment of a path that is not the name of another route; handlers check that it is an id of ours."""

    regex = r"(?!sync(?:/|$))[^/]+"


register_url_convertor("video", VideoIdConvertor())

ROUTES = [
    Route("/", operations.page),
    Route("/v1/videos", create_video, methods=["POST"]),
    Route("/v1/videos", videos.list_videos),
    Route("/v1/videos/sync", create_sync, methods=["POST"]),
    *(
        Route(f"/v1/videos/{name}", videos.not_offered, methods=["GET", "POST"])
        for name in ("edits", "extensions", "characters")
    ),
    Route("/v1/videos/characters/{character_id}", videos.not_offered),
    Route("/v1/videos/{video_id:video}", videos.delete_video, methods=["DELETE"]),
    Route("/v1/videos/{video_id:video}", videos.get_video),
    Route("/v1/videos/{video_id:video}/content", get_content),
    Route("/v1/videos/{video_id:video}/cancel", videos.cancel_video, methods=["POST"]),
    Route("/v1/videos/{video_id:video}/events", videos.video_events),
    Route("/v1/videos/{video_id:video}/remix", videos.not_offered, methods=["POST"]),
    Route("/v1/models", operations.models),
    Route("/v1/models/{model}", operations.model),
    Route("/v1/model_info", operations.models),
    Route("/server_info", operations.status),
    Route("/v1/status", operations.status),
    Route("/v1/startup", operations.startup),
    *(Route(path, operations.livez) for path in ("/livez", "/liveness", "/ping")),
    *(Route(path, operations.health) for path in ("/health", "/health-check")),
    *(Route(path, operations.ready) for path in ("/ready", "/readyz")),
    Route("/metrics", operations.metrics),
    Route("/version", operations.version),
    Route("/openapi.json", operations.openapi),
]


def build_app(service: Service) -> Starlette:
    """The application of one replica; its lifespan starts and stops the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(Gate, service=service)],
        exception_handlers={WorkerError: on_worker_error, HTTPException: on_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app
