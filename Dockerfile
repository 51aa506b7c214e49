# The virtual environment is built in one image, which has a C compiler, and moved to a smaller one,
# without the sources.

# What it runs on. On a GPU it must be python:3.13, which has the C compiler that Triton calls.
ARG BASE=python:3.13-slim

FROM python:3.13 AS build

# The package index that holds torch's CPU wheels. Without it, the default index sends the CUDA
# build, which runs on a CPU too and is several gigabytes larger. pip reads it by this name.
ARG PIP_EXTRA_INDEX_URL

WORKDIR /opt/onerow
COPY . .
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir .


FROM ${BASE}

RUN useradd --system --uid 10001 --no-create-home onerow
COPY --from=build /opt/onerow/.venv /opt/onerow/.venv

# Nothing is written but to /tmp, so the root file system can be read-only.
ENV PATH=/opt/onerow/.venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ONEROW_HOST=0.0.0.0 \
    ONEROW_PORT=8000
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"ONEROW_PORT\"]}/ready', timeout=4)"]

ENTRYPOINT ["onerow"]
CMD ["serve"]
