# Two images: `pipeline` executes runs (code server, Spark, commands); `dagster` is Dagster's webserver and daemon, without Spark. What
# changes often comes last, so that a change of the pipeline's code makes one small layer anew. docker-compose.yaml shows them together.

ARG BASE=debian:trixie-slim

FROM ${BASE} AS base
ENV PATH=/opt/pgwal/bin:$PATH \
    HOME=/var/lib/pgwal \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DAGSTER_HOME=/var/lib/pgwal/dagster \
    PGSYSCONFDIR=/tmp/pgwal
# libnss-unknown names every user id: Java's and Hadoop's logins fail for one without a name, as OpenShift gives them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libnss-unknown python3 tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* \
    && sed -Ei 's/^(passwd|group):.*/\1: files/' /etc/nsswitch.conf \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /var/lib/pgwal pgwal \
    && sed -Ei 's/^(passwd|group):.*/\1: files unknown/' /etc/nsswitch.conf \
    && install -d -o 10001 -g 0 -m 0775 /var/lib/pgwal /var/lib/pgwal/dagster /var/lib/pgwal/lake /var/lib/pgwal/spark

# What only builds: uv, and hatchling for the pipeline's wheel.
FROM base AS tools
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv
COPY constraints.txt /build/
RUN python3 -m venv /opt/tools && /opt/tools/bin/pip install --no-cache-dir --constraint /build/constraints.txt uv hatchling

# The packages of the two images, without the pipeline itself.
FROM tools AS packages
COPY pyproject.toml /build/
RUN python3 -c "import tomllib; p = tomllib.load(open('/build/pyproject.toml', 'rb'))['project']; \
    open('/build/dagster.txt', 'w').write('\n'.join(p['optional-dependencies']['deployment'])); \
    open('/build/pipeline.txt', 'w').write('\n'.join(p['dependencies']))"

# The wheel of the pipeline.
FROM tools AS wheel
COPY pyproject.toml README.md LICENSE /build/
COPY pgwal_pipeline /build/pgwal_pipeline
RUN cd /build && /opt/tools/bin/python -m hatchling build --target wheel --directory /build/dist

FROM base AS dagster-packages
ARG UV_SYSTEM_CERTS=true UV_LINK_MODE=copy UV_CACHE_DIR=/root/.cache/uv UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
COPY --from=packages /build/constraints.txt /build/dagster.txt /build/
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv venv --python /usr/bin/python3 /opt/pgwal \
    && /opt/tools/bin/uv pip install --python /opt/pgwal/bin/python --constraints /build/constraints.txt -r /build/dagster.txt \
    && find /opt/pgwal -type d -name tests -prune -exec rm -rf {} +

FROM base AS dagster
ARG VERSION=0.1.0
ARG BASE_DIGEST
COPY --from=dagster-packages /opt/pgwal /opt/pgwal
COPY deploy/image/entrypoint deploy/image/health deploy/image/passwords /usr/local/bin/
COPY deploy/workspace.yaml /etc/pgwal/
COPY --chown=10001:0 deploy/dagster.yaml /var/lib/pgwal/dagster/dagster.yaml
WORKDIR /var/lib/pgwal
USER 10001:0
EXPOSE 3000
LABEL org.opencontainers.image.title="pgwal-dagster" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
# tini forwards signals and reaps the processes that runs leave behind.
ENTRYPOINT ["tini", "--", "entrypoint"]
CMD ["dagster-webserver", "-h", "0.0.0.0", "-p", "3000", "-w", "/etc/pgwal/workspace.yaml"]

FROM base AS pipeline-base
ARG UV_SYSTEM_CERTS=true UV_LINK_MODE=copy UV_CACHE_DIR=/root/.cache/uv UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-21-jre-headless openssh-client \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
COPY --from=packages /build/constraints.txt /build/dagster.txt /build/pipeline.txt /build/
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv venv --python /usr/bin/python3 /opt/pgwal \
    && /opt/tools/bin/uv pip install --python /opt/pgwal/bin/python --constraints /build/constraints.txt \
       --build-constraints /build/constraints.txt -r /build/dagster.txt -r /build/pipeline.txt \
    && find /opt/pgwal -type d -name tests -prune -exec rm -rf {} + \
    && rm -rf /build

# Delta's and S3's jars, and Spark's own libraries for this processor: here now, not fetched or unpacked in the first run. Only these
# modules decide what they are.
FROM pipeline-base AS jars
ENV XDG_CACHE_HOME=/opt/cache
COPY pgwal_pipeline/__init__.py /build/pgwal_pipeline/
COPY pgwal_pipeline/host/__init__.py pgwal_pipeline/host/cache.py /build/pgwal_pipeline/host/
COPY pgwal_pipeline/messages /build/pgwal_pipeline/messages
COPY pgwal_pipeline/spark/__init__.py pgwal_pipeline/spark/jars.py pgwal_pipeline/spark/java.py /build/pgwal_pipeline/spark/
COPY deploy/image/natives /build/
RUN cd /build && python -m pgwal_pipeline.spark.jars s3 && rm -f /opt/cache/pgwal_pipeline/*.lock \
    && python natives "$(python -c 'import pyspark, os; print(os.path.dirname(pyspark.__file__))')/jars" /opt/native

# The classes that Spark loads, recorded.
FROM jars AS classes
COPY pgwal_pipeline/settings.py /build/pgwal_pipeline/
COPY pgwal_pipeline/host /build/pgwal_pipeline/host
COPY pgwal_pipeline/spark /build/pgwal_pipeline/spark
RUN cd /build && python -m pgwal_pipeline.spark.record_classes && rm -rf /opt/cache/pgwal_pipeline/jars /opt/cache/pgwal_pipeline/spark-warehouse

FROM pipeline-base AS pipeline
ARG VERSION=0.1.0
ARG BASE_DIGEST
ENV XDG_CACHE_HOME=/opt/cache \
    PGWAL_LAKE=/var/lib/pgwal/lake \
    SPARK_SUBMIT_OPTS="-Djava.library.path=/opt/native -DZstdNativePath=/opt/native/libzstd-jni.so -Dorg.xerial.snappy.lib.path=/opt/native -Dorg.xerial.snappy.lib.name=libsnappyjava.so"
COPY --from=jars /opt/cache /opt/cache
COPY --from=jars /opt/native /opt/native
COPY --from=classes /opt/cache /opt/cache
COPY --from=classes /opt/pgwal/var /opt/pgwal/var
COPY deploy/image/entrypoint deploy/image/health /usr/local/bin/
COPY deploy/image/source-here deploy/workspace.yaml /etc/pgwal/
COPY --chown=10001:0 deploy/dagster.yaml /var/lib/pgwal/dagster/dagster.yaml
RUN --mount=type=bind,from=wheel,source=/build/dist,target=/build --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --python /opt/pgwal/bin/python --no-cache --no-deps /build/*.whl
WORKDIR /var/lib/pgwal
USER 10001:0
EXPOSE 4000 15002
LABEL org.opencontainers.image.title="pgwal-pipeline" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
ENTRYPOINT ["tini", "--", "entrypoint"]
CMD ["dagster", "code-server", "start", "-h", "0.0.0.0", "-p", "4000", "-m", "pgwal_pipeline.definitions", "--location-name", "pgwal_pipeline"]
