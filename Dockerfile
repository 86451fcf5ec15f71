# The environment of `make env` as an image: same constraints, no virtual environment. Tasks and daemons run from it.
FROM python:3.11-slim-bookworm
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/spotlight
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY spot_runtime spot_runtime
COPY tasks tasks
COPY workflows workflows
COPY launchplans launchplans
RUN python -m pip install -c constraints.txt .
ENTRYPOINT []
CMD ["spotlight", "--help"]
