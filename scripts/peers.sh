#!/usr/bin/env bash
# Makes $PEERS (.venv-peers), the environment of what Millrace is measured against: none of it is a dependency.
# As in setup.sh, every download is retried and pip's settings are handed on to uv.
set -euo pipefail
PYTHON=${PYTHON:-python3}
PEERS=${PEERS:-.venv-peers}
PACKAGES=('datatrove[processing,io]>=0.6' spacy datasketch rensa trafilatura readability-lxml lxml_html_clean jusText
  tokenizers tiktoken orjson zstandard)

retry() {
  local n
  for n in 1 2 3 4 5; do
    "$@" && return 0
    echo "peers: attempt $n failed, trying again in $((n * 3)) s: $*" >&2
    sleep $((n * 3))
  done
  return 1
}

[ -f "$PEERS/.ready" ] && [ "$PEERS/.ready" -nt "$0" ] && exit 0
[ -x "$PEERS/bin/python" ] || "$PYTHON" -m venv "$PEERS" ||
  { echo "peers: cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 1; }

[ -n "${PIP_FIND_LINKS:-}" ] && export UV_FIND_LINKS="$PIP_FIND_LINKS"
[ -n "${PIP_INDEX_URL:-}" ] && export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
[ -n "${PIP_CERT:-}" ] && export SSL_CERT_FILE="$PIP_CERT"
export UV_HTTP_TIMEOUT=300 UV_LINK_MODE=copy

if "$PEERS/bin/python" -m uv --version >/dev/null 2>&1 || retry "$PEERS/bin/python" -m pip install -q uv; then
  install() { "$PEERS/bin/python" -m uv pip install -q --python "$PEERS/bin/python" "$@"; }
else
  install() { "$PEERS/bin/python" -m pip install -q --retries 10 "$@"; }
fi
retry install "${PACKAGES[@]}"
# Not wheels everywhere: where one does not install, its line is missing from the tables.
for package in hyperscan pyahocorasick ahocorasick-rs; do
  install "$package" 2>/dev/null || echo "peers: $package did not install; it is not measured" >&2
done
touch "$PEERS/.ready"
echo "peers: ready ($("$PEERS/bin/python" -c 'from importlib.metadata import version as v; print("datatrove", v("datatrove"), "rensa", v("rensa"), "datasketch", v("datasketch"))'))"
