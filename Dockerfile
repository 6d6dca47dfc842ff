# syntax=docker/dockerfile:1
# One image for the code server (which executes the runs), the webserver and the daemon; docker-compose.yaml shows them together.

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    XDG_CACHE_HOME=/opt/cache \
    PATH=/opt/pgwal/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless tini \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
WORKDIR /build
RUN python -m venv /opt/pgwal
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY pgwal_pipeline ./pgwal_pipeline
# dagster-postgres stores Dagster's events. It needs a SQLAlchemy in which psycopg2 is still the default driver.
RUN --mount=type=cache,target=/opt/cache/pip \
    pip install --constraint constraints.txt . 'dagster-postgres>=0.29,<0.30' 'sqlalchemy<2.1'
# Download Delta's jars now and not in the first run, and record the classes that Spark loads for a quicker start.
RUN python -m pgwal_pipeline.spark.jars && python -m pgwal_pipeline.spark.record_classes && rm -rf /opt/cache/pip

FROM base
RUN useradd --uid 10001 --create-home pgwal \
    && install -d -o pgwal -g pgwal /var/lib/pgwal /var/lib/pgwal/dagster /var/lib/pgwal/lake
COPY --from=build /opt/pgwal /opt/pgwal
COPY --from=build --chown=pgwal:pgwal /opt/cache /opt/cache
COPY --chown=pgwal:pgwal deploy/dagster.yaml /var/lib/pgwal/dagster/dagster.yaml
COPY deploy/workspace.yaml /etc/pgwal/workspace.yaml
ENV DAGSTER_HOME=/var/lib/pgwal/dagster \
    PGWAL_LAKE=/var/lib/pgwal/lake
WORKDIR /var/lib/pgwal
USER pgwal
EXPOSE 3000 4000
# tini forwards signals and reaps the processes that runs leave behind.
ENTRYPOINT ["tini", "--"]
CMD ["dagster-webserver", "-h", "0.0.0.0", "-p", "3000", "-w", "/etc/pgwal/workspace.yaml"]
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:3000/server_info', timeout=5)"]
