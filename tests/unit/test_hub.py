"""Hub ids: what is cached is taken, and each way of not getting the rest is one line of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from spot_runtime.errors import InputError
from spot_runtime.hub import HubError, is_hub_id, require_weights
from spot_runtime.rewards.catalog import check_reward


class OtherHttpLibraryError(Exception):
    """What a version of the hub's client passes on that this package has never heard of."""


def hub(monkeypatch: pytest.MonkeyPatch, *, cached: Path | None = None, files: list[str] | Exception) -> list[str]:
    """A hub and a local cache; returns the questions that reached the hub."""
    asked: list[str] = []

    def model_info(_: object, model: str, *, timeout: float) -> SimpleNamespace:
        assert 0 < timeout <= 60
        asked.append(model)
        if isinstance(files, Exception):
            raise files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

    def snapshot_download(model: str, **options: object) -> str:
        assert options["local_files_only"], "nothing may be fetched"
        if cached is None:
            raise LocalEntryNotFoundError(model)
        return str(cached)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize("name", ["a", "a/b/c", "/a/b", "a/../b", "", "./a"])
def test_paths_are_no_hub_ids(name: str) -> None:
    assert not is_hub_id(name)


def test_cached_weights_are_enough_and_the_hub_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").touch()
    asked = hub(monkeypatch, cached=tmp_path, files=OtherHttpLibraryError())
    require_weights("a/b")
    assert asked == []


def test_a_cached_config_without_weights_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    asked = hub(monkeypatch, cached=tmp_path, files=["config.json", "pytorch_model.bin"])
    require_weights("a/b")
    assert asked == ["a/b"]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (OtherHttpLibraryError(), "the hub cannot be reached from here: OtherHttpLibraryError"),
        (ConnectionError(), "the hub cannot be reached from here: ConnectionError"),
        (RepositoryNotFoundError("", response=Mock()), "the hub does not give it: RepositoryNotFoundError"),
        (["README.md"], "the hub has no weights of that name"),
    ],
)
def test_weights_that_are_not_to_be_had_are_refused_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, files: list[str] | Exception, line: str
) -> None:
    hub(monkeypatch, files=files)
    with pytest.raises(HubError, match=f"^{line}$"):
        require_weights("a/b")
    monkeypatch.setenv("SPOTLIGHT_CLIP", "a/b")
    with pytest.raises(InputError) as caught:
        check_reward("clip-score")
    assert (
        str(caught.value) == f"SPOTLIGHT_CLIP = 'a/b': is not cached here, and {line}: fetch it first, or name a folder"
    )
