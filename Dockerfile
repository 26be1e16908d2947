# Outrider's image: its services are commands of it, `outrider router`, `outrider target` and so on.
#
# make image                                 by what follows; `make help` tells more
#   BASE          any image with Python 3.11 or later and venv; the same runs what the other built
#   TORCH_INDEX   where torch comes from, as pip's --index-url has it; empty: as all else, which is a build with CUDA
#   WHEELS        folder, here beside, whose wheels are preferred: say, of a torch for CPUs
#   EXTRAS        of the project: nixl, and cpu where there is no GPU
ARG BASE=python:3.11-slim-bookworm
ARG EXTRAS=nixl

# What the services run on. On a GPU Triton compiles, when it first runs, what starts its kernels: in C, against Python's
# headers. For CPUs it is the base alone.
FROM ${BASE} AS system
ARG EXTRAS
RUN case ",${EXTRAS}," in *,cpu,*) exit ;; esac \
    && include=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))') \
    && compiles() { echo '#include <Python.h>' | gcc -fsyntax-only -I "$include" -x c -; } \
    && if ! compiles 2> /dev/null; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends \
            gcc libc6-dev $(test -e "$include/Python.h" || echo libpython3-dev) \
        && rm -rf /var/lib/apt/lists/* \
        && compiles; \
    fi

# What others wrote: changes with the locked versions alone.
FROM ${BASE} AS dependencies
ARG TORCH_INDEX=
ARG WHEELS=build/wheels
ARG EXTRAS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/build/.ci/constraints.txt
WORKDIR /build
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/outrider
COPY .ci/constraints.txt .ci/dependencies.py .ci/
# Without wheels there, only the second is copied.
COPY ${WHEELS}/*.whl pyproject.toml /build/wheels/
COPY pyproject.toml ./
RUN python3 .ci/dependencies.py ${EXTRAS} > requirements.txt \
    && install() { /opt/pip/bin/pip --python /opt/outrider/bin/python install --find-links wheels "$@"; } \
    && if [ -n "${TORCH_INDEX}" ]; then install --index-url "${TORCH_INDEX}" torch; fi \
    && install --requirement requirements.txt \
    && python3 .ci/dependencies.py --leave-out /opt/outrider

# What we wrote.
FROM dependencies AS package
COPY LICENSE README.md ./
COPY protos protos
COPY shared shared
COPY services services
RUN /opt/pip/bin/pip wheel --no-deps --wheel-dir dist ./protos . \
    && /opt/pip/bin/pip --python /opt/outrider/bin/python install --no-deps --target /opt/app dist/*.whl

# Kernels for CPUs, which are found there without a compiler.
FROM ${BASE} AS kernels
RUN command -v c++ > /dev/null || { apt-get update && apt-get install --yes --no-install-recommends g++; }
WORKDIR /build
COPY shared/__init__.py shared/
COPY shared/engine/__init__.py shared/engine/
COPY shared/engine/native shared/engine/native
RUN python3 -m shared.engine.native ahead

FROM system
ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Outrider" \
      org.opencontainers.image.description="Serves large language models losslessly and fast by speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=dependencies /opt/outrider /opt/outrider
COPY --from=package /opt/app /opt/app
COPY --from=kernels /build/shared/engine/native/built /opt/app/shared/engine/native/built
# All that is ever written is temporary; a hub's models are cached there too, unless HF_HOME says otherwise.
ENV PATH=/opt/app/bin:/opt/outrider/bin:${PATH} PYTHONPATH=/opt/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /tmp
USER 10001:10001
ENTRYPOINT ["outrider"]
CMD ["--help"]
