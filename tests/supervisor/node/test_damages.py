"""A thousand damages at random, over three tiers: every one is found before a resume, and the next good copy is taken.

CKPTD_DAMAGES says how many, CKPTD_DAMAGES_SEED which.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import Counter

import damage
import pytest
import torch
from saving import begin_save, digest, load, make_saver
from torch import nn

from ckptd.node.inventory import Question, inventory
from ckptd.node.tiers import Tier, marker_key
from ckptd.tiers import copy_checkpoint
from ckptd_shim.contract import COMMITTED, OWNER, Marker
from ckptd_shim.digest import crc32c_bytes
from ckptd_shim.state import TrainState

DAMAGES = int(os.environ.get("CKPTD_DAMAGES", "1000"))
SEED = int(os.environ.get("CKPTD_DAMAGES_SEED", "5"))
STEPS = (10, 20, 30, 40)
NAMES = [f"step_{step:09d}.a0001" for step in STEPS]


def make():
    model = nn.Linear(4, 5)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save_all(directory, seed, run_id="run"):
    """Four real checkpoints of a little training; returns a digest of the state by step."""
    torch.manual_seed(seed)
    model, optimizer = make()
    state = TrainState(model=model, optimizer=optimizer)
    saver = make_saver(directory, run_id=run_id)
    states = {}
    try:
        for step in STEPS:
            model(torch.randn(6, 4)).pow(2).mean().backward()
            optimizer.step()
            begin_save(saver, state, step)
            saver.wait()
            assert saver.outcome.committed, saver.outcome
            states[step] = digest(model, optimizer)
    finally:
        saver.close()
    return states


class Place:
    """Three tiers that hold the same four commits, and what they held at first."""

    def __init__(self, root):
        self.first = root / "first"
        self.states = save_all(self.first, seed=1)
        save_all(root / "foreign", seed=2, run_id="another")
        self.foreign = [str(root / "foreign" / name) for name in NAMES]
        self.now = root / "now"
        self.tiers = [
            Tier(name="memory", directory=str(self.now / "memory")),
            Tier(name="disk", directory=str(self.now / "disk")),
            Tier(name="far", directory=f"file://{self.now}/far"),
        ]
        source = Tier(name="first", directory=str(self.first))
        self.known = {}
        for name in NAMES:
            crc = crc32c_bytes(damage.bytes_of(self.first / name / COMMITTED))
            self.known |= {marker_key(tier.name, name): crc for tier in self.tiers}
        far = Tier(name="far", directory=f"file://{root}/far")
        for name in NAMES:
            copy_checkpoint(source.store(), far.store(), name)
            assert self.whole(str(root / "far" / name), name)

    def lay_out(self):
        """As if nothing had happened; hard links, since a thousand times of it."""
        shutil.rmtree(self.now, ignore_errors=True)
        for tier in self.tiers:
            shutil.copytree(self.first, self.where(tier), copy_function=os.link)

    def where(self, tier):
        return str(self.now / tier.name)

    def whole(self, path, name, *, links=False):
        """Whether it is, to the byte, what was committed under this name; judged without any of what is tested.

        `links`: a link to the right bytes will do, as on a store that only knows objects and their bytes.
        """
        first = self.first / name
        try:
            for file in os.listdir(first):
                at = os.path.join(path, file)
                if file == OWNER:
                    continue
                if (
                    (os.path.islink(at) and not links)
                    or not os.path.isfile(at)
                    or damage.bytes_of(at) != damage.bytes_of(first / file)
                ):
                    return False
        except OSError:
            return False
        return True

    def good(self):
        """(step, tier) of what is whole, the best first: by commit, then by tier."""
        return [
            (step, tier.name)
            for step, name in sorted(zip(STEPS, NAMES, strict=True), reverse=True)
            for tier in self.tiers
            if self.whole(os.path.join(self.where(tier), name), name, links=tier.remote)
        ]


def foreign_in_its_place(place, chance, path):
    shutil.rmtree(path)
    shutil.copytree(chance.choice(place.foreign), path)


def inflict(place, chance):
    """One to eight damages, more of them to new commits and fast tiers; returns their kinds."""
    kinds = []
    for _ in range(chance.choice([1, 1, 2, 3, 5, 8])):
        tier = place.where(chance.choices(place.tiers, [3, 2, 2])[0])
        name = chance.choices(NAMES, [1, 2, 4, 8])[0]
        path, others = os.path.join(tier, name), [os.path.join(tier, other) for other in NAMES if other != name]
        kind = chance.choice([*damage.KINDS, foreign_in_its_place])
        with contextlib.suppress(OSError, ValueError, IndexError):  # there is nothing any more to damage in this way
            if kind is foreign_in_its_place:
                kind(place, chance, path)
            else:
                kind(chance, path, others)
            kinds.append(kind.__name__)
    return kinds


def occupied(place, tier, name):
    """Another run's checkpoint has the name: it is not overwritten."""
    path = os.path.join(place.where(tier), name, COMMITTED)
    with contextlib.suppress(ValueError):
        return os.path.isfile(path) and Marker.read(path).run_id != "run"
    return False


@pytest.mark.timeout(60 + DAMAGES)
def test_every_damage_is_found_and_the_next_good_copy_is_taken(tmp_path):
    place = Place(tmp_path)
    chance = random.Random(SEED)
    done, outcomes, trial = Counter(), Counter(), 0
    while sum(done.values()) < DAMAGES:
        trial += 1
        place.lay_out()
        kinds = inflict(place, chance)
        done.update(kinds)
        good = place.good()
        # An object store's copy is brought to the first directory where no other run's checkpoint has its name.
        reachable = [
            (step, tier) for step, tier in good
            if tier != "far" or not all(occupied(place, t, NAMES[STEPS.index(step)]) for t in place.tiers[:2])
        ]  # fmt: skip
        expected = dict.fromkeys(("memory", "disk", "far"), 4) if chance.random() < 0.5 else {}
        answer = inventory(Question(tiers=place.tiers, run_id="run", known=place.known, expected=expected))
        story = f"trial {trial} of seed {SEED}: {kinds}; whole are {good}; {answer}"
        assert not answer["problem"], story
        chosen = answer["chosen"]
        if not reachable:
            assert chosen is None, story
            assert answer["commits"] > 0 or not any(os.path.isdir(os.path.join(place.where(t), n)) for t in place.tiers for n in NAMES), story  # fmt: skip
            outcomes["none"] += 1
            continue
        step, tier = reachable[0]
        assert chosen is not None, story
        assert (chosen["step"], chosen.get("fetched_from", chosen)["tier"]) == (step, tier), story
        assert chosen["tier"] != "far", story
        name = NAMES[STEPS.index(step)]
        assert place.whole(chosen["path"], name), story
        outcomes[f"{40 - step} steps back, {tier}"] += 1
        if trial % 20 == 0:
            model, optimizer = make()
            load(chosen["path"], TrainState(model=model, optimizer=optimizer), marker_crc32c=chosen["marker_crc32c"])
            assert digest(model, optimizer) == place.states[step], story
    print(f"{sum(done.values())} damages in {trial} trials: {dict(done)}; taken: {dict(outcomes)}")
    assert len(done) == len(damage.KINDS) + 1
    assert len(outcomes) >= min(6, DAMAGES // 100)
