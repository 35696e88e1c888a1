#!/usr/bin/env bash
# Builds a release and checks it: packages in dist/, and in out/release/ the lock file, the bill of materials (CycloneDX)
# and checksums. Nothing is published. TAG in the environment, if any, must name the version that is built.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=out/release
EXTRAS=(--extra prepare --extra network --extra remote)
# shellcheck source=scripts/install.sh
. scripts/install.sh

rm -rf dist "$OUT"
mkdir -p "$OUT"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make_venv "$work/tools"
tools=$work/tools/bin
retry install build check-wheel-contents cyclonedx-bom twine uv

"$tools/python" -m build --outdir dist . > "$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
wheel=$(echo dist/*.whl)
version=$(basename "$wheel" | cut -d- -f2)
if [ -n "${TAG:-}" ] && [ "$TAG" != "v$version" ]; then
  echo "release: expected the tag v$version, got $TAG. Set the version in pyproject.toml and src/forebay/__init__.py." >&2
  exit 1
fi
"$tools/twine" check --strict dist/*
"$tools/check-wheel-contents" "$wheel"

# What is installed with the package, each file by its hash, for every platform and Python.
"$tools/uv" pip compile --quiet --no-header --universal --generate-hashes "${EXTRAS[@]}" \
  --python-version 3.11 --output-file "$OUT/requirements.lock" pyproject.toml

# A smoke test in a fresh environment of the lock file alone; the packages' versions are what the bill lists.
"$PYTHON" -m venv "$work/fresh"
fresh=$work/fresh/bin
retry "$tools/uv" pip install --quiet --python "$fresh/python" --require-hashes -r "$OUT/requirements.lock"
"$tools/uv" pip install --quiet --python "$fresh/python" --no-deps "$wheel"
(
  cd "$work"
  [ "$("$fresh/forebay" --version)" = "forebay $version" ]
  mkdir texts
  for i in 1 2 3 4 5 6 7 8; do seq "$i" $((i * 300)) > "texts/$i.txt"; done
  "$fresh/forebay" prepare texts --out numbers --tokenizer train:300 --quiet
  "$fresh/forebay" verify numbers
  "$fresh/forebay" launch compose files
  "$fresh/python" -c "import forebay; assert sum(len(b.sample_ids) for b in forebay.Loader('numbers', seq_len=16, batch_size=4))"
)
"$tools/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
  --output-file "$OUT/forebay-$version.cdx.json" "$fresh/python"
(cd dist && sha256sum -- *) > "$OUT/SHA256SUMS"
ls -l dist "$OUT"
echo "release: forebay $version is built and checked"
