# The project in a container, set up by `make setup` on any Debian or Ubuntu with Python 3.11 or 3.12:
#
#   docker build -t embodied-farm .
#   docker build -t embodied-farm --build-arg GPU=yes --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .
#   docker run --rm --shm-size 8g -v "$PWD/runs:/embodied-farm/runs" embodied-farm embodied train reach
#   docker run --rm --shm-size 8g --gpus all ...
ARG BASE=ubuntu:24.04
FROM ${BASE}
# yes: torch with CUDA, although the machine that builds has no GPU.
ARG GPU=no
# All of NVIDIA's driver: Vulkan and EGL draw with it.
ENV NVIDIA_DRIVER_CAPABILITIES=all PATH=/embodied-farm/.venv/bin:$PATH
WORKDIR /embodied-farm
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates make python3 python3-venv
COPY LICENSE NOTICE Makefile constraints.txt pyproject.toml ./
COPY setup setup
COPY assets assets
COPY configs configs
COPY embodied embodied
COPY embodied_command.py ./
COPY extensions extensions
COPY policies policies
COPY schedulers schedulers
COPY sim_farm sim_farm
RUN DEBIAN_FRONTEND=noninteractive GPU=${GPU} make setup libero-assets && rm -rf /root/.cache/pip /var/lib/apt/lists/*
CMD ["embodied", "doctor"]
