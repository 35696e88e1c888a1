"""Images in folders, tars and Parquet become tensors, pixel by pixel; damaged ones are kept aside."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.convert import convert
from forebay.dataset.reader import open_dataset
from forebay.errors import DatasetError, MissingPackageError, UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.images import decode
from forebay.formats.sources import open_table
from forebay.load.loader import Loader

pytest.importorskip("PIL", reason="pillow is not installed")
from PIL import Image

NONE = ConvertOptions()
PIXELS = np.random.default_rng(2).integers(0, 256, (12, 8, 10, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **more)
    return file.getvalue()


def write_classes(folder: Path) -> Path:
    for index, pixels in enumerate(PIXELS):
        target = folder / ("cat", "dog", "owl")[index % 3]
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{index:03d}.png").write_bytes(encoded(pixels))
    return folder


def load_rows(path: Path) -> dict[str, np.ndarray]:
    batch = next(iter(Loader(path, batch_size=1000, shuffle=False)))
    return dict(batch.tensors)


@pytest.mark.parametrize("via", ["webdataset", "parquet"])
def test_images_go_through_other_formats_as_they_are(tmp_path, via):
    write_classes(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "direct", "forebay", NONE)
    convert(tmp_path / "in", tmp_path / "via", via, ConvertOptions(slice_bytes=1000))
    convert(tmp_path / "via", tmp_path / "ds", "forebay", NONE)
    direct, result = load_rows(tmp_path / "direct"), load_rows(tmp_path / "ds")
    assert direct.keys() == result.keys() and all((direct[name] == result[name]).all() for name in direct)


def test_parquet_as_hugging_face_stores_images(tmp_path):
    images = [{"bytes": encoded(pixels), "path": f"{i}.png"} for i, pixels in enumerate(PIXELS)]
    pq.write_table(pa.table({"image": images, "label": list(range(12))}), tmp_path / "train-00000-of-00001.parquet")
    convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-ds", "forebay", NONE)
    result = load_rows(tmp_path.parent / f"{tmp_path.name}-ds")
    assert (result["images"] == PIXELS.transpose(0, 3, 1, 2)).all() and result["labels"].tolist() == list(range(12))


def test_damaged_images_are_kept_aside(tmp_path):
    folder = write_classes(tmp_path / "in")
    (folder / "cat" / "000.png").write_bytes(encoded(PIXELS[0])[:60])
    (folder / "dog" / "004.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    report = convert(folder, tmp_path / "ds", "forebay", NONE)
    assert report.written.num_rows == 10
    aside = [json.loads(line) for line in (tmp_path / "ds" / "rejects.jsonl").read_text().splitlines()]
    assert [(row["row"], row["name"]) for row in aside] == [(0, "cat/000.png"), (5, "dog/004.png")]
    assert all(row["reason"] for row in aside)
    assert any("2 images were rejected" in record for record in report.written.notes)
    dataset = open_dataset(tmp_path / "ds")
    assert dataset.verify().ok and dataset.manifest.lineage["converted"]["rejected"] == 2
    assert dataset.manifest.lineage["converted"]["classes"] == ["cat", "dog", "owl"]
    assert load_rows(tmp_path / "ds")["labels"].tolist() == [0] * 3 + [1] * 3 + [2] * 4


def test_sizes_are_equal_or_made_so(tmp_path):
    folder = write_classes(tmp_path / "in")
    (folder / "owl" / "z.jpg").write_bytes(encoded(np.zeros((20, 30, 3), np.uint8), "JPEG"))
    with pytest.raises(DatasetError, match=r"owl/z.jpg: expected an image of 8 x 10 .* got 20 x 30.*resize"):
        convert(folder, tmp_path / "ds", "forebay", NONE)
    convert(folder, tmp_path / "ds2", "forebay", ConvertOptions(resize=(5, 7)))
    assert load_rows(tmp_path / "ds2")["images"].shape == (13, 3, 5, 7)


def test_grey_and_turned_images():
    grey = PIXELS[0, :, :, 0]
    assert (decode(encoded(grey), None, NONE) == grey[None]).all()
    assert (decode(encoded(grey), 3, NONE) == grey[None].repeat(3, 0)).all()
    assert decode(encoded(PIXELS[0]), 1, NONE) == "mode RGB among images of one channel"
    exif = Image.Exif()
    exif[0x0112] = 6  # Turn by a quarter.
    turned = decode(encoded(PIXELS[0], exif=exif.tobytes()), None, NONE)
    assert isinstance(turned, np.ndarray) and turned.shape == (3, 10, 8)
    wide = decode(encoded((PIXELS[0, :, :, 0].astype(np.uint16)) * 200), None, NONE)
    assert isinstance(wide, str) and "8 bits do not hold" in wide


def test_an_image_that_would_take_all_memory(monkeypatch):
    monkeypatch.setattr("forebay.formats.images._MAX_PIXELS", 79)
    assert decode(encoded(PIXELS[0]), None, NONE) == "10 x 8 pixels, more than 79"


def test_folders_that_are_no_classes(tmp_path):
    write_classes(tmp_path / "in" / "train")
    write_classes(tmp_path / "in" / "test")
    with pytest.raises(UsageError, match=r"got splits test, train. Convert each by itself"):
        open_table(tmp_path / "in")
    (tmp_path / "in" / "train" / "stray.png").write_bytes(encoded(PIXELS[0]))
    with pytest.raises(UsageError, match=r"got stray.png beside them"):
        open_table(tmp_path / "in" / "train")


def test_without_the_decoder(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(
        MissingPackageError, match=r"An image needs PIL\. Install it with: pip install 'forebay\[vision\]'"
    ):
        decode(b"x", None, NONE)
