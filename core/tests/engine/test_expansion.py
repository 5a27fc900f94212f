"""From a caller's request to those of the engine core: children, seeds, ids, and plugins that make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pegboard.engine.expansion import Expander
from pegboard.engine.info import EngineInfo
from pegboard.engine.seeds import shifted
from pegboard.plugins import PluginHost, hookimpl
from pegboard.plugins.errors import PluginError
from pegboard.wire import EngineCoreRequest, SamplingParams, StructuredOutputs

replace = msgspec.structs.replace
INFO = EngineInfo(model="m", vocab_size=62, max_model_len=20, kv_tokens=100, num_blocks=25, block_size=4)


def request(n: int = 1, request_id: str = "x", seed: int = 5, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(n=n, seed=seed, **params),
        stop_token_ids=[0],
        max_tokens=9,
        arrival_time=0.0,
        cache_salt="tenant",
    )


def expander(expand: Callable[[EngineCoreRequest], Any] | None = None, **more: Any) -> Expander:
    class Plugin:
        @hookimpl
        def expand_request(self, request: EngineCoreRequest) -> Any:
            assert expand is not None
            return expand(request)

    plugins = {**({} if expand is None else {"acme": Plugin()}), **more}
    return Expander(PluginHost.load(discovery=False, extra=plugins), INFO)


def test_one_answer_is_the_request_itself() -> None:
    def never(request: EngineCoreRequest) -> Any:
        raise AssertionError("one answer is nothing to expand")

    one = request()
    [made] = expander(never)(one)
    assert replace(made, request_id="x") == one
    assert made.sampling is one.sampling
    assert made.group is None


def test_each_answer_is_a_request_of_its_own_with_the_next_seed() -> None:
    whole = request(3, temperature=0.5, prompt_logprobs=2)
    made = expander()(whole)
    assert [m.sampling.seed for m in made] == [5, 6, 7]
    assert [m.sampling.n for m in made] == [1, 1, 1]
    assert [m.sampling.prompt_logprobs for m in made] == [2, None, None]
    assert len({m.request_id for m in made}) == 3
    assert len({m.group for m in made}) == 1
    assert made[0].group is not None
    for one in made:
        own = replace(one.sampling, n=3, seed=5, prompt_logprobs=2)
        assert replace(one, request_id="x", group=None, sampling=own) == whole


def test_parameters_are_not_checked_again_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias for every id of a vocabulary would take a second for each hundred answers."""
    whole = request(1024, logit_bias=dict.fromkeys(range(1000), 1.0))
    checks: list[Any] = []
    monkeypatch.setattr(SamplingParams, "_problems", lambda params: checks.append(params) or [])
    made = expander()(whole)
    assert len(made) == 1024
    assert checks == []
    assert whole.sampling.n == 1024, "it is as it was"


@pytest.mark.parametrize("seed", [0, 1, -1, -2, -(2**63), 2**63 - 1, 2**64 - 2, 2**64 - 1])
def test_seeds_stay_in_their_range_and_count_on_modulo_two_to_the_64(seed: int) -> None:
    for i in (0, 1, 2, 1023):
        moved = shifted(seed, i)
        assert SamplingParams(seed=moved).seed == moved
        assert moved % 2**64 == (seed + i) % 2**64
        if seed + i < 2**64:
            assert moved == seed + i, "as a request of its own would state it"
    seeds = [m.sampling.seed for m in expander()(request(4, seed=seed))]
    assert seeds == [shifted(seed, i) for i in range(4)]


def test_ids_in_the_core_are_never_equal() -> None:
    """Whatever callers call their requests, also what looks like an id of another one's answer."""
    expand = expander()
    names = ["x", "x", "x#0", "x#1", "x@0", "x#0@1", "x@1#0", "x#0@0", "@", "#", "\ud800"]
    made = [m.request_id for name in names for n in (1, 3) for m in expand(request(n, name))]
    assert len(set(made)) == len(made)
    groups = [expand(request(2, name))[0].group for name in ("x", "x", "x@7", "x")]
    assert len(set(groups)) == 4


def three(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Three answers, the middle one without a group."""
    return [
        replace(
            request,
            request_id=f"mine-{i}",
            group=None if i == 1 else "mine",
            sampling=replace(request.sampling, n=1, seed=100 + i),
        )
        for i in range(3)
    ]


def test_a_plugin_may_make_them() -> None:
    expand = expander(three)
    first, again = expand(request(2)), expand(request(2))
    assert [m.request_id.rpartition("@")[0] for m in first] == ["mine-0", "mine-1", "mine-2"]
    assert [m.sampling.seed for m in first] == [100, 101, 102]
    assert first[0].group == first[2].group is not None
    assert first[1].group is None
    assert not {m.request_id for m in first} & {m.request_id for m in again}
    assert first[0].group != again[0].group


def test_a_plugin_may_abstain() -> None:
    assert [m.sampling.seed for m in expander(lambda request: None)(request(2))] == [5, 6]


def test_a_plugin_may_refuse() -> None:
    def refuse(request: EngineCoreRequest) -> Any:
        raise ValueError("at most one, please")

    with pytest.raises(ValueError, match="at most one, please"):
        expander(refuse)(request(2))


def _other_prompt(request: EngineCoreRequest) -> Any:
    first, second, third = three(request)
    return [first, second, replace(third, prompt_token_ids=[9])]


def _same_id(request: EngineCoreRequest) -> Any:
    first, second, _ = three(request)
    return [first, replace(second, request_id="mine-0")]


def _own_language(request: EngineCoreRequest) -> Any:
    first = three(request)[0]
    return [replace(first, sampling=replace(first.sampling, structured_outputs=StructuredOutputs(regex="a")))]


@pytest.mark.parametrize(
    ("expand", "message"),
    [
        (lambda r: [], r"expand_request of plugin 'acme' .*asked for request 'x': it must give a non-empty list of requests"),
        (lambda r: 5, r"non-empty list of requests, and gave 5"),
        (lambda r: "ab", r"non-empty list of requests, and gave 'ab'"),
        (lambda r: [r, None], r"must give EngineCoreRequest objects, and gave None"),
        (lambda r: [r], r"its request 'x' has sampling.n=2, and must have 1"),
        (lambda r: [replace(m, request_id="") for m in three(r)], r"request ids must be non-empty texts"),
        (_same_id, r"request ids must differ, and it gave 'mine-0' to several"),
        (_other_prompt, r"'mine-2' has another prompt or cache_salt than 'mine-0' of the same group"),
        (lambda r: [replace(three(r)[0], sampling=SamplingParams())], r"'mine-0' has no seed"),
        (lambda r: [replace(three(r)[0], max_tokens=0)], r"'mine-0' has 3 prompt tokens and max_tokens=0"),
        (lambda r: [replace(three(r)[0], max_tokens=18)], r"'mine-0' has 3 prompt .* over the limit of max_model_len=20"),
        (lambda r: [replace(three(r)[0], max_tokens=None)], r"'mine-0' has a field of a wrong type: .*max_tokens"),
        (lambda r: [replace(three(r)[0], prompt_token_ids=None)], r"'mine-0' has a field of a wrong type: .*prompt_token_ids"),
        (lambda r: [replace(three(r)[0], prompt_token_ids="abc")], r"'mine-0' has a field of a wrong type: .*prompt_token_ids"),
        (lambda r: [replace(three(r)[0], sampling=None)], r"'mine-0' has a field of a wrong type: .*sampling"),
        (lambda r: [replace(three(r)[0], group=5)], r"'mine-0' has a field of a wrong type: .*group"),
        (lambda r: [replace(three(r)[0], prompt_token_ids=[1, 62])], r"prompt_token_ids\[1\]=62 is not in the model's vocab"),
        (lambda r: [replace(three(r)[0], prompt_token_ids=[-1])], r"prompt_token_ids\[0\]=-1 is not in the model's vocab"),
        (_own_language, r"'mine-0' has sampling.structured_outputs, which is not looked at here; set grammar"),
        (lambda r: 1 / 0, r"expand_request failed in plugin 'acme' .*ZeroDivisionError"),
    ],
)
def test_a_plugin_that_answers_nonsense_is_named(expand: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        expander(expand)(request(2))
