#!/bin/sh
# Runs the `sanitizer` tests under each compute-sanitizer tool (or those in $TOOLS) with the Python
# named by $1, one test file at a time: the arguments after it, or all that need one GPU.
cd "$(dirname "$0")/.." || exit 1
python=${1:-.venv/bin/python}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- $(grep -lE 'mark\.sanitizer' tests/test_*.py | grep -v test_multi_gpu)
# The tool of the Python package nvidia-cuda-sanitizer-api, if it is installed there, else the CUDA
# toolkit's. That of 13.0 knows nothing of proxy fences, and dies of the int4 kernels.
packaged=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13/bin
PATH="$packaged:$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v compute-sanitizer >/dev/null; then
  echo "make sanitize needs compute-sanitizer: \`pip install nvidia-cuda-sanitizer-api\`, or the CUDA" \
    "toolkit on PATH" >&2
  exit 1
fi
# One cudaMalloc for each buffer, so that a step past its end is seen; no CUDA graphs; no autotuning,
# whose comparisons read memory that nothing has written.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS="$XLA_FLAGS --xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
status=0
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  # kns: only kernels with "jaxmoe" in their mangled name; XLA's own are not ours to check. initcheck
  # must see those too: they initialise what ours read.
  only="--kernel-name kns=jaxmoe"
  [ "$tool" = initcheck ] && only=
  # Calls of the CUDA API that fail are handled where they are made: XLA asks for kernels that a GPU
  # may not have, and for access to other GPUs that it may have already.
  calls=
  [ "$tool" = memcheck ] && calls="--report-api-errors no"
  for file in "$@"; do
    case $file in
      *test_multi_gpu*) tier=multi_gpu ;;
      *) tier=gpu ;;
    esac
    # The tool itself dies now and then (139: a segmentation fault of the launcher, while the tests go
    # on): that run says nothing and is repeated.
    for try in 1 2 3 4 5; do
      echo "== $tool $file, try $try"
      # shellcheck disable=SC2086
      compute-sanitizer --tool "$tool" $only $calls --show-backtrace no --error-exitcode 1 \
        "$python" -m pytest -q -p no:cacheprovider -m "$tier and sanitizer" "$file"
      result=$?
      [ $result -lt 128 ] && break
    done
    [ $result -eq 0 ] || status=1
  done
done
exit $status
