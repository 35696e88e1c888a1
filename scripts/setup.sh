#!/usr/bin/env bash
# Makes $VENV with Forebay and all that its tests need.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: Python 3.11 or newer is needed, found $("$PYTHON" --version 2>&1). Try: make PYTHON=python3.12 setup" >&2; exit 1; }

. "$(dirname "$0")/install.sh"
make_venv "$VENV"

retry install -c scripts/constraints.txt -e '.[dev]' ||
  retry "$VENV/bin/python" -m pip install -q -c scripts/constraints.txt -e '.[dev]'

# PyTorch is large, so nothing is downloaded for it; a wheel that already lies on this machine is used.
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
  if [ -n "${PIP_FIND_LINKS:-}" ] && compgen -G "${PIP_FIND_LINKS#file://}/torch-*.whl" >/dev/null; then
    retry install -c scripts/constraints.txt torch || echo "setup: PyTorch did not install; its tests are skipped" >&2
  fi
fi
# Ray (some 75 MB) and KenLM (built from source) are wanted by a few tests alone: they skip, saying so, without them.
for extra in ray lm; do
  name=$([ "$extra" = lm ] && echo kenlm || echo ray)
  "$VENV/bin/python" -c "import $name" 2>/dev/null || retry install -c scripts/constraints.txt -e ".[$extra]" ||
    echo "setup: $name did not install; its tests are skipped" >&2
done

# `setup.sh all`: what `make test-all` runs besides. Their pins exclude one another, so three environments.
if [ "${1:-}" = all ]; then
  retry install -c scripts/constraints.txt -e '.[dev,docs,torch,hf,otel,trafilatura,classifiers]' accelerate axe-playwright-python \
    grafana-foundation-sdk ipykernel jax lightning mlflow mwparserfromhell nbclient playwright schemathesis tensorboard \
    torchdata wandb
  (
    make_venv "$VENV/peers"
    retry install -c scripts/constraints.txt 'mosaicml-streaming>=0.13' torch zstd
  )
  (
    make_venv "$VENV/peers-formats"
    retry install -c scripts/constraints.txt datasets 'litdata>=0.2.76' 'megatron-core>=0.16' torch webdataset zstandard zstd
  )
  missing=()
  PATH="$PATH:/usr/sbin" command -v nft >/dev/null || missing+=(nftables iproute2)
  command -v prometheus >/dev/null || missing+=(prometheus)
  command -v chromium >/dev/null || command -v google-chrome >/dev/null || missing+=(chromium fonts-dejavu)
  if [ "${#missing[@]}" -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    retry apt-get update -qq && retry apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
      echo "setup: ${missing[*]} did not install; their tests are skipped" >&2
  fi
fi
echo "setup: ready ($("$VENV/bin/python" --version), $("$VENV/bin/python" -c 'import importlib.util as u; print("with PyTorch" if u.find_spec("torch") else "without PyTorch; to train with it: .venv/bin/pip install torch")'))"
