"""The scheduler's own copies of a dataset's manifest and table."""

import numpy as np

from forebay.scheduler.catalog import ManifestStore, parse
from support.nodes import make_dataset


def test_a_schedulers_copy_of_a_manifest_is_checked(tmp_path):
    dataset = make_dataset(tmp_path / "d", 3, 40)
    manifest, table = ((tmp_path / "d" / name).read_bytes() for name in ("manifest.json", "slices.parquet"))
    retained = ManifestStore(tmp_path / "state")
    assert retained.get(dataset.id) is None
    retained.put(dataset.id, manifest, table)
    result = retained.get(dataset.id)
    assert result[0] == parse(dataset.id, manifest, table, "here")[0]
    assert np.array_equal(result[1].count, dataset.table.count)
    for suffix in (".parquet", ".json"):
        path = tmp_path / "state" / "datasets" / f"{dataset.id}{suffix}"
        full = path.read_bytes()
        path.write_bytes(full[:-1] + bytes([full[-1] ^ 1]))
        assert retained.get(dataset.id) is None
        path.write_bytes(full)
    assert retained.get(dataset.id) is not None
