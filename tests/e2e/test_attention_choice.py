"""An attention backend of a plugin that fails: an error where it is named, a warning and another backend where it is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.contracts.attention import AttentionQuery, Support
from pegboard.plugins import AttentionBackendProvider, hookimpl
from pegboard.testing.reference_attention import ReferenceAttentionBackend


class FailsToSay(ReferenceAttentionBackend):
    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        raise OSError("cannot open /dev/acme0")


class LacksTheHeadSize(ReferenceAttentionBackend):
    @classmethod
    def supports(cls, query: AttentionQuery) -> Support:
        return Support.of(None if query.head_size == 128 else f"head size {query.head_size} is not 128")


class Acme:
    """The plugin."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @hookimpl
    def attention_backends(self) -> Iterator[AttentionBackendProvider]:
        yield AttentionBackendProvider(name="acme", target=self.target, priority=50)


@pytest.fixture(params=["at import", "when asked", "head size"])
def broken(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Acme, str]:
    """The plugin, and what its own exception or reason says."""
    if request.param == "at import":
        (tmp_path / "acme_kernels.py").write_text("raise ImportError('libacme.so.3 is missing')")
        monkeypatch.syspath_prepend(tmp_path)
        return Acme("acme_kernels:Attention"), "libacme.so.3 is missing"
    if request.param == "when asked":
        return Acme(FailsToSay), "cannot open /dev/acme0"
    return Acme(LacksTheHeadSize), "head size 16 is not 128"


def test_a_named_one_is_an_error_with_its_own_reason(tiny: Any, open_llm: Any, broken: tuple[Acme, str]) -> None:
    plugin, reason = broken
    for setting in ("acme", "torch,acme", "acme,torch"):
        with pytest.raises(Exception, match=reason) as caught:
            open_llm(tiny, attention=setting, plugins={"acme": plugin})
        assert "acme" in str(caught.value)


def test_auto_takes_another_with_a_warning(
    tiny: Any, open_llm: Any, broken: tuple[Acme, str], caplog: pytest.LogCaptureFixture
) -> None:
    plugin, reason = broken
    caplog.set_level(logging.INFO, "pegboard")
    llm = open_llm(tiny, plugins={"acme": plugin})
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "attention" in r.getMessage()]
    assert "'acme'" in warning
    assert reason in warning
    [told] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("attention=")]
    assert told.startswith("attention=torch (torch: supports the query, priority 0")
    [[report]] = llm.collective_rpc("attention_report")
    assert (report["backend"], report["num_layers"]) == ("torch", 2)
    assert any("acme" in line and reason in line for line in report["reasons"])


def test_nobody_is_warned_of_kernels_for_accelerators(tiny: Any, open_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    open_llm(tiny)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "attention" in r.getMessage()]
