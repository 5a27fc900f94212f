"""Placement groups on two virtual nodes: made, waited for, found, refused."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pegboard.engine.errors import EngineStartError
from pegboard_executor_ray import placement

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_nodes")]


def test_a_group_is_made_for_the_ranks_and_goes_with_them(make_crew: Any, groups: Callable[[], list[str]]) -> None:
    crew = make_crew(2, options={"num_cpus": 0.5, "resources": {"near": 1}})
    assert groups() == [f"{crew._name} CREATED"]
    assert crew._placement.group.bundle_specs == [{"CPU": 0.5, "near": 1.0}] * 2
    crew.stop()
    assert groups() == []


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_a_new_group_begins_on_the_driver_s_node(make_crew: Any, strategy: str) -> None:
    """Ray alone packs two ranks on the node that they fill best, the other one."""
    crew = make_crew(2, options={"strategy": strategy})
    here = [place.node_id == crew.driver.node_id for place in crew.places]
    assert here == [True, "PACK" in strategy]


def test_room_that_others_take_meanwhile(make_crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "PREFER_SECONDS", 0.4)
    monkeypatch.setattr(placement, "near_ranks", lambda rooms, driver, ranks, strategy: ranks)
    crew = make_crew(1, options={"resources": {"far": 1}})
    assert crew.places[0].node_id != crew.driver.node_id


def test_another_address_than_that_of_the_connection_is_not_used(make_crew: Any, caplog: pytest.LogCaptureFixture) -> None:
    make_crew(1, options={"address": "10.0.0.1:6379"})
    assert "plugins.executor_ray.address='10.0.0.1:6379' is not used" in caplog.text


def test_threads_that_are_configured_are_reserved(make_crew: Any) -> None:
    assert make_crew(1, num_threads=2)._placement.group.bundle_specs == [{"CPU": 2.0}]


def test_what_never_comes_is_waited_for_and_told(
    make_crew: Any, groups: Callable[[], list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "TELL_SECONDS", 0.4)
    start = time.monotonic()
    with pytest.raises(EngineStartError) as caught:
        make_crew(12, options={"placement_timeout": 1.5, "strategy": "STRICT_PACK"})
    assert time.monotonic() - start >= 1.5
    there = "{CPU: 6, GPU: 2, far: 2, near: 4}"
    state = f"12 x {{CPU: 1}} placed by STRICT_PACK wanted, {there} available, of {there} on 2 nodes"
    limit = "within plugins.executor_ray.placement_timeout=1.5 s"
    assert str(caught.value) == f"the Ray cluster did not have what the ranks reserve {limit}: {state}"
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) >= 2
    assert all(line.startswith("waiting for the Ray cluster, ") and line.endswith(f" of 1.5 s: {state}") for line in lines)
    assert groups() == []


def test_an_interrupt_while_waiting_leaves_nothing(
    make_crew: Any, groups: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        assert len(groups()) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_crew(12)
    assert groups() == []


def test_an_interrupt_while_the_driver_s_node_is_tried_leaves_nothing(
    make_crew: Any, groups: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        assert len(groups()) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(PlacementGroup, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_crew(1)
    assert groups() == []


def test_the_group_of_a_process_that_ends_in_the_middle_of_a_job(compose: Any, groups: Any, wait_until: Any) -> None:
    """Ray would keep it until the job ends, which is that of this process."""

    def start_and_end(composition: Any) -> None:
        from pegboard.wire import World
        from pegboard_executor_ray.crew import Crew
        from pegboard_executor_ray.options import Options

        Crew(composition, Options(num_cpus=0.1), World(tp_size=1), lambda loss: None)
        os._exit(1)

    with pytest.raises(ray.exceptions.RayError):
        ray.get(ray.remote(num_cpus=0, max_retries=0)(start_and_end).remote(compose(1)), timeout=60)
    wait_until(lambda: not groups(), groups)


def test_bundles_cannot_be_named_without_a_group(make_crew: Any) -> None:
    with pytest.raises(EngineStartError, match=r"bundle_indices names bundles of the placement group .* it runs in none"):
        make_crew(1, options={"bundle_indices": [0]})


# -- inside a placement group --------------------------------------------------------------------------------------------


@ray.remote(num_cpus=1)
class Driver:
    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@pytest.fixture
def inside() -> Iterator[Callable[..., Any]]:
    """``inside(bundles, function, *arguments)``: what the function returns in an actor that has bundle 0 of such a group."""
    made: list[Any] = []

    def run(bundles: list[dict[str, float]], function: Callable[..., Any], *arguments: Any) -> Any:
        group = ray.util.placement_group(bundles, strategy="PACK")
        made.append(group)
        assert group.wait(60)
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
        driver = Driver.options(scheduling_strategy=strategy).remote()  # type: ignore[attr-defined]
        return ray.get(driver.run.remote(function, *arguments), timeout=120)

    yield run
    for group in made:
        ray.util.remove_placement_group(group)


def start(compose: Callable[..., Any], ranks: int, options: dict[str, Any]) -> Any:
    """A crew's bundles and nodes, by name of the resource that tells them apart; or the error, and the seconds that it took."""
    import ray

    from pegboard.wire import World
    from pegboard_executor_ray.crew import Crew
    from pegboard_executor_ray.options import Options

    begin = time.monotonic()
    composition = compose(ranks)
    try:
        crew = Crew(composition, Options(**options), World(tp_size=ranks), lambda loss: None)
    except EngineStartError as error:
        return str(error), time.monotonic() - begin
    names = {node["NodeID"]: "far" if "far" in node["Resources"] else "near" for node in ray.nodes()}
    found = [b.index for b in crew._placement.bundles], [names[place.node_id] for place in crew.places]
    crew.stop()
    return found


def test_the_current_group_is_used_and_stays(inside: Any, compose: Any, groups: Callable[[], list[str]]) -> None:
    """The driver's bundle has no room for a rank beside it. Ranks on the driver's node come first, and can be started again."""
    bundles = [{"CPU": 1, "near": 1}, {"CPU": 1, "far": 1}, {"CPU": 1, "near": 1}]
    found = ([2, 1], ["near", "far"])
    assert inside(bundles, lambda: [start(compose, 2, {}) for _ in range(2)]) == [found, found]
    assert groups() == [" CREATED"]


def test_named_bundles_are_used_in_their_order(inside: Any, compose: Any) -> None:
    bundles = [{"CPU": 1, "near": 1}, {"CPU": 1, "far": 1}, {"CPU": 1, "near": 1}, {"CPU": 1, "near": 1}]
    assert inside(bundles, start, compose, 2, {"bundle_indices": [1, 3]}) == ([1, 3], ["far", "near"])


def test_a_current_group_that_is_too_small_is_refused_at_once(inside: Any, compose: Any, groups: Any) -> None:
    text, seconds = inside([{"CPU": 1}, {"CPU": 1}], start, compose, 2, {"placement_timeout": 60})
    assert seconds < 30
    assert text == (
        "the placement group that this process runs in has room for 1 of 2 ranks, each of which reserves {CPU: 1}; its bundles: "
        "0: {CPU: 1} less {CPU: 1} of this process; 1: {CPU: 1}. Give it more, or lower plugins.executor_ray.num_cpus, num_gpus "
        "or resources"
    )
    assert groups() == [" CREATED"]
    text, _ = inside([{"CPU": 1}, {"CPU": 1}], start, compose, 1, {"bundle_indices": [2]})
    assert text == "plugins.executor_ray.bundle_indices=[2]: there is no bundle 2, only 0 to 1"
