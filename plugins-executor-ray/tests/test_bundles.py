"""Which bundles ranks get, without a cluster."""

from __future__ import annotations

import pytest

from pegboard.engine.errors import EngineStartError
from pegboard_executor_ray.bundles import Bundle, check_named, choose, near_ranks, text

NEED = {"CPU": 1.0}


def bundle(index: int, node: str, cpus: float = 1, *, held: float = 0, **more: float) -> Bundle:
    return Bundle(index, {"CPU": cpus, **more}, {"CPU": held}, node, f"10.0.0.{ord(node)}")


def indices(bundles: list[Bundle]) -> list[int]:
    return [b.index for b in bundles]


def test_the_driver_s_node_comes_first_then_node_by_node() -> None:
    bundles = [bundle(0, "b"), bundle(1, "c"), bundle(2, "a"), bundle(3, "c"), bundle(4, "b"), bundle(5, "a")]
    assert indices(choose(bundles, NEED, 6, driver_node="c")) == [1, 3, 2, 5, 0, 4]
    assert indices(choose(bundles, NEED, 6, driver_node="elsewhere")) == [2, 5, 0, 4, 1, 3]


def test_one_node_is_better_than_two() -> None:
    bundles = [bundle(0, "a"), bundle(1, "b"), bundle(2, "b"), bundle(3, "c"), bundle(4, "c")]
    assert indices(choose(bundles, NEED, 2, driver_node="a")) == [1, 2]
    assert indices(choose(bundles, NEED, 1, driver_node="a")) == [0]
    assert indices(choose(bundles, NEED, 3, driver_node="a")) == [0, 1, 2]


def test_a_large_bundle_holds_several_ranks_and_what_the_driver_has_is_taken() -> None:
    assert indices(choose([bundle(0, "a", 4, held=1)], NEED, 3, driver_node="a")) == [0, 0, 0]
    assert indices(choose([bundle(0, "a", 1, held=1), bundle(1, "a")], NEED, 1, driver_node="a")) == [1]
    assert indices(choose([bundle(0, "a", 1, held=0.9), bundle(1, "a", 0.3)], {"CPU": 0.1}, 4, driver_node="a")) == [0, 1, 1, 1]


def test_too_little_is_told_with_what_there_is() -> None:
    bundles = [bundle(0, "a", 1, held=1), bundle(1, "a", GPU=1), bundle(2, "b", 0.5)]
    with pytest.raises(EngineStartError) as caught:
        choose(bundles, {"CPU": 1, "GPU": 1}, 2, driver_node="a")
    assert str(caught.value) == (
        "the placement group that this process runs in has room for 1 of 2 ranks, each of which reserves {CPU: 1, GPU: 1}; its "
        "bundles: 0: {CPU: 1} less {CPU: 1} of this process; 1: {CPU: 1, GPU: 1}; 2: {CPU: 0.5}. Give it more, or lower "
        "plugins.executor_ray.num_cpus, num_gpus or resources"
    )


def test_named_bundles_are_taken_in_the_order_of_the_user() -> None:
    bundles = [bundle(0, "a"), bundle(1, "b"), bundle(2, "a")]
    assert indices(check_named(bundles, [2, 1], NEED, 2)) == [2, 1]


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ([0], "there are 2 ranks, and each needs one"),
        ([0, 1, 2], "there are 2 ranks, and each needs one"),
        ([0, 7], "there is no bundle 7, only 0 to 3"),
        ([1, 1], "no bundle may be named twice"),
        ([0, 2], r"a rank reserves {CPU: 1}, which is not in bundle 2: {CPU: 0.5}"),
        ([0, 3], r"which is not in bundle 3: {CPU: 1} less {CPU: 1} of this process"),
    ],
)
def test_named_bundles_that_will_not_do(named: list[int], problem: str) -> None:
    bundles = [bundle(0, "a"), bundle(1, "a"), bundle(2, "a", 0.5), bundle(3, "a", held=1)]
    with pytest.raises(EngineStartError) as caught:
        check_named(bundles, named, NEED, 2)
    assert str(caught.value).startswith(f"plugins.executor_ray.bundle_indices={named}: ")
    assert problem in str(caught.value)


def test_what_ray_counts_for_itself_is_not_shown() -> None:
    resources = {
        "node:10.0.0.1": 1.0,
        "memory": 1e9,
        "CPU": 1.5,
        "object_store_memory": 1e9,
        "accelerator_type:H200": 1.0,
        "b": 2,
    }
    assert text({**resources, "CPU_group_0_ab": 1, "bundle_group_ab": 1000}) == "{CPU: 1.5, b: 2}"
    assert text({}) == "{}"


@pytest.mark.parametrize(
    ("rooms", "strategy", "near"),
    [
        ({"d": 4, "b": 4}, "PACK", 3),
        ({"d": 3}, "STRICT_PACK", 3),
        ({"d": 2, "b": 4}, "PACK", 0),
        ({"d": 2, "b": 2}, "PACK", 2),
        ({"d": 2, "b": 2}, "STRICT_PACK", 0),
        ({"d": 4, "b": 4}, "SPREAD", 1),
        ({"d": 0, "b": 4}, "STRICT_SPREAD", 0),
        ({"b": 4}, "PACK", 0),
    ],
)
def test_how_many_ranks_of_a_new_group_belong_with_the_driver(rooms: dict[str, int], strategy: str, near: int) -> None:
    assert near_ranks(rooms, "d", 3, strategy) == near
