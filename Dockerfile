# A server of one model; see docs/serving.md.
#
#   docker build -t jaxspec .                                    # for CPUs
#   docker build -t jaxspec --build-arg EXTRAS=serve,cuda13 .    # for NVIDIA GPUs
#   docker run -p 8000:8000 -v jaxspec-cache:/cache --stop-timeout 40 jaxspec
#
# For GPUs add --gpus all. What comes after the image's name are options of `jaxspec serve`.

FROM python:3.12-slim AS build
ARG EXTRAS=serve
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY jaxspec jaxspec
COPY pallas_kernels pallas_kernels
RUN python -m venv /opt/jaxspec \
    && /opt/jaxspec/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.12-slim
COPY --from=build /opt/jaxspec /opt/jaxspec
# /cache holds models from the hub and compiled programs: a later start takes seconds.
ENV PATH=/opt/jaxspec/bin:$PATH \
    HF_HOME=/cache/huggingface \
    JAX_COMPILATION_CACHE_DIR=/cache/compilation \
    PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --create-home jaxspec \
    && mkdir /cache \
    && chown jaxspec /cache
USER 1000
WORKDIR /home/jaxspec
VOLUME /cache
EXPOSE 8000
# 503 while the model loads and compiles, and after SIGTERM.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["jaxspec", "serve", "--host", "0.0.0.0", "--port", "8000"]
