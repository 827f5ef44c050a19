"""What can happen to a checkpoint on a tier, at random and repeatable. A tier is made of hard links, so nothing is written into."""

from __future__ import annotations

import dataclasses
import os
import shutil

from ckptd_shim.contract import COMMITTED, OWNER, Marker


def rewrite(path, data):
    """New bytes under a name, in a new file: the old one may have other names."""
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(data)


def bytes_of(path):
    """Of a file; of something else, such as a pipe, that it is none."""
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    with open(path, "rb") as file:
        return file.read()


def files_of(directory):
    """Every file that counts, and still is one: what the marker lists, and the marker."""
    return sorted(
        name for name in os.listdir(directory) if name != OWNER and os.path.isfile(os.path.join(directory, name))
    )


def flip(chance, directory, _others):
    path = os.path.join(directory, chance.choice(files_of(directory)))
    data = bytearray(bytes_of(path))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    rewrite(path, bytes(data))


def truncate(chance, directory, _others):
    path = os.path.join(directory, chance.choice(files_of(directory)))
    data = bytes_of(path)
    rewrite(path, data[: chance.choice([0, len(data) - 1, chance.randrange(len(data))])])


def extend(chance, directory, _others):
    path = os.path.join(directory, chance.choice(files_of(directory)))
    rewrite(path, bytes_of(path) + chance.randbytes(chance.choice([1, 512, 5000])))


def delete_a_file(chance, directory, _others):
    os.unlink(os.path.join(directory, chance.choice(files_of(directory))))


def delete_all(_chance, directory, _others):
    shutil.rmtree(directory)


def swap(chance, directory, others):
    """The same file of two checkpoints changes places."""
    other = chance.choice(others)
    both = [name for name in files_of(directory) if os.path.exists(os.path.join(other, name))]
    name = chance.choice(both)
    mine, theirs = os.path.join(directory, name), os.path.join(other, name)
    os.rename(mine, f"{mine}.swap")
    os.rename(theirs, mine)
    os.rename(f"{mine}.swap", theirs)


def old_marker(chance, directory, others):
    other = chance.choice([other for other in others if COMMITTED in files_of(other)])
    path = os.path.join(other, COMMITTED)
    rewrite(os.path.join(directory, COMMITTED), bytes_of(path))


def marker_edited(chance, directory, _others):
    """A marker that can be read, fits its files, and says something else than was committed."""
    path = os.path.join(directory, COMMITTED)
    marker = Marker.from_json(bytes_of(path), where=path)
    change = chance.choice([
        {"samples_seen": marker.samples_seen + 1}, {"sequence": marker.sequence + 90}, {"world_size": 7},
        {"comparable": not marker.comparable}, {"files": marker.files[:-1]}, {"loss": 0.0}, {"epoch": 5},
        {"created": marker.created + 1e6}, {"global_batch": 1},
    ])  # fmt: skip
    rewrite(path, dataclasses.replace(marker, **change).to_json().encode())


def marker_emptied(_chance, directory, _others):
    rewrite(os.path.join(directory, COMMITTED), b"")


def stale_shards(chance, directory, _others):
    """A larger world saved here once, and its metadata or extras came back over the new ones."""
    for name in ("__1_0.distcp", "__2_0.distcp", "extras_rank1"):
        with open(os.path.join(directory, name), "wb") as file:
            file.write(chance.randbytes(700))
    listed = [name for name in files_of(directory) if name in ("__0_0.distcp", ".metadata", "extras_rank0")]
    rewrite(os.path.join(directory, chance.choice(listed)), chance.randbytes(900))


def renamed(chance, directory, others):
    """It lies under another step, or in the place of another checkpoint."""
    place = chance.choice([*others, directory.replace("step_0000000", "step_0000009")])
    shutil.rmtree(place, ignore_errors=True)
    os.rename(directory, place)


def symlink(chance, directory, others):
    """Something else than a file in a file's place."""
    name = chance.choice([name for name in files_of(directory) if name != COMMITTED])
    path = os.path.join(directory, name)
    os.unlink(path)
    target = chance.choice(["/nonexistent", "/etc", os.path.join(chance.choice(others), name), "."])
    os.symlink(target, path)


def pipe(chance, directory, _others):
    """A read of it does not return."""
    path = os.path.join(directory, chance.choice(files_of(directory)))
    os.unlink(path)
    os.mkfifo(path)


def marker_is_a_directory(_chance, directory, _others):
    path = os.path.join(directory, COMMITTED)
    os.unlink(path)
    os.mkdir(path)


def no_directory(_chance, directory, _others):
    """A file lies where the checkpoint was."""
    shutil.rmtree(directory)
    with open(directory, "wb") as file:
        file.write(b"x")


KINDS = (
    flip, truncate, extend, delete_a_file, delete_all, swap, old_marker, marker_edited, marker_emptied, stale_shards, renamed,
    symlink, pipe, marker_is_a_directory, no_directory,
)  # fmt: skip
"""Each is called with a random.Random, the directory to damage, and the other checkpoints of the tier."""
