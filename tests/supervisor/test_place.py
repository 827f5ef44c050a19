"""A directory that was removed, renamed or replaced is seen to be gone; one that was filled or emptied is not."""

from __future__ import annotations

import shutil

import pytest

from ckptd.place import Place


@pytest.fixture
def place(tmp_path):
    (tmp_path / "run").mkdir()
    place = Place(tmp_path / "run")
    yield place
    place.close()


def test_what_happens_in_it_does_not_matter(place, tmp_path):
    (tmp_path / "run" / "file").write_text("")
    assert not place.gone()
    (tmp_path / "run" / "file").unlink()
    assert not place.gone()


@pytest.mark.parametrize("again", [False, True])
def test_removed_it_is_gone_also_when_another_one_has_its_name(place, tmp_path, again):
    shutil.rmtree(tmp_path / "run")
    for _ in range(20 if again else 0):  # some file systems give a free number to the next directory
        (tmp_path / "run").mkdir(exist_ok=True)
    assert place.gone()


def test_renamed_it_is_gone(place, tmp_path):
    (tmp_path / "run").rename(tmp_path / "old")
    assert place.gone()
    (tmp_path / "run").write_text("")
    assert place.gone()
