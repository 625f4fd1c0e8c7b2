#!/usr/bin/env bash
# Build the environment: infra/environments/install.sh VENV [EXTRA...]. Chooses the torch build that fits the machine:
# without an NVIDIA driver no CUDA package is downloaded, with one no CPU build is taken. RHEOSTAT_TORCH=cpu or
# RHEOSTAT_TORCH=cuda chooses the build instead of the driver, for example for an image that runs on other machines.
set -euo pipefail
venv=$1; shift
extras=$(IFS=,; echo "${*}")
python=${PYTHON:-python3}
torch=2.13.0 # its CUDA version and the driver that it needs: infra/environments/gpus.py

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "rheostat needs Python 3.11 or newer, found $("$python" --version). Choose one with PYTHON=..." >&2; exit 2; }
# Ends here if the driver is too old, before anything is downloaded.
view=$(mktemp -d)
trap 'rm -r "$view"' EXIT
mkdir "$view/rheostat" && ln -s "$PWD/infra" "$view/rheostat/infra" # the package is not installed yet
platform=$(PYTHONPATH=$view "$python" -m rheostat.infra.environments.gpus)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }

[ -x "$venv/bin/uv" ] || pip install -q --constraint constraints.txt uv
install "setuptools>=80" wheel ninja py-cpuinfo
if [ "$platform" = cuda ]; then
    install "torch==$torch,!=$torch+cpu"
elif [ "$(uname -s)" = Linux ]; then
    # A package index configured for pip may have the CPU build. uv knows where PyTorch publishes it.
    pip install -q --only-binary=:all: "torch==$torch+cpu" 2>/dev/null || install --torch-backend=cpu "torch==$torch"
else
    install "torch==$torch"
fi
# DeepSpeed's isolated build would download a second torch, with CUDA. DS_BUILD_OPS=0 prevents compilation.
DS_BUILD_OPS=0 install --no-build-isolation --constraint constraints.txt "deepspeed==0.19.8"
install --no-build-isolation --constraint constraints.txt -e ".${extras:+[$extras]}"
