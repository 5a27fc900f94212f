"""What a name means: one that is not there, one that two distributions claim, and versions of contracts."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from pegboard.config import PluginsConfig
from pegboard.plugins import DuplicateProviderError, PluginError, PluginHost, RequestQueueProvider, UnknownProviderError, hookimpl
from pegboard.testing.distributions import WrittenDistribution, forget_modules, write_distribution
from pegboard.testing.pytest_plugin import PluginFactory

QUEUE = """
from pegboard.contracts.request_queue import KeyedRequestQueue
from pegboard.plugins import hookimpl, RequestQueueProvider
class Queue(KeyedRequestQueue):
    def key(self, request): return 0
@hookimpl
def request_queues():
    return [RequestQueueProvider(name={name!r}, target=Queue, summary=__name__)]
"""


def offers(*names: str, api: object = 1) -> type:
    class Plugin:
        @hookimpl
        def request_queues(self):
            return [RequestQueueProvider(name=n, target="a:b", api=api) for n in names]

    return Plugin


class TestB090TwoDistributionsClaimOneName:
    @pytest.fixture(params=list(itertools.permutations(["p1", "p2"])), ids="-".join)
    def host(self, request, plugin_factory, standard) -> PluginHost:
        for name in request.param:
            plugin_factory(QUEUE.format(name="fast"), name=name, version=f"{name[1]}.5", module=f"mod_{name}")
        return PluginHost.load()

    def test_the_bare_name_is_an_error_naming_both_and_how_to_choose(self, host) -> None:
        with pytest.raises(DuplicateProviderError) as caught:
            host.get("request_queue", "fast")
        assert str(caught.value) == (
            "request_queue 'fast' is offered by plugin 'p1' of p1 1.5 and plugin 'p2' of p2 2.5; name the one you want as "
            "'p1:fast' or 'p2:fast', or keep one out with plugins.block = [...] (p1 or p2)"
        )

    def test_a_qualified_name_chooses(self, host) -> None:
        assert host.get("request_queue", "p1:fast").summary == "mod_p1"
        assert host.get("request_queue", "p2:fast").summary == "mod_p2"
        assert set(host.providers("request_queue")) == {"fcfs", "p1:fast", "p2:fast"}

    def test_blocking_one_chooses(self, host) -> None:
        assert PluginHost.load(PluginsConfig(block=["p1"])).get("request_queue", "fast").summary == "mod_p2"

    def test_loading_alone_is_no_error_but_doctor_tells(self, host) -> None:
        from pegboard.plugins.report import doctor

        assert not host.problems
        problems, _ = doctor(host)
        assert any("'p1:fast'" in p for p in problems)


def test_b090_same_entry_point_name_in_two_distributions(plugin_factory: PluginFactory, standard: WrittenDistribution) -> None:
    for name in ("p1", "p2"):
        plugin_factory(QUEUE.format(name=f"of_{name}"), name=name, entry_point="same", module=f"mod_{name}")
    host = PluginHost.load()
    assert {"of_p1", "of_p2"} <= set(host.providers("request_queue"))
    assert {"p1:same", "p2:same"} <= {r.name for r in host.records}
    blocked = PluginHost.load(PluginsConfig(block=["p1:same"]))
    assert str(blocked.record("p1:same").status) == "blocked"
    assert blocked.record("p2:same").loaded


class TestB090BuiltIns:
    @pytest.fixture
    def host(self, plugin_factory, standard) -> PluginHost:
        plugin_factory(QUEUE.format(name="fcfs"), name="p1", module="mod_p1")
        return PluginHost.load(PluginsConfig(enabled=["p1"]))

    def test_are_not_overridden(self, host) -> None:
        assert host.get("request_queue", "fcfs").plugin == "standard"

    def test_unless_chosen_by_distribution(self, host) -> None:
        assert host.get("request_queue", "p1:fcfs").plugin == "p1"
        assert set(host.providers("request_queue")) == {"fcfs", "p1:fcfs"}

    def test_and_doctor_notes_it(self, host) -> None:
        from pegboard.plugins.report import doctor

        assert any("the name means the standard part" in n for n in doctor(host)[1])


class TestB086NamingWhatIsNotThere:
    @pytest.fixture
    def host(self, standard) -> PluginHost:
        return PluginHost.load(extra={"acme": offers("ShortestFirst", "longest")})

    @pytest.mark.parametrize(
        ("kind", "name", "told"),
        [
            ("attention", "torhc", ["no attention is called 'torhc'", "available: 'torch'", "did you mean 'torch'"]),
            ("request_queue", "FCFS", ["'ShortestFirst', 'fcfs', 'longest'", "did you mean 'fcfs'"]),
            ("request_queue", "shortestfirst", ["did you mean 'ShortestFirst'"]),
            ("executor", "mpp", ["no executor is called 'mpp'", "available: 'uniproc'"]),
            ("executor", "mp", ["pip install pegboard-executor-mp"]),
            ("executor", "ray", ["pip install pegboard-executor-ray"]),
            ("attention", "triton", ["pip install pegboard-attn-triton"]),
            ("request_queue", "acme:lnogest", ["no request_queue is called"]),
        ],
    )
    def test_names(self, host, kind, name, told) -> None:
        with pytest.raises(UnknownProviderError) as caught:
            host.get(kind, name)
        for fact in told:
            assert fact in str(caught.value)

    @pytest.mark.parametrize(
        ("path", "told"),
        [
            ("no_such_module_x:Queue", "importing 'no_such_module_x' raised ModuleNotFoundError"),
            ("pegboard.contracts.request_queue:Quue", "has no attribute 'Quue'"),
            ("pegboard.contracts.request_queue:KeyedRequestQueu", "did you mean 'KeyedRequestQueue'"),
            ("pathlib:Path", "must name a subclass of pegboard.contracts.request_queue.RequestQueue"),
            ("pathlib:PurePath.joinpath", "must name a subclass"),
            ("pegboard.contracts.request_queue:KeyedRequestQueue", "lacks key for the contract RequestQueue"),
            ("a b:c", "write 'package.module:Class'"),
            (":Queue", "write 'package.module:Class'"),
            ("module:", "write 'package.module:Class'"),
        ],
    )
    def test_class_paths(self, host, path, told) -> None:
        with pytest.raises(PluginError) as caught:
            host.get("request_queue", path)
        assert repr(path) in str(caught.value)
        assert told in str(caught.value)

    def test_a_class_path_that_works(self, host, tmp_path: Path, monkeypatch) -> None:
        write_distribution(tmp_path, "unrelated", {"my_queues": QUEUE.format(name="x")})
        monkeypatch.syspath_prepend(str(tmp_path))
        provider = host.get("request_queue", "my_queues:Queue")
        assert provider.load() is sys.modules["my_queues"].Queue
        assert provider.plugin == ""
        forget_modules(["my_queues"])

    def test_a_distribution_may_be_called_like_a_module(self, plugin_factory, standard) -> None:
        plugin_factory(QUEUE.format(name="fast"), name="acme", module="acme")
        host = PluginHost.load()
        assert host.get("request_queue", "acme:fast").name == "fast"
        assert host.get("request_queue", "acme:Queue").name == "acme:Queue"
        with pytest.raises(UnknownProviderError):
            host.get("request_queue", "acme:Quue")

    def test_a_blocked_or_broken_plugin_that_may_provide_it_is_named(self, plugin_factory, standard) -> None:
        plugin_factory(QUEUE.format(name="fast"), name="acme")
        plugin_factory("raise RuntimeError('boom-17')", name="corp")
        with pytest.raises(UnknownProviderError) as caught:
            PluginHost.load(PluginsConfig(block=["acme"])).get("request_queue", "fast")
        assert "plugin 'acme' of acme 1.0 is blocked (blocked by plugins.block)" in str(caught.value)
        assert "plugin 'corp' of corp 1.0 is broken" in str(caught.value)
        assert "boom-17" in str(caught.value)

    def test_a_known_package_that_is_blocked_is_not_told_to_be_installed(self, plugin_factory, standard) -> None:
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n"
        plugin_factory(source, name="pegboard-executor-mp", entry_point="mp", version="0.1.0")
        with pytest.raises(UnknownProviderError) as caught:
            PluginHost.load(PluginsConfig(block=["mp"])).get("executor", "mp")
        assert "pegboard-executor-mp 0.1.0 would provide it, but is blocked" in str(caught.value)
        assert "pip install" not in str(caught.value)

    def test_an_unknown_kind(self, host) -> None:
        with pytest.raises(PluginError, match="no kind of part called 'exekutor'"):
            host.get("exekutor", "mp")


class TestB092ContractVersions:
    @pytest.mark.parametrize(
        ("api", "remedy"),
        [
            (0, "made for an older host: upgrade acme"),
            (999, "made for a newer host: upgrade pegboard"),
            (None, "must state its version as an integer"),
            ("1", "must state its version as an integer"),
            (True, "must state its version as an integer"),
        ],
    )
    def test_a_mismatch_is_told_at_load_and_refused_in_use(self, plugin_factory, standard, api, remedy) -> None:
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef request_queues():\n"
        source += f"    return [RequestQueueProvider(name='fast', target='a:b', api={api!r})]\n"
        plugin_factory(source, name="acme", version="3.2")
        host = PluginHost.inspect()
        assert "fast" not in host.providers("request_queue")
        (warning,) = [w for w in host.warnings if "acme" in w]
        with pytest.raises(PluginError) as caught:
            host.get("request_queue", "fast")
        for text in (warning, str(caught.value)):
            for fact in ("acme 3.2", repr(api), "speaks version 1", remedy):
                assert fact in text
        assert str(host.record("acme").status) == "incompatible"

    def test_the_right_version(self) -> None:
        assert "fast" in PluginHost.load(extra={"a": offers("fast")}, discovery=False).providers("request_queue")

    def test_one_bad_provider_does_not_take_its_plugin_down(self) -> None:
        class Plugin:
            @hookimpl
            def request_queues(self):
                return [RequestQueueProvider(name="good", target="a:b"), RequestQueueProvider(name="bad", target="a:b", api=2)]

        host = PluginHost.inspect(extra={"acme": Plugin}, discovery=False)
        assert host.record("acme").loaded
        assert list(host.providers("request_queue")) == ["good"]

    def test_a_good_offer_of_the_name_wins_over_one_that_cannot_be_used(self) -> None:
        host = PluginHost.inspect(extra={"old": offers("fast", api=0), "new": offers("fast")}, discovery=False)
        assert host.get("request_queue", "fast").plugin == "new"


def test_two_plugins_of_one_distribution_claim_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standard) -> None:
    modules = {m: QUEUE.format(name="fast") for m in ("mod_a", "mod_b")}
    write_distribution(tmp_path, "acme", modules, entry_points={"a": "mod_a", "b": "mod_b"})
    monkeypatch.syspath_prepend(str(tmp_path))
    host = PluginHost.load()
    assert {"a:fast", "b:fast"} < set(host.providers("request_queue"))
    with pytest.raises(DuplicateProviderError, match=r"'a:fast' or 'b:fast'.*\(a or b\)"):
        host.get("request_queue", "fast")
    assert host.get("request_queue", "b:fast").summary == "mod_b"
    forget_modules(list(modules))
