# Images of headroom's server: `docker build --target cpu` (the default) or `--target cuda`.
# docs/install.md says how to run them; compose.yaml does both.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm

# The wheel is built once, with a compiler that the other images do not have.
FROM ${PYTHON_IMAGE} AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY headroom headroom
# Without its C++ module the package would be built, too, and run on slow kernels: that is an error
# here, and --verbose shows what the compiler said.
RUN python3 -m venv /build \
    && /build/bin/pip wheel --verbose --no-cache-dir --no-deps --wheel-dir /dist . \
    && /build/bin/python -m zipfile --list /dist/*.whl > /dist/contents \
    && grep --quiet kernels/native/_native /dist/contents

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/headroom/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/headroom \
    HEADROOM_HOME=/var/lib/headroom \
    HEADROOM_HOST=0.0.0.0 \
    HEADROOM_PORT=8080
RUN python3 -m venv /opt/headroom \
    && useradd --system --uid 10001 --home-dir "$HOME" --shell /usr/sbin/nologin headroom \
    && install --directory --owner=headroom --group=headroom --mode=0750 "$HOME"
WORKDIR /var/lib/headroom
# Pulled models, aliases, measured speeds, and machine code of kernels.
VOLUME /var/lib/headroom
EXPOSE 8080
STOPSIGNAL SIGTERM
# While a model is loaded, /health answers 503. The certificate need not be one for 127.0.0.1.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import os, ssl, urllib.request as http; \
scheme = 'https' if os.environ.get('HEADROOM_TLS_CERT') else 'http'; \
tls = ssl.create_default_context(); tls.check_hostname = False; tls.verify_mode = ssl.CERT_NONE; \
http.urlopen(f'{scheme}://127.0.0.1:{os.environ[\"HEADROOM_PORT\"]}/health', timeout=4, context=tls)"]
ENTRYPOINT ["headroom"]
CMD ["serve"]

FROM base AS cuda
# torch brings CUDA's libraries and NVRTC; the host's driver comes with NVIDIA's container toolkit.
# Triton compiles small C programs when it first runs a kernel.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH"
COPY --from=wheel /dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/headroom-*.whl)[server,gpu]" \
    && headroom --version
USER 10001

FROM base AS cpu
# TORCH_INDEX: a package index with builds of torch for CPUs alone; pip's own has those for GPUs,
# which run here as well, but take gigabytes more.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY --from=wheel /dist/*.whl /tmp/
RUN pip install --no-cache-dir "$(echo /tmp/headroom-*.whl)[server]" \
    && headroom --version
USER 10001
