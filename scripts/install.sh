# shellcheck shell=bash
# Sourced by setup.sh and peers.sh: `make_venv VENV`, then `install …` into it. Networks are flaky, so every download is
# retried; uv is used when it can be had (about ten times faster), pip otherwise.
NAME=$(basename "$0" .sh)

retry() {
  local n
  for n in 1 2 3 4 5; do
    "$@" && return 0
    echo "$NAME: attempt $n failed, trying again in $((n * 3)) s: $*" >&2
    sleep $((n * 3))
  done
  return 1
}

make_venv() {
  VENV=$1
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c '' 2>/dev/null || "$PYTHON" -m venv "$VENV" ||
    { echo "$NAME: cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
  if "$VENV/bin/python" -m uv --version >/dev/null 2>&1 || retry "$VENV/bin/python" -m pip install -q uv; then
    install() { "$VENV/bin/python" -m uv pip install -q --python "$VENV/bin/python" "$@"; }
  else
    install() { "$VENV/bin/python" -m pip install -q --retries 10 "$@"; }
  fi
}

# uv does not read pip's settings: hand them on.
[ -n "${PIP_FIND_LINKS:-}" ] && export UV_FIND_LINKS="$PIP_FIND_LINKS"
[ -n "${PIP_INDEX_URL:-}" ] && export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
[ -n "${PIP_CERT:-}" ] && export SSL_CERT_FILE="$PIP_CERT"
export UV_HTTP_TIMEOUT=300 UV_LINK_MODE=copy
