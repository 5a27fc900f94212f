"""The static check of a class against its contract, made when a part is loaded for use."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.contracts.chunk_policy import ChunkPolicy
from pegboard.contracts.request_queue import KeyedRequestQueue, RequestQueue
from pegboard.plugins import KINDS, PluginError, PluginHost, Provider, RequestQueueProvider, hookimpl
from pegboard.plugins.checks import check_made, load_target
from pegboard.plugins.class_path import contract_class, contract_problems, optional_arguments, provider_class


def host_with(target: Any) -> tuple[PluginHost, Provider]:
    class Plugin:
        @hookimpl
        def request_queues(self):
            return [RequestQueueProvider(name="fast", target=target)]

    host = PluginHost.load(extra={"acme": Plugin}, discovery=False)
    return host, host.get("request_queue", "fast")


class Half(RequestQueue):
    def add(self, request): ...

    def peek(self): ...


def test_b092_missing_methods_are_listed_all_at_once() -> None:
    host, provider = host_with(Half)
    with pytest.raises(PluginError) as caught:
        load_target(provider, host)
    text = str(caught.value)
    assert "plugin 'acme'" in text
    assert "version 1 of its contract" in text
    assert "lacks __iter__, __len__, pop, prepend, remove" in text


def test_b092_a_class_that_only_looks_like_the_contract_is_checked_too() -> None:
    class Duck:
        def add(self, request): ...

        def pop(self): ...

    (problem,) = contract_problems("request_queue", Duck)
    assert "lacks __iter__, __len__, peek, prepend, remove" in problem


def test_b092_a_method_that_cannot_take_what_the_contract_gives() -> None:
    class Chunk(ChunkPolicy):
        def chunk_tokens(self, request): ...

    (problem,) = contract_problems("chunk_policy", Chunk)
    assert problem == "chunk_tokens() does not take remaining, context"


def test_b092_a_method_that_wants_more_than_the_contract_gives() -> None:
    class Chunk(ChunkPolicy):
        def chunk_tokens(self, request, remaining, context, mood): ...

    (problem,) = contract_problems("chunk_policy", Chunk)
    assert "requires mood" in problem


@pytest.mark.parametrize("form", ["other names", "star", "default", "static"])
def test_b092_what_a_caller_does_not_notice_is_fine(form: str) -> None:
    class OtherNames(ChunkPolicy):
        def chunk_tokens(self, r, n, c): ...

    class Star(ChunkPolicy):
        def chunk_tokens(self, *args): ...

    class Default(ChunkPolicy):
        def chunk_tokens(self, request, remaining, context, mood=None): ...

    class Static(ChunkPolicy):
        @staticmethod
        def chunk_tokens(request, remaining, context): ...

    target = {"other names": OtherNames, "star": Star, "default": Default, "static": Static}[form]
    assert contract_problems("chunk_policy", target) == []


def test_b092_an_optional_argument_of_a_newer_host_is_a_note_only() -> None:
    class Rpc:
        def collective_rpc(self, method, args=(), kwargs=None): ...

    notes = optional_arguments("executor", Rpc)
    assert "collective_rpc() does not take the optional timeout, non_block, ranks" in notes


def test_a_target_that_raises_on_import_names_plugin_and_cause() -> None:
    host, provider = host_with("no_such_module_x:Queue")
    with pytest.raises(PluginError, match=r"request_queue 'fast' of plugin 'acme'.*ModuleNotFoundError") as caught:
        load_target(provider, host)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_target_that_is_no_callable() -> None:
    host, provider = host_with("sys:path")
    with pytest.raises(PluginError, match="is not callable"):
        load_target(provider, host)


def test_what_a_factory_makes_is_checked() -> None:
    host, provider = host_with(lambda: object())
    load_target(provider, host)
    with pytest.raises(PluginError, match="made a object that lacks"):
        check_made(provider, object(), host)

    class Good(KeyedRequestQueue):
        def key(self, request):
            return 0

    check_made(provider, Good(), host)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_contract_a_version_and_a_descriptor(kind: str) -> None:
    import importlib

    contract = contract_class(kind)
    assert isinstance(contract, type)
    assert KINDS[kind].api == importlib.import_module(contract.__module__).API
    assert provider_class(kind).kind == kind
