# Forebay in an image: docker build -t forebay .
# With PyTorch: docker build -t forebay --build-arg EXTRAS=prepare,network,remote,torch .
FROM python:3.13-slim-bookworm AS build
ARG EXTRAS=prepare,network,remote
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN python -m venv /opt/forebay && /opt/forebay/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.13-slim-bookworm
RUN groupadd --gid 10001 forebay \
    && useradd --uid 10001 --gid forebay --create-home forebay \
    && install --directory --owner=forebay --group=forebay /work
COPY --from=build /opt/forebay /opt/forebay
ENV PATH=/opt/forebay/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /work
# The code of filters, for the machine that builds the image; on other processors the first run compiles its own.
RUN if python -c "import numba" 2>/dev/null; then forebay warm; fi
# FOREBAY_STATUS: the address of this container's node; FOREBAY_IDENTITY: its directory. Unset: always healthy.
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m \
    CMD ["sh", "-c", "test -z \"$FOREBAY_STATUS\" || exec forebay status --json --probe"]
ENTRYPOINT ["forebay"]
