import pytest

from spot_runtime.errors import StoreError
from spot_runtime.store.keys import blob_name, check_key, check_prefix, in_folder, key_of


@pytest.mark.parametrize(
    "key", ["a", "runs/run-1/it.0003/sample_7", "A=b+c,d@e", "x" * 128, "/".join(["x" * 127] * 4), "7", "a..b"]
)
def test_a_plain_key_is_accepted_and_found_again_in_its_blob_name(key):
    assert check_key(key) == key
    assert key_of(blob_name(key)) == key


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("", "must not be empty"),
        ("..", "component '..'"),
        ("a/../b", "component '..'"),
        ("a/./b", "component '.'"),
        ("/a", "component ''"),
        ("a/", "component ''"),
        ("a//b", "component ''"),
        (".tmp/a", "component '.tmp'"),
        ("a/.parts", "component '.parts'"),
        ("-rf", "component '-rf'"),
        ("a b", "component 'a b'"),
        ("a\n", r"component 'a\n'"),
        ("a\x00b", r"component 'a\x00b'"),
        ("naïve", "component 'naïve'"),
        ("a*", "component 'a*'"),
        ("a?b", "component 'a?b'"),
        ("~root", "component '~root'"),
        ("a\\b", "component"),
        ("a:b", "component 'a:b'"),
        ("x" * 129, "129 characters, must be <= 128"),
        ("/".join(["x" * 100] * 6), "605 characters, must be <= 512"),
        ("a/b.obj", "must not end in .obj"),
        ("a.obj/b", "must not end in .obj"),
    ],
)
def test_a_key_that_could_surprise_is_refused_by_name(key, complaint):
    with pytest.raises(StoreError) as caught:
        check_key(key)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prefix_is_a_folder_and_never_half_a_name():
    assert check_prefix("") == ""
    assert check_prefix("runs/a/") == "runs/a"
    assert in_folder("runs/a/b", "runs/a")
    assert in_folder("runs/a", "runs/a")
    assert not in_folder("runs/ab", "runs/a")
    assert in_folder("anything", "")
    with pytest.raises(StoreError, match="component ''"):
        check_prefix("runs//")


def test_blobs_of_other_kinds_have_no_key():
    assert key_of(".parts/a/0123456789abcdef/000000") is None
    assert key_of(".tmp/7-abc.obj") is None
    assert key_of("a") is None
