"""Extension fields of requests: ``ext[plugin name]``, typed and checked by the model that the plugin declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel, RootModel, ValidationError

from pegboard.plugins.errors import PluginError
from pegboard.plugins.provider import RequestFields, import_target
from pegboard.plugins.suggestions import did_you_mean

if TYPE_CHECKING:
    from pegboard.plugins import PluginHost, PluginRecord


class RequestExtensions:
    """The models of all plugins in use whose hook ``request_fields`` declares some."""

    def __init__(self, host: PluginHost) -> None:
        """Raises ``PluginError`` where a plugin's hook or model cannot be used, or two plugins declare one name."""
        self._host = host
        self._models: dict[str, type[BaseModel]] = {}
        owners: dict[str, PluginRecord] = {}
        for record in host.records:
            if not (record.loaded and record.active and "request_fields" in record.hooks):
                continue
            for fields in _declared(host, record):
                other = owners.setdefault(fields.name, record)
                if fields.name in self._models:
                    raise PluginError(
                        f"request_fields: {other.label} and {record.label} both declare fields called {fields.name!r}; block one"
                    )
                self._models[fields.name] = _model(record, fields)

    def check(self, *given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Merge what was ``given``, later fields over earlier ones, and check each plugin's with its model.

        Returns plain data (what JSON can hold) with defaults filled in. Raises ``ValueError`` naming the field.
        """
        merged: dict[str, Any] = {}
        for ext in given:
            if ext is not None and not isinstance(ext, Mapping):
                raise ValueError(f"ext={ext!r:.80} must be a dict from plugin names to their fields")
            for name, fields in (ext or {}).items():
                before = merged.get(name)
                both = isinstance(before, Mapping) and isinstance(fields, Mapping)
                merged[name] = {**before, **fields} if both else fields  # type: ignore[dict-item]
        return {name: self._checked(name, fields) for name, fields in merged.items()}

    def _checked(self, name: Any, fields: Any) -> dict[str, Any]:
        model = self._models.get(name)
        if model is None:
            raise ValueError(self._unknown(name))
        if not isinstance(fields, (Mapping, model)):
            raise ValueError(f"ext.{name}={fields!r:.80} must be a dict of fields ({', '.join(_names(model)) or 'it has none'})")
        problems: list[str] = []
        try:
            if isinstance(fields, Mapping):
                problems += _unknown_fields(f"ext.{name}", fields, model)
                fields = dict(fields)
            checked = model.model_validate(fields)
        except ValidationError as error:
            problems += _refused(name, error, model)
        if problems:
            raise ValueError("; ".join(problems))
        try:
            plain = checked.model_dump(mode="json", by_alias=True)
            msgspec.msgpack.encode(plain)  # as it goes to other processes
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"ext.{name} holds what JSON cannot: {error}") from error
        problems += _passed_over(f"ext.{name}", fields, checked)
        if problems:
            raise ValueError("; ".join(problems))
        return plain

    def _unknown(self, name: Any) -> str:
        record = self._host.record(name) if isinstance(name, str) else None
        if record is not None and record.loaded and not record.active:
            return f"ext.{name}: {record.label} is not in use; list it in plugins.enabled"
        if record is not None and record.loaded:
            return f"ext.{name}: {record.label} takes no fields of requests; leave it out"
        known = ", ".join(sorted(self._models)) or "none"
        return (
            f"ext.{name}: no plugin in use takes fields of that name{did_you_mean(str(name), self._models)} (there are: {known})"
        )


def _declared(host: PluginHost, record: PluginRecord) -> list[RequestFields]:
    try:
        declared = host.only(record, "request_fields")
    except Exception as error:
        raise PluginError(f"request_fields of {record.label} failed: {type(error).__name__}: {error}") from error
    for fields in declared:
        if not isinstance(fields, RequestFields):
            raise PluginError(f"request_fields of {record.label} must give RequestFields objects, but gave {fields!r}")
        if not isinstance(fields.name, str) or not fields.name:
            raise PluginError(f"request_fields of {record.label} gives fields named {fields.name!r}; a name is a non-empty text")
    return declared


def _model(record: PluginRecord, fields: RequestFields) -> type[BaseModel]:
    try:
        model = import_target(fields.model) if isinstance(fields.model, str) else fields.model
    except Exception as error:  # importing the model runs the plugin's code
        raise PluginError(
            f"request_fields of {record.label}: {fields.model!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, type) or not issubclass(model, BaseModel) or model is BaseModel:
        raise PluginError(f"request_fields of {record.label}: a model must be a pydantic model class, got {model!r}")
    return model


def _spellings(model: type[BaseModel]) -> dict[str, list[Any]]:
    """Field name to the names under which a request may give it."""
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    found: dict[str, list[Any]] = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias
        found[name] = [name] if alias is None else [alias, name] if by_name else [alias]
    return found


def _names(model: type[BaseModel]) -> list[str]:
    """Fields as a request spells them."""
    return [next((s for s in spellings if isinstance(s, str)), name) for name, spellings in _spellings(model).items()]


def _unknown_fields(path: str, fields: Mapping[Any, Any], model: type[BaseModel]) -> Iterator[str]:
    """Fields that the model would pass over in silence. One that allows any field, or refuses by itself, is left to do so, as is
    one with aliases that are paths or choices, and one without fields of its own."""
    known = [spelling for spellings in _spellings(model).values() for spelling in spellings]
    if model.model_config.get("extra", "ignore") != "ignore" or not all(isinstance(spelling, str) for spelling in known):
        return
    for key in fields:
        if key not in known and not issubclass(model, RootModel):
            yield f"{path}.{key}: there is no such field{_hint(key, model)}"


def _passed_over(path: str, given: Any, checked: Any) -> Iterator[str]:
    """Unknown fields of the models inside ``checked``, the value that was made of ``given``."""
    for key, inner, made in _inside(given, checked):
        if isinstance(made, BaseModel) and isinstance(inner, Mapping):
            yield from _unknown_fields(f"{path}.{key}", inner, type(made))
        yield from _passed_over(f"{path}.{key}", inner, made)


def _inside(given: Any, checked: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What ``given`` holds: where, what, and what was made of it."""
    if isinstance(checked, BaseModel) and isinstance(given, Mapping):
        for name, spellings in _spellings(type(checked)).items():
            spelled = next((s for s in spellings if isinstance(s, str) and s in given), None)
            if spelled is not None:
                yield spelled, given[spelled], getattr(checked, name)
    elif isinstance(checked, Mapping) and isinstance(given, Mapping):
        yield from ((key, given[key], checked[key]) for key in given if key in checked)
    elif isinstance(checked, (list, tuple)) and isinstance(given, (list, tuple)) and len(checked) == len(given):
        yield from zip(range(len(given)), given, checked, strict=True)


def _refused(name: str, error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    for detail in error.errors(include_url=False, include_context=False):
        path = ".".join(["ext", name, *map(str, detail["loc"])])
        if detail["type"] == "extra_forbidden":
            yield f"{path}: there is no such field" + (_hint(detail["loc"][0], model) if len(detail["loc"]) == 1 else "")
        elif detail["type"] == "missing":
            yield f"{path}: is required"
        else:
            message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            yield f"{path}={detail['input']!r:.80}: {message}"


def _hint(key: Any, model: type[BaseModel]) -> str:
    return did_you_mean(str(key), _names(model)) or f"; fields are {', '.join(_names(model)) or 'none'}"
