#!/usr/bin/env bash
# Build the environment: infra/environments/install.sh VENV [EXTRA...]. Chooses the torch build that fits the machine:
# without an NVIDIA driver no CUDA package is downloaded, with one no CPU build is taken.
set -euo pipefail
venv=$1; shift
extras=$(IFS=,; echo "${*}")
python=${PYTHON:-python3}
torch=2.13.0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "rheostat needs Python 3.11 or newer, found $("$python" --version); name one with PYTHON=..." >&2; exit 2; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

pip install -q "setuptools>=80" wheel ninja py-cpuinfo hatchling editables
if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then
    pip install -q "torch==$torch,!=$torch+cpu"
elif [ "$(uname -s)" = Linux ]; then
    # A package index of the machine may carry the CPU build; uv knows where PyTorch publishes it.
    pip install -q --only-binary=:all: "torch==$torch+cpu" 2>/dev/null || {
        pip install -q uv
        "$venv/bin/uv" pip install -q --python "$venv/bin/python" --torch-backend=cpu "torch==$torch"; }
else
    pip install -q "torch==$torch"
fi
# DeepSpeed's isolated build would fetch a second, CUDA-laden torch; it compiles nothing when told so.
DS_BUILD_OPS=0 pip install -q --no-build-isolation --constraint constraints.txt "deepspeed==0.19.8"
pip install -q --no-build-isolation --constraint constraints.txt -e ".${extras:+[$extras]}"
