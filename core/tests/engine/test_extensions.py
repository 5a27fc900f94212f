"""Extension fields of requests: typed by plugins, merged, checked, plain on the wire."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from pegboard.engine.extensions import RequestExtensions
from pegboard.plugins import PluginHost, RequestFields, hookimpl
from pegboard.plugins.errors import PluginError
from pegboard.wire import SamplingParams


class Deadline(BaseModel):
    """Passes over unknown fields, by itself."""

    seconds: float = Field(gt=0)
    label: str = "none"
    day: datetime.date | None = None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    level: int = Field(default=1, alias="importance")

    @field_validator("level")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2 and value != 1:
            raise ValueError("must be even")
        return value


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Step(BaseModel):
    name: str = ""


class Nested(BaseModel):
    one: Step | None = None
    many: list[Step] = []
    named: dict[str, Step] = Field(default={}, alias="byName")
    free: Open | None = None


class Weights(RootModel[dict[str, int]]):
    pass


def circle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def plugin(*fields: Any) -> Any:
    class Plugin:
        @hookimpl
        def request_fields(self) -> Any:
            return list(fields)

    return Plugin()


def extensions(**plugins: Any) -> RequestExtensions:
    return RequestExtensions(PluginHost.load(discovery=False, extra=plugins))


@pytest.fixture
def known() -> RequestExtensions:
    return extensions(
        acme=plugin(RequestFields("acme", Deadline)),
        strict=plugin(RequestFields("strict", Strict), RequestFields("open", Open)),
        deep=plugin(RequestFields("deep", Nested), RequestFields("weights", Weights)),
        silent=plugin(),
    )


def test_what_goes_on_the_wire_is_plain_and_complete(known: RequestExtensions) -> None:
    checked = known.check({"acme": {"seconds": 2, "day": "2024-02-29"}, "strict": {}, "open": {"x": [1]}})
    assert checked == {
        "acme": {"seconds": 2.0, "label": "none", "day": "2024-02-29"},
        "strict": {"importance": 1},
        "open": {"x": [1]},
    }
    assert Deadline.model_validate(checked["acme"]).day == datetime.date(2024, 2, 29)
    assert Strict.model_validate(checked["strict"]).level == 1
    assert known.check({"acme": Deadline(seconds=3)}) == {"acme": {"seconds": 3.0, "label": "none", "day": None}}
    assert known.check(None, {}) == {}


def test_fields_of_several_places_are_merged(known: RequestExtensions) -> None:
    checked = known.check({"acme": {"seconds": 1, "label": "a"}}, None, {"acme": {"seconds": 2}}, {"open": {"x": 1}})
    assert checked["acme"] == {"seconds": 2.0, "label": "a", "day": None}
    assert checked["open"] == {"x": 1}


def test_models_inside_models(known: RequestExtensions) -> None:
    step = {"name": "x"}
    given = {"one": step, "many": [step, {}], "byName": {"a": step}, "free": {"anything": 1}}
    assert known.check({"deep": given})["deep"] == {**given, "many": [step, {"name": ""}]}
    assert known.check({"weights": {"a": 1}}) == {"weights": {"a": 1}}


@pytest.mark.parametrize(
    ("ext", "message"),
    [
        ({"acme": {"seconds": 0}}, r"ext.acme.seconds=0: Input should be greater than 0"),
        ({"acme": {}}, r"ext.acme.seconds: is required"),
        ({"acme": {"seconds": 1, "lable": "x"}}, r"ext.acme.lable: there is no such field; did you mean 'label'\?"),
        ({"acme": {"seconds": 1, 5: "x"}}, r"ext.acme.5: there is no such field; fields are seconds, label, day"),
        ({"acme": {"second": -1}}, r"ext.acme.second: there is no such field; did you mean 'seconds'\?; ext.acme.seconds: is"),
        ({"strict": {"importanse": 2}}, r"ext.strict.importanse: there is no such field; did you mean 'importance'\?"),
        ({"strict": {"level": 2}}, r"ext.strict.level: there is no such field"),
        ({"strict": {"importance": 3}}, r"ext.strict.importance=3: must be even"),
        ({"acme": 5}, r"ext.acme=5 must be a dict of fields \(seconds, label, day\)"),
        ({"acne": {}}, r"ext.acne: no plugin in use takes .*; did you mean 'acme'\? \(there are: acme, deep, open, strict"),
        ({"silent": {}}, r"ext.silent: plugin 'silent' \(given directly\) takes no fields of requests; leave it out"),
        ({5: {}}, r"ext.5: no plugin in use"),
        ([1], r"ext=\[1\] must be a dict"),
        ({"open": {"x": object()}}, r"ext.open holds what JSON cannot"),
        ({"open": {"x": circle()}}, r"ext.open holds what JSON cannot: Circular reference"),
        ({"open": {"x": b"\xff"}}, r"ext.open holds what JSON cannot"),
        ({"open": {"x": 2**70}}, r"ext.open holds what JSON cannot"),
        ({"open": {"x": "\ud800"}}, r"ext.open holds what JSON cannot"),
        ({"deep": {"one": {"nam": "x"}}}, r"ext.deep.one.nam: there is no such field; did you mean 'name'\?"),
        ({"deep": {"many": [{}, {"y": 1}]}}, r"ext.deep.many.1.y: there is no such field; fields are name"),
        ({"deep": {"byName": {"a": {"y": 1}}}}, r"ext.deep.byName.a.y: there is no such field; fields are name"),
    ],
)  # fmt: skip
def test_what_is_refused(known: RequestExtensions, ext: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        known.check(ext)


def test_a_model_may_be_named_by_its_import_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "acme_fields.py").write_text("from pydantic import BaseModel\nclass Fields(BaseModel):\n    level: int = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert extensions(acme=plugin(RequestFields("acme", "acme_fields:Fields"))).check({"acme": {}}) == {"acme": {"level": 3}}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            [RequestFields("acme", "no_such_module:Fields")],
            r"request_fields of plugin 'acme' .*'no_such_module:Fields' cannot be",
        ),
        ([RequestFields("acme", dict)], r"a model must be a pydantic model class, got <class 'dict'>"),
        ([RequestFields("acme", BaseModel)], r"a model must be a pydantic model class"),
        ([RequestFields("", Open)], r"gives fields named ''"),
        ([Open], r"must give RequestFields objects"),
    ],
)
def test_a_plugin_that_declares_nonsense_is_named(declared: list[Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        extensions(acme=plugin(*declared))


def test_two_plugins_with_one_name() -> None:
    with pytest.raises(PluginError, match=r"plugin 'a' .* and plugin 'b' .* both declare fields called 'x'"):
        extensions(a=plugin(RequestFields("x", Open)), b=plugin(RequestFields("x", Open)))


def test_a_hook_that_raises_is_named() -> None:
    class Broken:
        @hookimpl
        def request_fields(self) -> Any:
            raise OSError("disk full")

    with pytest.raises(PluginError, match=r"request_fields of plugin 'acme' .* failed: OSError: disk full"):
        extensions(acme=Broken())


def test_through_the_engine(make_engine: Any) -> None:
    seen: list[dict[str, Any]] = []

    class Acme:
        @hookimpl
        def request_fields(self) -> Any:
            return [RequestFields("acme", Deadline)]

        @hookimpl
        def validate_request(self, request: Any) -> None:
            assert request.sampling.ext == request.ext
            seen.append(pickle.loads(pickle.dumps(request.ext)))

    engine = make_engine({}, plugins={"acme": Acme()})
    params = SamplingParams(ext={"acme": {"seconds": 1, "label": "params"}})
    engine.add_request("a", {"prompt": "a", "ext": {"acme": {"seconds": 3}}}, params, ext={"acme": {"label": "argument"}})
    engine.add_request("b", "a", SamplingParams())
    assert seen == [{"acme": {"seconds": 3.0, "label": "argument", "day": None}}, {}]
    with pytest.raises(ValueError, match="did you mean 'acme'"):
        engine.add_request("c", "a", params, ext={"acmee": {}})
