#!/usr/bin/env bash
# Makes the environments of what Forebay is measured against: none of it is a dependency. `peers.sh [NAME]`, of:
#   prepare  $PEERS (.venv-peers): preparation
#   extract  $FOREBAY_EXTRACT_PEERS (.venv-peers-extract): trafilatura as it is now; datatrove pins an old one
#   loaders  $FOREBAY_LOADER_PEERS (.venv-peers-loaders), a folder of three: their pins of NumPy, pyarrow and
#            transformers exclude one another
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
. scripts/install.sh

# fresh VENV: whether it was made by this script as it is.
fresh() { [ -f "$1/.ready" ] && [ "$1/.ready" -nt scripts/peers.sh ]; }

# describe VENV PACKAGE…: print the versions that are installed.
describe() {
  local venv=$1
  shift
  echo "peers: $venv ready ($("$venv/bin/python" -c 'import sys; from importlib.metadata import version as v; print(*(f"{n} {v(n)}" for n in sys.argv[1:]))' "$@"))"
}

prepare() {
  local peers=${PEERS:-.venv-peers} package
  fresh "$peers" && return
  make_venv "$peers"
  retry install 'datatrove[processing,io]>=0.6' spacy datasketch rensa trafilatura readability-lxml lxml_html_clean \
    jusText tokenizers tiktoken orjson zstandard
  # Not wheels everywhere: where one does not install, its line is missing from the tables.
  for package in hyperscan pyahocorasick ahocorasick-rs presidio-analyzer py3langid alt-profanity-check; do
    install "$package" 2>/dev/null || echo "peers: $package did not install; it is not measured" >&2
  done
  touch "$peers/.ready"
  describe "$peers" datatrove rensa datasketch
}

extract() {
  local peers=${FOREBAY_EXTRACT_PEERS:-.venv-peers-extract}
  fresh "$peers" && return
  make_venv "$peers"
  retry install 'trafilatura>=2.3' readability-lxml lxml_html_clean jusText
  touch "$peers/.ready"
  describe "$peers" trafilatura readability-lxml
}

# group NAME PACKAGE…: one environment of the loaders'. What does not install is missing from the tables.
group() {
  local venv=${FOREBAY_LOADER_PEERS:-.venv-peers-loaders}/$1
  shift
  fresh "$venv" && return
  mkdir -p "$(dirname "$venv")"
  make_venv "$venv"
  retry install -c scripts/constraints.txt "$@" torch numpy ||
    { echo "peers: $venv did not install; it is not measured" >&2; rm -rf "$venv"; return 1; }
  touch "$venv/.ready"
  describe "$venv" $(printf '%s\n' "$@" | sed 's/[<>=].*//')
}

loaders() {
  local failed=0
  group general 'grain>=0.2.18' array-record litdata webdataset torchdata 'lancedb>=0.40' 'megatron-energon>=7.4' || failed=1
  group hf 'datasets>=4' torchdata transformers || failed=1
  # Without the lower bound the resolver falls back to 0.10, the last without a pin of NumPy.
  group mosaic 'mosaicml-streaming>=0.13' || failed=1
  return $failed
}

case ${1:-prepare} in
  prepare | extract | loaders) "${1:-prepare}" ;;
  *) echo "peers: expected prepare, extract or loaders, got $1" >&2; exit 2 ;;
esac
