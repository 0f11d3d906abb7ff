# forge on a CPU: the embedded model, or with EXTRAS=[hf] any of HuggingFace's.
#
#   docker build -t forge .
#   docker build -t forge-hf --build-arg EXTRAS='[hf]' \
#       --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#   docker run --init -p 8080:8080 -e FORGE_API_KEY forge
#   docker run --init -p 8080:8080 -e FORGE_API_KEY -v ./models:/models:ro \
#       forge-hf /models/Qwen3-0.6B
#
# Without a key it does not start: its address is one that other machines can reach.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS built

ARG EXTRAS=""
# On Linux a plain torch brings CUDA, which is gigabytes: name PyTorch's index for CPUs.
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE forge_llm_engine.py ./
COPY constraints ./constraints
COPY forge ./forge
COPY bench ./bench
COPY sim ./sim
RUN python -m venv /opt/forge \
    && /opt/forge/bin/pip install --no-cache-dir -c constraints/newest.txt ".${EXTRAS}"

FROM python:${PYTHON}-slim

COPY --from=built /opt/forge /opt/forge
# Who serves owns nothing but its cache: fetched checkpoints and compiled kernels.
RUN useradd --uid 10001 --home-dir /cache --no-create-home forge \
    && install -d -o forge -g forge /cache \
    && install -d /models
ENV PATH=/opt/forge/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1 FORGE_ADDR=0.0.0.0:8080
VOLUME ["/cache", "/models"]
EXPOSE 8080
USER 10001

# A model may take minutes to load; nothing listens before.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m CMD ["python", "-c", \
    "import os, urllib.request as web; web.urlopen('http://127.0.0.1:%s/livez' % os.environ['FORGE_ADDR'].rpartition(':')[2], timeout=4)"]

# No shell before it, so that SIGTERM reaches it.
ENTRYPOINT ["forge", "serve"]
CMD ["tiny"]
