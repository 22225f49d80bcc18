#!/bin/sh
# Runs the `sanitizer` tests under each compute-sanitizer tool with the Python named by $1; the
# arguments after it go to pytest.
cd "$(dirname "$0")/.." || exit 1
python=${1:-.venv/bin/python}
[ $# -gt 0 ] && shift
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v compute-sanitizer >/dev/null; then
  echo "make sanitize needs compute-sanitizer: install the CUDA toolkit and put it on PATH" >&2
  exit 1
fi
# One cudaMalloc for each buffer, so that a step past its end is seen; no CUDA graphs.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_command_buffer="
status=0
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  echo "== $tool"
  # kns: only kernels with "jaxmoe" in their mangled name; XLA's own are not ours to check. initcheck
  # must see those too: they initialise what ours read.
  only="--kernel-name kns=jaxmoe"
  [ "$tool" = initcheck ] && only=
  # shellcheck disable=SC2086
  compute-sanitizer --tool "$tool" $only --show-backtrace no --error-exitcode 1 \
    "$python" -m pytest -q -m "gpu and sanitizer" "$@" || status=1
done
exit $status
