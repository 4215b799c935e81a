# One replica of the HTTP service with its worker, for any host with an NVIDIA driver.
#   docker build -t coldframe .
#   docker run --init --gpus all -p 8000:8000 -e COLDFRAME_API_KEYS=… -v /srv/prepared:/weights:ro -v /srv/state:/state coldframe
# Only the container's start matters at run time: no compiler, pinned packages, bytecode that never goes stale.
FROM python:3.12-slim-bookworm AS build
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt /src/
RUN python -m venv /opt/venv && /opt/venv/bin/pip install \
    torch numpy pillow av tokenizers cuda-bindings nvidia-libnvcomp-cu13 fa3-fwd starlette uvicorn msgspec python-multipart
COPY pyproject.toml README.md LICENSE /src/
COPY prepare /src/prepare
COPY runtime /src/runtime
COPY loader /src/loader
COPY kernels /src/kernels
COPY manifests /src/manifests
RUN /opt/venv/bin/pip install --no-deps /src
# Some packages bring files that are no valid Python of this version; what cannot be compiled is never imported.
RUN cd /opt/venv/lib/python3.12/site-packages \
    && { /opt/venv/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash . || true; } \
    && /opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash prepare runtime loader kernels manifests

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
