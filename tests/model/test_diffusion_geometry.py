import json
from pathlib import Path
from unittest.mock import Mock

import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import save

from spot_runtime.diffusion.geometry import LatentGeometry, check_model, embedding_key, latent_geometry, model_folder
from spot_runtime.errors import ModelError

WEIGHTS = save({"weight": np.zeros(16, np.float32)})
FILES: dict[str, object] = {
    "model_index.json": {"_class_name": "QwenImagePipeline", "_default_resolution": 64},
    "transformer/config.json": {"in_channels": 16},
    "transformer/diffusion_pytorch_model.safetensors": None,
    "vae/config.json": {"z_dim": 4, "temperal_downsample": [False, False]},
    "vae/diffusion_pytorch_model.safetensors": None,
    "scheduler/scheduler_config.json": {},
    "text_encoder/config.json": {},
    "text_encoder/model.safetensors": None,
    "tokenizer/tokenizer_config.json": {},
    "tokenizer/tokenizer.json": {},
}


def make_folder(folder: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(WEIGHTS if content is None else json.dumps(content).encode())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model", FILES)


def test_a_whole_folder_is_accepted_with_its_geometry(folder: Path) -> None:
    checked = check_model(str(folder), 128)
    assert checked.path == folder.resolve()
    assert checked.geometry == LatentGeometry(tokens=256, channels=16, grid=(16, 16))
    assert checked.default_resolution == 64


def test_resolution_zero_is_the_models_own(folder: Path) -> None:
    assert check_model(str(folder)).geometry == LatentGeometry(tokens=64, channels=16, grid=(8, 8))


def test_without_a_named_default_the_pipelines_is_taken(folder: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    assert check_model(str(folder)).default_resolution == 512


def test_qwen_image_itself_has_the_papers_token_counts(tmp_path: Path) -> None:
    vae = {"z_dim": 16, "temperal_downsample": [False, True, True]}
    make_folder(tmp_path, FILES | {"transformer/config.json": {"in_channels": 64}, "vae/config.json": vae})
    assert latent_geometry(tmp_path, 512, 512) == LatentGeometry(1024, 64, (32, 32))
    assert latent_geometry(tmp_path, 1280, 1280) == LatentGeometry(6400, 64, (80, 80))


@pytest.mark.parametrize("name", sorted(set(FILES) - {"model_index.json"}))
def test_a_missing_part_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match="is missing") as error:
        check_model(str(folder), 64)
    assert name in str(error.value)
    assert error.value.exit_code == 3


def test_a_shard_that_the_index_lists_must_be_there(folder: Path) -> None:
    (folder / "transformer/diffusion_pytorch_model.safetensors").unlink()
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (folder / "transformer/one.safetensors").write_bytes(WEIGHTS)
    with pytest.raises(ModelError, match=r"transformer/two\.safetensors is missing"):
        check_model(str(folder), 64)
    (folder / "transformer/two.safetensors").write_bytes(WEIGHTS)
    assert check_model(str(folder), 64).geometry.tokens == 64


@pytest.mark.parametrize(
    "part", ["transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model"]
)
@pytest.mark.parametrize("kept", [0, 7, 40, len(WEIGHTS) - 1])
def test_a_weight_file_that_was_cut_is_named(folder: Path, part: str, kept: int) -> None:
    (folder / f"{part}.safetensors").write_bytes(WEIGHTS[:kept])
    with pytest.raises(ModelError, match=rf"{part}\.safetensors cannot be read: ") as error:
        check_model(str(folder), 64)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model_index.json": {"_class_name": "FluxPipeline"}}, "must be 'QwenImagePipeline'"),
        ({"transformer/config.json": {}}, "has no field in_channels"),
        ({"transformer/config.json": {"in_channels": 20}}, "in_channels = 20"),
        ({"vae/config.json": [1]}, "must be a JSON object"),
    ],
)
def test_a_folder_of_something_else_is_refused(folder: Path, files: dict[str, object], message: str) -> None:
    make_folder(folder, files)
    with pytest.raises(ModelError, match=message):
        check_model(str(folder), 64)


def test_broken_json_names_the_file(folder: Path) -> None:
    (folder / "vae/config.json").write_text("{")
    with pytest.raises(ModelError, match=r"vae/config\.json cannot be read"):
        check_model(str(folder), 64)


@pytest.mark.parametrize("resolution", [60, 4, -8])
def test_a_resolution_that_does_not_divide_names_the_divisor(folder: Path, resolution: int) -> None:
    with pytest.raises(
        ModelError, match=rf"resolution = {resolution}: must be a positive multiple of 8 \(VAE 4 x patch 2\)"
    ):
        check_model(str(folder), resolution)


@pytest.mark.parametrize("model", ["", "no-such-model", "/no/such/folder", "a b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused_without_the_network(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="must be 'tiny', a folder, or a hub id"):
        check_model(model, 64)
    with pytest.raises(ModelError, match="must be 'tiny', a folder, or a hub id"):
        model_folder(model)


def test_the_digest_follows_configuration_and_weights_but_not_the_path(folder: Path, tmp_path: Path) -> None:
    first = check_model(str(folder), 64).digest
    assert check_model(str(make_folder(tmp_path / "copy", FILES)), 64).digest == first
    (folder / "text_encoder/model.safetensors").write_bytes(save({"weight": np.ones(16, np.float32)}))
    second = check_model(str(folder), 64).digest
    (folder / "tokenizer/tokenizer.json").write_text('{"a": 1}')
    assert len({first, second, check_model(str(folder), 64).digest}) == 3


def test_embedding_keys_differ_by_model_and_prompt_and_are_safe_paths() -> None:
    keys = {embedding_key(digest, prompt) for digest in ("a" * 64, "b" * 64) for prompt in ("x", "../y", "é\n")}
    assert len(keys) == 6
    assert all(key.isascii() and ".." not in key for key in keys)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached from here: LocalEntryNotFoundError"),
        (httpx.ConnectTimeout("late"), "the hub cannot be reached from here: ConnectTimeout"),
        (RepositoryNotFoundError("gone", response=Mock()), "the hub does not give it: RepositoryNotFoundError"),
    ],
)
def test_a_hub_that_is_away_and_a_model_that_is_not_there_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=rf"^model = 'a/b': no such folder, and {line}$"):
        model_folder("a/b")
