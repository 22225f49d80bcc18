#!/bin/sh
# Runs the `sanitizer` tests under each compute-sanitizer tool with the Python named by $1.
cd "$(dirname "$0")/.." || exit 1
python=${1:-.venv/bin/python}
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v compute-sanitizer >/dev/null; then
  echo "make sanitize needs compute-sanitizer: install the CUDA toolkit and put it on PATH" >&2
  exit 1
fi
# One cudaMalloc for each buffer, so that a step past its end is seen; no CUDA graphs.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_command_buffer="
status=0
for tool in memcheck racecheck initcheck synccheck; do
  echo "== $tool"
  # kns: only kernels with "jaxmoe" in their mangled name; XLA's own are not ours to check.
  compute-sanitizer --tool "$tool" --kernel-regex kns=jaxmoe --error-exitcode 1 \
    "$python" -m pytest -q -m "gpu and sanitizer" || status=1
done
exit $status
