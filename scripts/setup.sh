#!/usr/bin/env bash
# Makes $VENV with Millrace and all that its tests need. Networks are flaky, so every download is retried;
# uv is used when it can be had (about ten times faster), pip otherwise.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: Python 3.11 or newer is needed, found $("$PYTHON" --version 2>&1). Try: make PYTHON=python3.12 setup" >&2; exit 1; }

retry() {
  local n
  for n in 1 2 3 4 5; do
    "$@" && return 0
    echo "setup: attempt $n failed, trying again in $((n * 3)) s: $*" >&2
    sleep $((n * 3))
  done
  return 1
}

[ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c '' 2>/dev/null || "$PYTHON" -m venv "$VENV" ||
  { echo "setup: cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }

# uv does not read pip's settings: hand them on.
[ -n "${PIP_FIND_LINKS:-}" ] && export UV_FIND_LINKS="$PIP_FIND_LINKS"
[ -n "${PIP_INDEX_URL:-}" ] && export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
[ -n "${PIP_CERT:-}" ] && export SSL_CERT_FILE="$PIP_CERT"
export UV_HTTP_TIMEOUT=300 UV_LINK_MODE=copy

if "$VENV/bin/python" -m uv --version >/dev/null 2>&1 || retry "$VENV/bin/python" -m pip install -q uv; then
  install() { "$VENV/bin/python" -m uv pip install -q --python "$VENV/bin/python" "$@"; }
else
  install() { "$VENV/bin/python" -m pip install -q --retries 10 "$@"; }
fi

retry install -c scripts/constraints.txt -e '.[dev]' ||
  retry "$VENV/bin/python" -m pip install -q -c scripts/constraints.txt -e '.[dev]'

# PyTorch is large, so nothing is downloaded for it; a wheel that already lies on this machine is used.
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
  if [ -n "${PIP_FIND_LINKS:-}" ] && compgen -G "${PIP_FIND_LINKS#file://}/torch-*.whl" >/dev/null; then
    retry install -c scripts/constraints.txt torch || echo "setup: PyTorch did not install; the demo trains its NumPy model instead" >&2
  fi
fi
# Ray (some 75 MB) and KenLM (built from source) are wanted by a few tests alone: they skip, saying so, without them.
for extra in ray lm; do
  name=$([ "$extra" = lm ] && echo kenlm || echo ray)
  "$VENV/bin/python" -c "import $name" 2>/dev/null || retry install -c scripts/constraints.txt -e ".[$extra]" ||
    echo "setup: $name did not install; its tests are skipped" >&2
done
echo "setup: ready ($("$VENV/bin/python" --version), $("$VENV/bin/python" -c 'import importlib.util as u; print("with PyTorch" if u.find_spec("torch") else "without PyTorch; to train with it: .venv/bin/pip install torch")'))"
