#!/usr/bin/env bash
# Makes $PEERS (.venv-peers), the environment of what Millrace is measured against: none of it is a dependency.
set -euo pipefail
PYTHON=${PYTHON:-python3}
PEERS=${PEERS:-.venv-peers}
PACKAGES=('datatrove[processing,io]>=0.6' spacy datasketch rensa trafilatura readability-lxml lxml_html_clean jusText
  tokenizers tiktoken orjson zstandard)

[ -f "$PEERS/.ready" ] && [ "$PEERS/.ready" -nt "$0" ] && exit 0
. "$(dirname "$0")/install.sh"
make_venv "$PEERS"
retry install "${PACKAGES[@]}"
# Not wheels everywhere: where one does not install, its line is missing from the tables.
for package in hyperscan pyahocorasick ahocorasick-rs; do
  install "$package" 2>/dev/null || echo "peers: $package did not install; it is not measured" >&2
done
touch "$PEERS/.ready"
echo "peers: ready ($("$PEERS/bin/python" -c 'from importlib.metadata import version as v; print("datatrove", v("datatrove"), "rensa", v("rensa"), "datasketch", v("datasketch"))'))"
