from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.placement import Placement, choose, explain, wanted, wanted_of
from ckptd.core.policy import Policy


def test_everything_is_used_when_it_may_be():
    assert choose({"b": [0, 1], "a": [1, 0]}, Policy()) == Placement(world_size=4, devices={"a": [0, 1], "b": [0, 1]})


def test_nodes_are_filled_evenly_in_order_of_name():
    four = {"n2": [0, 1, 2, 3], "n1": [0, 1, 2, 3]}
    assert choose(four, Policy(max_devices=6)).devices == {"n1": [0, 1, 2], "n2": [0, 1, 2]}
    assert choose(four, Policy(max_devices=3)).devices == {"n1": [0, 1], "n2": [0]}
    assert list(choose(four, Policy(max_devices=3)).devices) == ["n1", "n2"]
    assert choose({"n1": [3], "n2": [0, 1, 2, 5]}, Policy()).devices == {"n1": [3], "n2": [0, 1, 2, 5]}


def test_ranks_follow_the_order_of_the_hosts():
    policy = Policy(nodes=("z", "a", "m"))
    assert list(choose({"a": [0], "m": [0], "z": [0]}, policy).devices) == ["z", "a", "m"]


def test_spares_are_idle_until_they_are_needed():
    policy = Policy(nodes=("n1", "n2", "n3"), spares=1)
    whole = {"n1": [0, 1], "n2": [0, 1], "n3": [0, 1]}
    assert choose(whole, policy).devices == {"n1": [0, 1], "n2": [0, 1]}
    assert choose({**whole, "n1": [1]}, policy).devices == {"n2": [0, 1], "n3": [0, 1]}, (
        "a node with a broken device waits"
    )
    assert choose({"n2": [0, 1], "n3": [0, 1]}, policy).devices == {"n2": [0, 1], "n3": [0, 1]}
    assert choose({"n3": [0, 1]}, policy).devices == {"n3": [0, 1]}
    assert wanted_of(whole, policy) == 4, "spares are not missed"
    assert explain(whole, policy) == "all 4 healthy devices are used"


def test_a_node_without_a_rank_is_not_in_the_placement():
    assert choose({"a": [0], "b": [0], "c": []}, Policy(max_devices=1)).devices == {"a": [0]}


def test_groups_stay_on_a_node():
    eight = {"a": list(range(8)), "b": list(range(8))}
    assert choose(eight, Policy(multiple_of=4, max_devices=12)).devices == {
        "a": [0, 1, 2, 3, 4, 5, 6, 7],
        "b": [0, 1, 2, 3],
    }
    # Where groups cannot stay whole, a smaller world would be the greater loss.
    assert choose({"a": [0], "b": [0]}, Policy(multiple_of=2)).world_size == 2


def test_a_world_divides_the_global_batch():
    assert choose({"a": list(range(8))}, Policy(global_batch=12)).world_size == 6
    assert choose({"a": list(range(5))}, Policy(global_batch=12, multiple_of=2)).world_size == 4
    assert choose({"a": list(range(5))}, Policy(global_batch=7, min_devices=2)) is None


def test_wanted_is_what_all_devices_would_give():
    assert wanted(8, Policy(global_batch=64)) == 8
    assert wanted(7, Policy(global_batch=64)) == 4
    assert wanted(8, Policy(max_devices=5, multiple_of=2)) == 4
    assert wanted(1, Policy(min_devices=2)) == 0
    assert wanted(0, Policy()) == 0


def test_reasons_name_the_numbers():
    one = {"a": [0]}
    assert explain(one, Policy(min_devices=2)) == "1 healthy device, and cluster.min_devices is 2"
    assert explain({}, Policy()) == "0 healthy devices, and cluster.min_devices is 1"
    assert explain({"a": [0, 1, 2]}, Policy(min_devices=3, multiple_of=2)) == (
        "3 healthy devices, and no world of them is allowed: it must be at least 3, a multiple of 2"
    )
    assert explain({"a": [0, 1, 2]}, Policy(global_batch=64)) == (
        "2 of 3 healthy devices are used: a world must be at least 1, a divisor of the global batch of 64"
    )
    assert explain({"a": [0, 1]}, Policy()) == "all 2 healthy devices are used"


policies = st.builds(
    Policy,
    min_devices=st.integers(1, 12),
    max_devices=st.none() | st.integers(1, 40),
    multiple_of=st.integers(1, 8),
    global_batch=st.none() | st.integers(1, 200),
)
clusters = st.dictionaries(st.text("abc", min_size=1, max_size=2), st.lists(st.integers(0, 9), max_size=10), max_size=6)


def allowed(world, policy):
    return (
        world >= policy.min_devices
        and (policy.max_devices is None or world <= policy.max_devices)
        and world % policy.multiple_of == 0
        and (policy.global_batch is None or policy.global_batch % world == 0)
    )


@given(clusters, policies)
def test_placements_exist_are_allowed_and_are_maximal(available, policy):
    placement = choose(available, policy)
    total = sum(len(set(devices)) for devices in available.values())
    best = max((w for w in range(1, total + 1) if allowed(w, policy)), default=0)
    assert wanted(total, policy) == best
    assert explain(available, policy)
    if placement is None:
        assert best == 0
        return
    assert placement.world_size == best
    assert sum(map(len, placement.devices.values())) == best
    assert list(placement.devices) == sorted(placement.devices)
    for node, devices in placement.devices.items():
        assert devices
        assert len(set(devices)) == len(devices)
        assert set(devices) <= set(available[node])
