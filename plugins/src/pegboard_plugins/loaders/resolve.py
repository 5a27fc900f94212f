"""From what the user wrote as ``model`` to a ``ModelSource``: folder, .gguf file, hub id, or weights in an installed package.

Imports no torch; the hub library only for a reference that is no local path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pegboard.contracts.model_source import ModelNotFound, ModelSource
from pegboard.contracts.weight_loader import WeightsError
from pegboard_plugins.loaders import hub
from pegboard_plugins.loaders.json_files import read_object
from pegboard_plugins.loaders.packaged import PACKAGED


def resolve(ref: str, config: Any = None) -> ModelSource | None:
    """What ``ref`` names, or None if nothing here knows it (then another plugin may).

    ``config`` is the ``EngineConfig``: ``load_format`` says which weights to take, ``tokenizer`` replaces the model's own.
    Raises ``ModelNotFound`` saying what was looked for if ``ref`` clearly means a path or a hub repository that cannot be used.
    """
    load_format = getattr(config, "load_format", "auto")
    path = _locate(ref, hub.MODEL_FILES)
    if path is None:
        return None
    try:
        source = _from_file(ref, path, load_format) if path.is_file() else _from_folder(ref, path, load_format)
    except ModelNotFound as error:
        if hub.is_hub_id(ref) and path != Path(ref).expanduser():
            raise ModelNotFound(f"{error}; a GGUF file on the hub is named in full: {ref}/<file>.gguf") from error
        raise
    override = getattr(config, "tokenizer", None)
    return source if override is None else _with_tokenizer(source, override)


def _locate(ref: str, patterns: tuple[str, ...]) -> Path | None:
    """The file or folder that ``ref`` means, fetched from the hub if need be."""
    if not ref.strip():
        raise ModelNotFound("no model was named; give a folder, a .gguf file, a hub id (organisation/name) or a known name")
    local = Path(ref).expanduser()
    packaged = PACKAGED.get(ref.lower())
    if packaged is not None and not _looks_like_model(local):
        return packaged.file(ref)
    if local.exists():
        return local
    if "://" in ref:
        return None
    if not ref.startswith(("/", ".", "~")) and "\\" not in ref:
        if (named := hub.hub_file(ref)) is not None:
            return Path(hub.download_file(*named))
        if hub.is_hub_id(ref):
            return Path(hub.download(ref, patterns))
    if "/" in ref or "\\" in ref or ref.endswith((".gguf", ".safetensors")):
        raise ModelNotFound(f"{ref}: no such file or folder")
    return None


def _looks_like_model(path: Path) -> bool:
    return path.is_file() or (path / "config.json").is_file() or (path.is_dir() and any(path.glob("*.gguf")))


def _from_file(ref: str, path: Path, load_format: str) -> ModelSource:
    with _opened(path) as file:
        magic = file.read(4)
    if magic != b"GGUF" and path.suffix == ".safetensors":
        raise ModelNotFound(
            f"{path}: a single safetensors file has no configuration; give its folder, with config.json: {path.parent}"
        )
    if load_format == "safetensors":
        raise ModelNotFound(
            f"{path}: load_format is safetensors, but this is a single file; give a folder, or load_format = 'gguf'"
        )
    return _from_gguf(ref, path)


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror}") from error


def _from_gguf(ref: str, path: Path) -> ModelSource:
    from pegboard_plugins.loaders.gguf_config import gguf_config, gguf_generation_config
    from pegboard_plugins.loaders.gguf_metadata import read_gguf

    try:
        file = read_gguf(path)
        parts = file.metadata.get("split.count", 1)
        if parts > 1:
            raise WeightsError(f"{path}: one of {parts} parts of a split model; join them with 'llama-gguf-split --merge'")
        return ModelSource(
            ref=ref,
            path=str(path),
            loader="gguf",
            tokenizer="gguf",
            config=gguf_config(file),
            generation_config=gguf_generation_config(file),
            resolved_by="GGUF file",
        )
    except WeightsError as error:
        raise ModelNotFound(str(error)) from error


def _from_folder(ref: str, folder: Path, load_format: str) -> ModelSource:
    config = folder / "config.json"
    ggufs = sorted(folder.glob("*.gguf"))
    tensors = any(folder.glob("*.safetensors"))
    own_format = load_format not in ("auto", "safetensors", "gguf")  # another loader's: it alone knows its files
    if load_format != "gguf" and config.is_file() and (tensors or own_format):
        return ModelSource(
            ref=ref,
            path=str(folder),
            loader=load_format if own_format else "safetensors",
            tokenizer="hf",
            config=read_object(config),
            generation_config=read_object(folder / "generation_config.json", missing={}),
            resolved_by="folder",
        )
    if len(ggufs) == 1 and load_format != "safetensors":
        return _from_gguf(ref, ggufs[0])
    raise ModelNotFound(_unusable_folder(folder, load_format, ggufs, tensors))


def _unusable_folder(folder: Path, load_format: str, ggufs: list[Path], tensors: bool) -> str:
    if len(ggufs) > 1 and load_format != "safetensors":
        names = ", ".join(file.name for file in ggufs)
        return f"{folder}: holds {len(ggufs)} GGUF files: {names}. Name the one to load, for example model = '{ggufs[0]}'"
    if tensors and load_format != "gguf":
        return f"{folder}: holds safetensors files but no config.json, which says what model they are"
    wanted = {"safetensors": "config.json with *.safetensors", "gguf": "one *.gguf file"}
    looked = wanted.get(load_format, "config.json with *.safetensors, or one *.gguf file")
    message = f"{folder}: no model found; looked for {looked}"
    if pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        message += f"; {pickled[0].name} is a pickle, which is not loaded: save the model as safetensors"
    elif (folder / "config.json").is_file():
        message += "; config.json is there, the weights are missing (load_format = 'dummy' makes random ones)"
    return message


def _with_tokenizer(source: ModelSource, ref: str) -> ModelSource:
    """``source`` with the tokenizer that ``ref`` names: a folder, a .gguf file, a hub id or a packaged model."""
    path = _locate(ref, hub.TOKENIZER_FILES)
    if path is None:
        raise ModelNotFound(f"tokenizer {ref!r}: no such folder, .gguf file, hub id (organisation/name) or known name")
    kind = "hf"
    if path.is_file():
        if path.name == "tokenizer.json":
            path = path.parent
        else:
            kind = "gguf"
    elif not any(path.glob("tokenizer*")) and len(ggufs := sorted(path.glob("*.gguf"))) == 1:
        path, kind = ggufs[0], "gguf"
    return replace(source, tokenizer=kind, tokenizer_path=str(path))
