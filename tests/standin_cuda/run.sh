#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a Python program of PyTorch's CUDA build without a card.
#   STANDIN_VENV  environment with the CUDA build      STANDIN_LIB  folder that build.py filled
set -eu
: "${STANDIN_VENV:?name the environment that holds the CUDA build of PyTorch}"
: "${STANDIN_LIB:?name the folder that build.py filled}"
LD_PRELOAD="$STANDIN_LIB/libcudart.so.13 $STANDIN_LIB/libcublasLt.so.13 $STANDIN_LIB/libcublas.so.13"
LD_LIBRARY_PATH="$STANDIN_LIB${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ -n "${STANDIN_COMPUTE:-}" ]; then
    PYTHONPATH="$(cd "$(dirname "$0")" && pwd)/values${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
export LD_PRELOAD LD_LIBRARY_PATH
exec "$STANDIN_VENV/bin/python" "$@"
