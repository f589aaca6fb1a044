# Image of Wingbeat with the Ray version it was tested with, for `docker run` and KubeRay (examples/kubernetes).
#   docker build -t wingbeat:cpu .
#   docker build -t wingbeat:cuda --build-arg VARIANT=cuda .
#   docker run --shm-size 4g --stop-timeout 60 -p 127.0.0.1:8000:8000 wingbeat:cpu
#   docker run --gpus all ... -v MODELS:/models wingbeat:cuda serve --host 0.0.0.0 --model /models/NAME
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim-bookworm
# cpu: torch without CUDA. cuda: PyPI's torch, which includes CUDA's libraries; the node provides the driver.
ARG VARIANT=cpu
# Must equal the Ray version of all nodes of a cluster, and rayVersion of a RayService.
ARG RAY_VERSION=2.60.0
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# g++ compiles the CPU kernels for the processor that a replica runs on; Triton's launchers need a C compiler.
# KubeRay's probes and the health check run wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/*

COPY constraints/cpu.txt /tmp/build/cpu.txt
COPY --from=wheel /wheels /tmp/build/wheels
RUN case "${VARIANT}" in \
        cpu) set -- --extra-index-url "${TORCH_CPU_INDEX}" --constraint /tmp/build/cpu.txt ;; \
        cuda) set -- ;; \
        *) echo "VARIANT is ${VARIANT}: must be cpu or cuda" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir "$@" "ray[serve]==${RAY_VERSION}" /tmp/build/wheels/*.whl \
    && rm -rf /tmp/build

# Numeric, because Kubernetes' runAsNonRoot cannot check a user name.
RUN useradd --uid 1000 --create-home --shell /bin/bash wingbeat
USER 1000
WORKDIR /home/wingbeat

# Environment that `wingbeat serve` sets for its own Ray, for cases in which something else starts Ray here.
ENV RAY_worker_niceness=0 \
    RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=0.5 \
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=30 \
    no_grpc_proxy=0.0.0.0/0,::/0,localhost \
    WINGBEAT_CACHE_DIR=/home/wingbeat/.cache/wingbeat \
    TRITON_CACHE_DIR=/home/wingbeat/.cache/wingbeat/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1

EXPOSE 8000
STOPSIGNAL SIGTERM
# A start loads, compiles and measures before the first answer. Kubernetes uses its own probes instead.
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s --retries=3 \
    CMD ["wget", "--tries=1", "--quiet", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]

ENTRYPOINT ["wingbeat"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
