"""Records: what is read back is what was written, families that some rows lack and dtypes included."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from molt_ray.experience import Experience, Pack, PackRef, Row, Turn
from molt_ray.images import PlacedImage
from molt_ray.record import recorded, write_records


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def test_rows_columns_and_notes_come_back_bit_for_bit(tmp_path: Path):
    rng = np.random.default_rng(0)
    lengths = [3, 7, 1]
    families = {
        "tokens": [
            {"token_ids": rng.integers(0, 9, n).astype(np.int32), "logprobs": rng.normal(size=n).astype(np.float32)}
            for n in lengths
        ],
        "routes": [{"routes": rng.integers(0, 255, (n, 2, 4)).astype(np.uint8)} for n in lengths[1:]],
    }
    pixels = {
        "cat": rng.integers(0, 255, (4, 5, 3)).astype(np.uint8),
        "dog": rng.integers(0, 255, (2, 2, 3)).astype(np.uint8),
    }
    refs = {family: ray.put(Pack.of(family, payloads)) for family, payloads in families.items()}
    media = ray.put(Pack.of("media", [pixels]))
    rows = [
        Row(
            f"r{i}", "g", i, 0, 1, 0.1 * i, 0.3, [0.1, 0.2], 3, 2, 0, 4, info={"a": 1.5}, turns=[Turn(0.7, {"seed": 3})]
        )
        for i in range(3)
    ]
    for i, row in enumerate(rows):
        row.packs = {"tokens": PackRef(refs["tokens"], i)}
        if i:  # the first record has no routes
            row.packs["routes"] = PackRef(refs["routes"], i - 1)
            row.packs["media"] = PackRef(media, 0)
            row.images = [PlacedImage(digest, 0, 2) for digest in ("cat", "dog")[:i]]  # the cat is in both
    file = tmp_path / "a/step-000004.parquet"
    assert await write_records.remote(str(file), 4, rows, {"version": 7, "weights": ["ab"]}) == 3
    notes, back = await recorded(file)
    assert notes["version"] == 7 and notes["step"] == 4 and [path.name for path in file.parent.iterdir()] == [file.name]
    packs = {family: ray.get(back[1].packs[family].ref) for family in families}
    for i, (row, again) in enumerate(zip(rows, back, strict=True)):
        assert row.to_record() == again.to_record() and row.packs.keys() == again.packs.keys()
        assert row.images == again.images
        shown = Experience(again).reload({**packs, "media": ray.get(back[1].packs["media"].ref)}).heavy.get("media", {})
        assert shown.keys() == {image.digest for image in row.images}
        for digest, image in shown.items():
            np.testing.assert_array_equal(image, pixels[digest])
        for family, where in again.packs.items():
            if family == "media":
                continue
            written = families[family][i if family == "tokens" else i - 1]
            for name, column in packs[family].payload(where.row).items():
                assert column.dtype == written[name].dtype
                np.testing.assert_array_equal(column, written[name])
