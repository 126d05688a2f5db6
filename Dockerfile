# The suite for the CPU, with the versions of constraints.txt:
#   docker build -t fedcl_bench .
#   docker run --rm -v "$PWD:/work" fedcl_bench --method f3crec --backbone fedmf
FROM python:3.11-slim

# Compiles the kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fedcl_bench
COPY LICENSE README.md constraints.txt pyproject.toml run_bench.py setup.cfg setup.py ./
COPY dataset_configs dataset_configs
COPY plugins plugins
COPY fedcl_bench fedcl_bench
COPY results/tuned results/tuned
# PyTorch without CUDA is of the version in constraints.txt too, and far smaller.
RUN python -m pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt -e .

# Data, records and own plugins are those of the folder that is mounted here.
WORKDIR /work
ENTRYPOINT ["fedcl-bench"]
CMD ["--help"]
