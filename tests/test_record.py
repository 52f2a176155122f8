"""Records: what is read back is what was written, families that some rows lack and dtypes included."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from molt_ray.experience import Experience, Pack, PackRef, Row, Turn
from molt_ray.images import PlacedImage
from molt_ray.record import recorded, write_records
from molt_ray.rollout.pool import Group
from molt_ray.rollout.prompts import PromptKey
from molt_ray.rollout.waiting import FILE, Waiting, read_waiting, rename


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


async def test_groups_that_wait_to_be_trained_come_back_as_old_as_they_were(tmp_path: Path):
    assert await read_waiting(tmp_path) == []
    pack = ray.put(Pack.of("tokens", [{"token_ids": np.arange(n, dtype=np.int32)} for n in (2, 3, 4)]))
    groups = [Group(f"e0-p{i}-a1", PromptKey(0, i), version=4 + i, attempt=1, number=9 - i, failures=i) for i in (0, 1)]
    rows = [
        Row(
            f"r{i}",
            groups[i // 2].group_id,
            i // 2,
            0,
            1,
            1.0,
            1.0,
            [1.0],
            3,
            2,
            4,
            5,
            packs={"tokens": PackRef(pack, i)},
        )
        for i in range(3)
    ]
    groups[0].seal(rows[:2])
    groups[1].seal(rows[2:])
    waiting = Waiting.of(groups)
    await write_records.remote(str(tmp_path / FILE), 0, waiting.rows, {"groups": waiting.groups})
    back = await read_waiting(tmp_path)
    for group, again in zip(groups, back, strict=True):
        assert (again.group_id, again.key, again.version, again.attempt) == (
            group.group_id,
            group.key,
            group.version,
            1,
        )
        assert (again.number, again.failures) == (group.number, group.failures)
        for row, same in zip(group.rows(), again.rows(), strict=True):
            one, other = (ray.get(r.packs["tokens"].ref).payload(r.packs["tokens"].row) for r in (row, same))
            assert row.to_record() == same.to_record() and np.array_equal(one["token_ids"], other["token_ids"])
    assert rename(back, {4: 3}, later=6) == {4: 9, 5: 11} and [group.version for group in back] == [10, 11]
