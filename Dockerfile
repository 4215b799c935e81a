# One replica of the HTTP service with its worker, for any host with an NVIDIA driver.
#   docker build -t coldframe .
#   docker run --init --gpus all -p 8000:8000 -e COLDFRAME_API_KEYS=… -v /srv/prepared:/weights:ro -v /srv/state:/state coldframe
# Only the container's start matters at run time: no compiler, pinned packages, bytecode that never goes stale.
FROM python:3.12-slim-bookworm AS build
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV PYC_INVALIDATION_MODE=UNCHECKED_HASH UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy
RUN uv venv /opt/venv
COPY constraints.txt /src/
RUN uv pip install --python /opt/venv/bin/python -c /src/constraints.txt \
    torch numpy pillow av tokenizers cuda-bindings starlette uvicorn msgspec python-multipart
COPY pyproject.toml README.md LICENSE /src/
COPY prepare /src/prepare
COPY runtime /src/runtime
COPY loader /src/loader
COPY kernels /src/kernels
COPY manifests /src/manifests
RUN uv pip install --python /opt/venv/bin/python --no-deps --build-constraints /src/constraints.txt /src \
    && /opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
       /opt/venv/lib/python3.12/site-packages/prepare /opt/venv/lib/python3.12/site-packages/runtime \
       /opt/venv/lib/python3.12/site-packages/loader /opt/venv/lib/python3.12/site-packages/kernels \
       /opt/venv/lib/python3.12/site-packages/manifests

FROM python:3.12-slim-bookworm
COPY --from=build /opt/venv /opt/venv
RUN useradd --system --uid 10001 --home-dir /state coldframe && mkdir -p /state /weights && chown coldframe /state
ENV PATH=/opt/venv/bin:$PATH PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    COLDFRAME_BUNDLE=/weights COLDFRAME_SERVE_STATE=/state COLDFRAME_SERVE_HOST=0.0.0.0 COLDFRAME_SERVE_LOG=json
USER coldframe
WORKDIR /state
VOLUME ["/state"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('COLDFRAME_SERVE_PORT', '8000') + '/health', timeout=2)"]
ENTRYPOINT ["coldframe", "serve"]
