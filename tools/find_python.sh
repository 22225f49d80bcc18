#!/bin/sh
# Prints the path of a Python >= 3.12; without one at hand, uv (installed with pip) looks for it.
cd "$(dirname "$0")/.." || exit 1

usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

if [ -n "$PYTHON" ] && ! usable "$PYTHON"; then
  echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv" >&2
  exit 1
fi
for python in $PYTHON python3.12 python3.13 python3.14 python3 python \
  "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
  if usable "$python"; then
    exec "$python" -c 'import sys; print(sys.executable)'
  fi
done

# Older pythons can still run uv, which knows more places and can download one.
if python3 -m venv build/uv >&2 && build/uv/bin/python -m pip install -q uv >&2; then
  build/uv/bin/uv python install -q '>=3.12,<3.15' >&2
  python=$(build/uv/bin/uv python find '>=3.12,<3.15') && usable "$python" && echo "$python" && exit
fi
echo "jaxmoe needs Python >= 3.12 with venv. Install it (Debian, Ubuntu: apt-get install" \
  "python3.12-venv), or name one: make PYTHON=/path/to/python3.12" >&2
exit 1
