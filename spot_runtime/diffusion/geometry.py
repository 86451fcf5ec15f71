"""What a model folder is: its parts, its digest and the shape of its latents. Owns the check of a Qwen-Image pipeline folder or hub id.

Never imports torch and never reads weights beyond a sample for the digest, so a workflow can call it before anything starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from spot_runtime.errors import ModelError
from spot_runtime.hub import HubError, file_names, is_hub_id, snapshot
from spot_runtime.scheduler.expansion import embedding_key

__all__ = [
    "CheckedModel",
    "LatentGeometry",
    "check_model",
    "check_names",
    "embedding_key",
    "latent_geometry",
    "model_folder",
    "pipeline_files",
    "read_json",
    "vae_scale",
]

TINY: Final = "tiny"
"""The model that ships with the package."""
PATCH_SIZE: Final = 2
"""Latents are packed as 2 x 2 patches, whatever the transformer's config says (QwenImagePipeline)."""
DEFAULT_LATENT_SIDE: Final = 128
"""Side in latent pixels that QwenImagePipeline takes where nobody names a resolution."""

_DIFFUSION_WEIGHTS: Final = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json")
_TEXT_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_PARTS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    ".": (("model_index.json",),),
    "transformer": (("config.json",), _DIFFUSION_WEIGHTS),
    "vae": (("config.json",), _DIFFUSION_WEIGHTS),
    "scheduler": (("scheduler_config.json",),),
    "text_encoder": (("config.json",), _TEXT_WEIGHTS),
    "tokenizer": (("tokenizer_config.json",), ("tokenizer.json", "vocab.json")),
}
"""For each part of the pipeline, the files it needs; of each inner tuple any one will do."""
_SMALL_FILES: Final = ("*.json", "tokenizer/*")
WEIGHTS: Final = "*.safetensors"
_SAMPLE_BYTES: Final = 256 * 1024


@dataclass(frozen=True)
class LatentGeometry:
    """Shape of packed latents at one resolution: `tokens` = grid rows x grid columns, each of `channels` numbers."""

    tokens: int
    channels: int
    grid: tuple[int, int]


@dataclass(frozen=True)
class CheckedModel:
    """A model that has all its parts. `digest` changes with configuration, tokenizer and weights; `path` is where its JSON lies."""

    path: Path
    digest: str
    geometry: LatentGeometry
    default_resolution: int


def check_model(model: str, resolution: int = 0) -> CheckedModel:
    """Finds `model` ("tiny", a folder, or a hub id) and checks all that can be checked without loading it.

    `resolution` is height and width in pixels, 0 the model's own default. Of a hub id only the small files are fetched. Raises ModelError
    that names the missing or broken part, or the divisor that `resolution` misses.
    """
    path, names, revision = _locate(model)
    _check_parts(model, path, names)
    return _checked(path, _digest(path, names, revision), resolution)


def check_names(model: str, path: Path, names: frozenset[str], digest: str, resolution: int = 0) -> CheckedModel:
    """As `check_model`, of a model whose small files lie in `path` and whose other files and digest somebody else knows."""
    _check_parts(model, path, names)
    return _checked(path, digest, resolution)


def _checked(path: Path, digest: str, resolution: int) -> CheckedModel:
    default_resolution = _default_resolution(path)
    side = resolution or default_resolution
    return CheckedModel(path, digest, latent_geometry(path, side, side), default_resolution)


def pipeline_files(folder: Path) -> frozenset[str]:
    """Names of the files in `folder` that make a pipeline: configuration, tokenizer and weights, nothing hidden."""
    found = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return frozenset(name.as_posix() for name in found if _belongs(name))


def _belongs(name: Path) -> bool:
    hidden = any(part.startswith(".") for part in name.parts)
    return not hidden and any(fnmatchcase(name.as_posix(), pattern) for pattern in (*_SMALL_FILES, WEIGHTS))


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Whatever a library raises for weights that it cannot read becomes a ModelError that names the model."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model = {model!r}: cannot be loaded: {type(error).__name__}: {error}") from error


def model_folder(model: str) -> Path:
    """The folder of `model` with its weights, downloaded first where it is a hub id. Raises ModelError as `check_model`."""
    local = _local_folder(model)
    if local is not None:
        return local
    _require_hub_id(model)
    with _named(model):
        return snapshot(model, [*_SMALL_FILES, WEIGHTS])


def latent_geometry(folder: Path, height: int, width: int) -> LatentGeometry:
    """Packed latent shape of an image of `height` x `width` pixels. Raises ModelError that names the divisor."""
    vae, transformer = read_json(folder, "vae/config.json"), read_json(folder, "transformer/config.json")
    scale = vae_scale(vae)
    multiple = scale * PATCH_SIZE
    for name, pixels in (("height", height), ("width", width)):
        if pixels <= 0 or pixels % multiple:
            field = "resolution" if height == width else name
            raise ModelError(
                f"{field} = {pixels}: must be a positive multiple of {multiple} (VAE {scale} x patch {PATCH_SIZE})"
            )
    channels = int(_field(transformer, "in_channels", folder, "transformer/config.json"))
    z_dim = int(_field(vae, "z_dim", folder, "vae/config.json"))
    if channels != z_dim * PATCH_SIZE**2:
        raise ModelError(
            f"model = {str(folder)!r}: transformer in_channels = {channels}: must be {PATCH_SIZE**2} x vae z_dim = {z_dim * PATCH_SIZE**2}"
        )
    grid = (height // multiple, width // multiple)
    return LatentGeometry(tokens=grid[0] * grid[1], channels=channels, grid=grid)


def vae_scale(vae_config: Mapping[str, Any]) -> int:
    """Image pixels a latent pixel along one side."""
    return int(2 ** len(vae_config.get("temperal_downsample", (False, True, True))))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """One JSON object of a model folder. Raises ModelError that names the file."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model = {str(folder)!r}: {name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model = {str(folder)!r}: {name} must be a JSON object")
    return value


def _field(config: Mapping[str, Any], field: str, folder: Path, name: str) -> Any:
    if field not in config:
        raise ModelError(f"model = {str(folder)!r}: {name} has no field {field}")
    return config[field]


def _default_resolution(folder: Path) -> int:
    """`_default_resolution` of model_index.json (diffusers ignores keys with an underscore), else what QwenImagePipeline takes."""
    named = read_json(folder, "model_index.json").get("_default_resolution")
    return int(named) if named else DEFAULT_LATENT_SIDE * vae_scale(read_json(folder, "vae/config.json"))


def _local_folder(model: str) -> Path | None:
    path = Path(__file__).parents[1] / "models" / TINY if model == TINY else Path(model).expanduser()
    return path.resolve() if model and path.is_dir() else None


def _locate(model: str) -> tuple[Path, frozenset[str], str]:
    """Folder, names of all files, and revision ("" for a local folder)."""
    local = _local_folder(model)
    if local is not None:
        return local, pipeline_files(local), ""
    _require_hub_id(model)
    with _named(model):
        path = snapshot(model, _SMALL_FILES)
        return path, file_names(model), path.name


def _require_hub_id(model: str) -> None:
    if not is_hub_id(model):
        raise ModelError(f"model = {model!r}: must be {TINY!r}, a folder, or a hub id such as Qwen/Qwen-Image")


@contextmanager
def _named(model: str) -> Iterator[None]:
    try:
        yield
    except HubError as error:
        raise ModelError(f"model = {model!r}: no such folder, and {error}") from error


def _check_parts(model: str, folder: Path, names: frozenset[str]) -> None:
    for part, needs in _PARTS.items():
        for choices in needs:
            paths = [choice if part == "." else f"{part}/{choice}" for choice in choices]
            if not any(path in names for path in paths):
                raise ModelError(f"model = {model!r}: {' or '.join(paths)} is missing")
            _check_shards(model, folder, names, paths)
    _check_weights(model, folder, names)
    kind = read_json(folder, "model_index.json").get("_class_name")
    if kind != "QwenImagePipeline":
        raise ModelError(f"model = {model!r}: model_index.json _class_name = {kind!r}: must be 'QwenImagePipeline'")


def _check_shards(model: str, folder: Path, names: frozenset[str], paths: list[str]) -> None:
    """All files that a weight index lists must be there."""
    index = next((path for path in paths if path.endswith(".index.json") and path in names), None)
    if index is None or paths[0] in names:
        return
    weight_map = _field(read_json(folder, index), "weight_map", folder, index)
    part = index.split("/", maxsplit=1)[0]
    missing = sorted({f"{part}/{shard}" for shard in weight_map.values()} - names)
    if missing:
        raise ModelError(f"model = {model!r}: {missing[0]} is missing, {index} lists it")


def _check_weights(model: str, folder: Path, names: frozenset[str]) -> None:
    """A weight file that is here must be as long as its header says; of a hub id there may be none yet."""
    for name in sorted(names):
        file = folder / name
        if file.suffix == ".safetensors" and name.partition("/")[0] in _PARTS and file.is_file():
            try:
                with safe_open(file, framework="np"):
                    pass
            except (OSError, SafetensorError) as error:
                raise ModelError(f"model = {model!r}: {name} cannot be read: {error}") from error


def _digest(folder: Path, names: frozenset[str], revision: str) -> str:
    """SHA-256 over the small files and, for a local folder, size, head and tail of each weight file; for a hub id, its revision."""
    digest = hashlib.sha256(revision.encode())
    for name in sorted(names):
        file = folder / name
        if not file.is_file() or file.suffix not in {".json", ".txt", ".jinja", ".safetensors"}:
            continue
        if revision and file.suffix == ".safetensors":
            continue
        digest.update(f"\0{name}\0{file.stat().st_size}\0".encode())
        digest.update(_sample(file))
    return digest.hexdigest()


def _sample(file: Path) -> bytes:
    """The whole of a small file, else its first and last 256 KiB."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= 2 * _SAMPLE_BYTES or file.suffix != ".safetensors":
            return stream.read()
        head = stream.read(_SAMPLE_BYTES)
        stream.seek(size - _SAMPLE_BYTES)
        return head + stream.read()
