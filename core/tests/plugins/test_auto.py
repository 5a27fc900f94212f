"""What "auto" means: executors, models, platforms and attention backends of plugins that are installed, enabled or named."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pegboard.config import EngineConfig
from pegboard.contracts.attention import AttentionQuery
from pegboard.plugins import (
    AttentionBackendProvider,
    Chosen,
    CompositionError,
    DuplicateProviderError,
    ExecutorProvider,
    PlatformProvider,
    PluginError,
    PluginHost,
    compose,
    select_attention,
)
from pegboard.plugins.requirements import unmet_requirement
from pegboard.testing.plugins import compose_with

pytestmark = pytest.mark.usefixtures("standard")


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", **settings})


class TestExecutorAuto:
    def offers(self, *names: str) -> dict[str, Any]:
        return {"executors": lambda: [ExecutorProvider(name=n, target="a:b", capabilities={"tp", "pp"}) for n in names]}

    def test_several_ranks_without_an_executor_for_them(self) -> None:
        with pytest.raises(PluginError, match=r"2 x 1 ranks .* need an executor with tp.*pip install pegboard-executor-mp"):
            compose(config(executor={"tensor_parallel_size": 2}))

    def test_several_ranks(self) -> None:
        composition = compose_with(self.offers("zeta", "mp"), executor={"pipeline_parallel_size": 2})
        assert composition.parts["executor"].name == "mp"
        assert "1 x 2 ranks" in composition.reasons["executor"]

    def test_one_rank_stays_in_process(self) -> None:
        assert compose_with(self.offers("mp")).parts["executor"].name == "uniproc"

    @pytest.mark.parametrize("answer", ["zeta", Chosen("zeta", "it has the most memory")])
    def test_a_hook_may_say_why(self, answer: str) -> None:
        hooks = {**self.offers("mp", "zeta"), "select_executor": lambda config, candidates: answer}
        composition = compose_with(hooks, executor={"tensor_parallel_size": 2})
        assert composition.parts["executor"].name == "zeta"
        who = "chosen by select_executor of plugin 'acme' (given directly)"
        why = f"it has the most memory; {who}" if isinstance(answer, Chosen) else who
        assert composition.reasons["executor"] == why

    def test_a_package_that_a_part_lacks_is_told_with_its_requirement(self, plugin_factory) -> None:
        """As the plugin's own metadata has it; nothing where it has none, or nothing of that name."""
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        plugin_factory("import no_such_engine\nExecutor = object", name="acme-part")
        plugin_factory(
            source + "    return [ExecutorProvider(name='far', target='acme_part:Executor')]",
            name="acme",
            requires=("Other>=1", "No.Such-Engine>=2.5,<3; python_version > '3'"),
        )
        composition = compose(config(executor={"name": "far"}))
        with pytest.raises(PluginError, match=r"No module named 'no_such_engine'.*; pip install 'No\.Such-Engine>=2\.5,<3'$"):
            composition.create("executor")
        assert unmet_requirement("acme", "other.part") == "Other>=1"
        assert unmet_requirement("acme", "numpy") == ""
        assert unmet_requirement("nobody", "numpy") == ""

    def test_an_installed_one_of_a_stranger_is_not_taken_but_told(self, plugin_factory) -> None:
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef executors():\n"
        plugin_factory(source + "    return [ExecutorProvider(name='threads', target='a:b', capabilities={'tp'})]", name="acme")
        with pytest.raises(PluginError, match="installed but not enabled: threads"):
            compose(config(executor={"tensor_parallel_size": 2}))
        named = compose(config(executor={"tensor_parallel_size": 2, "name": "threads"}))
        assert named.parts["executor"].plugin == "acme"
        enabled = compose(config(executor={"tensor_parallel_size": 2}, plugins={"enabled": ["acme"]}))
        assert enabled.parts["executor"].plugin == "acme"


class TestModels:
    SOURCE = (
        "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef models():\n"
        "    return [ModelProvider(name='mine', target='a:b', spec='fake_standard:spec', architectures=('TinyForCausalLM',))]"
    )

    def test_an_installed_plugin_does_not_take_an_architecture_over(self, plugin_factory) -> None:
        plugin_factory(self.SOURCE, name="acme")
        assert compose(config()).parts["model"].plugin == "standard"

    def test_an_enabled_one_does(self, plugin_factory) -> None:
        plugin_factory(self.SOURCE, name="acme")
        assert compose(config(plugins={"enabled": ["acme"]})).parts["model"].plugin == "acme"

    def test_two_enabled_ones_are_an_error(self, plugin_factory) -> None:
        plugin_factory(self.SOURCE, name="acme")
        plugin_factory(self.SOURCE, name="beta")
        with pytest.raises(DuplicateProviderError, match=r"acme 1\.0 and 'beta:mine' of plugin 'beta' of beta 1\.0"):
            compose(config(plugins={"enabled": ["acme", "beta"]}))


class TestPlatforms:
    def platform(self, name: str, available: Any, priority: int = 9) -> dict[str, Any]:
        import fake_standard

        made = type(name, (fake_standard.Cpu,), {"is_available": staticmethod(available)})
        return {"platforms": lambda: [PlatformProvider(name=name, priority=priority, target=made)]}

    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        PluginHost.load()

    def test_an_unavailable_one_is_passed_over_with_a_reason(self) -> None:
        composition = compose_with(self.platform("npu", lambda: False))
        assert composition.parts["platform"].name == "cpu"
        assert "npu is not available" in composition.reasons["platform"]

    def test_a_failing_one_is_passed_over_with_a_warning(self, caplog) -> None:
        def broken():
            raise RuntimeError("boom-17")

        assert compose_with(self.platform("npu", broken)).parts["platform"].name == "cpu"
        (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "'npu'" in warning
        assert "boom-17" in warning

    def test_a_named_one_that_is_unavailable_is_an_error(self) -> None:
        with pytest.raises(PluginError, match=r"device: platform 'npu' of plugin 'acme'.* is not available on this machine"):
            compose_with(self.platform("npu", lambda: False), device="npu")

    def test_a_named_one_may_be_missing_here_where_workers_may_be_elsewhere(self) -> None:
        far = ExecutorProvider(name="far", target="a:b", capabilities={"multi_node"})
        hooks = {**self.platform("npu", lambda: False), "executors": lambda: [far]}
        executor = {"name": "far"}
        assert compose_with(hooks, device="npu", executor=executor).parts["platform"].name == "npu"
        assert compose_with(hooks, executor=executor).parts["platform"].name == "cpu"

    def test_a_named_one_that_fails_keeps_its_exception(self) -> None:
        def broken():
            raise RuntimeError("boom-17")

        with pytest.raises(PluginError, match="boom-17"):
            compose_with(self.platform("npu", broken), device="npu")


class TestAttention:
    QUERY = AttentionQuery("cpu", "float32", "float32", 1, 1, 4, 16)

    def offer(self, supports: Any, priority: int = 9, name: str = "mine") -> dict[str, Any]:
        import fake_standard

        backend = type("Mine", (fake_standard.Torch,), {"supports": staticmethod(supports)})
        return {"attention_backends": lambda: [AttentionBackendProvider(name=name, target=backend, priority=priority)]}

    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        PluginHost.load()

    def test_highest_priority_that_supports(self) -> None:
        from pegboard.contracts.attention import Support

        choice = select_attention(self.QUERY, compose_with(self.offer(lambda q: Support(True))))
        assert choice.provider.name == "mine"
        assert choice.reasons == ("mine: supports the query, priority 9", "torch: supports the query, priority 0")
        choice = select_attention(self.QUERY, compose_with(self.offer(lambda q: Support.of("head size 4 is too small"))))
        assert choice.provider.name == "torch"
        assert "mine: head size 4 is too small" in choice.reasons

    def test_a_named_one_that_does_not_support_is_an_error_with_its_reasons(self) -> None:
        from pegboard.contracts.attention import Support

        composition = compose_with(self.offer(lambda q: Support.of("no", "never")), attention={"backend": "mine"})
        with pytest.raises(CompositionError) as caught:
            select_attention(self.QUERY, composition)
        assert len(caught.value.problems) == 2
        assert "plugin 'acme'" in str(caught.value)

    def test_a_failing_one_is_passed_over_with_a_warning_but_not_if_named(self, caplog) -> None:
        def supports(query):
            raise RuntimeError("boom-17")

        assert select_attention(self.QUERY, compose_with(self.offer(supports))).provider.name == "torch"
        assert any("boom-17" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
        with pytest.raises(PluginError, match="boom-17"):
            select_attention(self.QUERY, compose_with(self.offer(supports), attention={"backend": "mine"}))

    def test_a_stranger_s_backend_is_not_taken_unless_enabled_or_named(self, plugin_factory) -> None:
        source = "from pegboard.plugins import *\nfrom pegboard.plugins import hookimpl\n@hookimpl\ndef attention_backends():\n"
        source += "    return [AttentionBackendProvider(name='mine', target='fake_standard:Torch', priority=99)]"
        plugin_factory(source, name="acme")
        assert select_attention(self.QUERY, compose(config())).provider.name == "torch"
        for settings in ({"plugins": {"enabled": ["acme"]}}, {"attention": {"backend": "mine"}}):
            assert select_attention(self.QUERY, compose(config(**settings))).provider.name == "mine"
