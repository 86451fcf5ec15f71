"""Prompt rows: GenEval's format, its bounds, one clear line for a broken one, and the generators' promises."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from spot_runtime.errors import InputError
from spot_runtime.rewards.prompts import (
    MIX,
    PROMPTS_BYTES_MAX,
    RELATIONS,
    TEXT_CHARACTERS,
    GenevalObject,
    GenevalRow,
    Position,
    parse_row,
    prompt_id,
    quoted_text,
    read_rows,
    read_texts,
    reward_of,
    row_json,
    shapes_rows,
    split_of,
    text_rows,
)
from spot_runtime.rewards.world import PALETTE, SHAPES

POSITION_LINE = (
    '{"tag": "position", "include": [{"class": "teddy bear", "count": 1}, '
    '{"class": "dog", "count": 1, "position": ["right of", 0]}], "prompt": "a photo of a dog right of a teddy bear"}'
)
COUNTING_LINE = (
    '{"tag": "counting", "include": [{"class": "clock", "count": 2}], "exclude": [{"class": "clock", "count": 3}], '
    '"prompt": "a photo of two clocks"}'
)
TEDDY_BEAR = GenevalObject(class_name="teddy bear", count=1)
DOG = GenevalObject(class_name="dog", count=1, position=Position("right of", 0))


def test_a_line_of_genevals_file_becomes_a_row() -> None:
    assert parse_row(POSITION_LINE) == GenevalRow(
        tag="position", include=(TEDDY_BEAR, DOG), prompt="a photo of a dog right of a teddy bear"
    )
    assert parse_row(COUNTING_LINE).exclude == (GenevalObject(class_name="clock", count=3),)


def test_a_row_survives_its_own_json() -> None:
    for line in (POSITION_LINE, COUNTING_LINE):
        assert json.loads(row_json(parse_row(line))) == json.loads(line)


def test_unknown_keys_are_ignored_and_do_not_change_the_id() -> None:
    line = json.loads(COUNTING_LINE) | {"source": "mine"}
    assert prompt_id(parse_row(json.dumps(line))) == prompt_id(parse_row(COUNTING_LINE))


def test_the_id_is_stable_across_releases() -> None:
    assert prompt_id(parse_row(COUNTING_LINE)) == "63512e24c026e30a"
    assert prompt_id(parse_row(POSITION_LINE)) != prompt_id(parse_row(COUNTING_LINE))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"tag": "colors"', "truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ('{"tag": "colors", "prompt": "p"}', "missing required field `include`"),
        ('{"tag": "colors", "include": [], "prompt": "p"}', "must have at least 1 object"),
        ('{"tag": "colors", "include": [{"class": "a", "count": 1}], "prompt": ""}', "$.prompt"),
        ('{"tag": "colors", "include": [{"class": "a", "count": 0}], "prompt": "p"}', "$.include[0].count`, is 0"),
        ('{"tag": "colors", "include": [{"class": "a", "count": 17}], "prompt": "p"}', "count = 17: must be <= 16"),
        (
            '{"tag": "colors", "include": [{"class": "a", "count": true}], "prompt": "p"}',
            "$.include[0].count`, is true",
        ),
        (POSITION_LINE.replace("right of", "behind", 1), "Invalid enum value 'behind'"),
        (POSITION_LINE.replace(", 0]", ", 1]"), "position index = 1: must be < 1"),
        (POSITION_LINE.replace(", 0]", ", -1]"), "$.include[1].position[1]`, is -1"),
        ('{"tag": "text", "include": [], "prompt": "no quotes"}', "must quote a text"),
        ("[" * 100_000, "not a GenEval row"),
    ],
)
def test_a_broken_line_says_what_is_wrong(line: str, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_row(line)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_line_in_a_file_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{POSITION_LINE}\n\n{COUNTING_LINE}\n{COUNTING_LINE[:-1]}\n")
    with pytest.raises(InputError, match=r"mine\.jsonl line 4: not a GenEval row: Input data was truncated"):
        read_rows(str(path))


def test_a_file_of_texts_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b'\xef\xbb\xbfA neon sign "OPEN" at night\r\n\n  a cup with "Two Words", "and more"\n')
    rows = read_texts(str(path))
    assert [row.prompt for row in rows] == ['A neon sign "OPEN" at night', 'a cup with "Two Words", "and more"']
    assert [quoted_text(row.prompt) for row in rows] == ["OPEN", "Two Words"]
    assert {row.tag for row in rows} == {"text"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"a sign without a text", "must quote a text in"),
        (b'a sign with "one quote', "must quote a text in"),
        (b'a blank sign " "', "must quote a text in"),
        (b'an empty "" and "FOO"', "must quote a text in"),
        (b'{"tag": "text", "include": [], "prompt": "A"}', r"prompt is JSON: a file of rows must be called \.jsonl"),
        (b'\xff\xfe "A"', "not UTF-8"),
        (b'"A" ' + b"x" * 5000, "\\$.prompt"),
    ],
)
def test_a_broken_line_of_texts_is_named_by_file_and_number(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b'a sign "A"\n' + line + b"\n")
    with pytest.raises(InputError, match=rf"texts\.txt line 2: .*{fault}"):
        read_texts(str(path))


def test_a_row_names_its_reward_or_leaves_it_to_its_tag() -> None:
    text = GenevalRow(tag="text", include=(), prompt='"A"')
    named = GenevalRow(tag="text", include=(), prompt='"A"', reward="jpeg")
    assert [reward_of(row) for row in (parse_row(COUNTING_LINE), text, named)] == ["geneval", "deepseek_ocr", "jpeg"]
    assert [reward_of(row_json(row)) for row in (parse_row(COUNTING_LINE), text, named)] == [
        "geneval",
        "deepseek_ocr",
        "jpeg",
    ]
    assert parse_row(row_json(named)) == named
    assert reward_of("{") == "geneval"


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(COUNTING_LINE.replace("photo", "ph\xf6to").encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.jsonl line 1"):
        read_rows(str(path))


def test_rows_are_read_in_order_over_any_line_ending(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{POSITION_LINE}\r\n{COUNTING_LINE}\r\n".encode())
    assert [row.tag for row in read_rows(path.as_uri())] == ["position", "counting"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"empty\.jsonl: has no rows, must have at least 1"):
        read_rows(str(path))


@pytest.mark.parametrize("url", ["/no/such/file.jsonl", "nosuch://bucket/rows.jsonl"])
def test_an_unreadable_url_is_named(url: str) -> None:
    with pytest.raises(InputError, match=f"prompts = {url}: cannot be read"):
        read_rows(url)


def test_a_file_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate(PROMPTS_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"must be <= {PROMPTS_BYTES_MAX} bytes"):
        read_rows(str(path))


# ---- the shapes world -------------------------------------------------------------------------------------------------------------


def test_the_generator_is_reproducible_and_a_smaller_draw_is_a_prefix() -> None:
    rows = shapes_rows(7, 200, "train")
    assert rows == shapes_rows(7, 200, "train")
    assert rows[:50] == shapes_rows(7, 50, "train")
    assert rows != shapes_rows(8, 200, "train")


def test_all_prompts_of_a_draw_differ() -> None:
    rows = shapes_rows(0, 1200, "train")
    assert len({row.prompt for row in rows}) == len({prompt_id(row) for row in rows}) == 1200


def test_the_splits_share_no_prompt_whatever_the_seed() -> None:
    train = {row.prompt for seed in range(3) for row in shapes_rows(seed, 1000, "train")}
    validation = {row.prompt for seed in range(3) for row in shapes_rows(seed, 600, "validation")}
    assert not train & validation
    assert {split_of(prompt) for prompt in validation} == {"validation"}


@pytest.mark.parametrize("kind", MIX)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_kind_has_rows_in_both_splits_and_survives_its_json(kind: str, split: str) -> None:
    (row,) = shapes_rows(0, 1, split, {kind: 1.0})
    assert row.tag == {"counting_many": "counting"}.get(kind, kind)
    assert parse_row(row_json(row)) == row


def test_every_object_is_of_the_shapes_world_and_is_named_with_its_colour() -> None:
    for row in shapes_rows(1, 500, "train"):
        for clause in row.include:
            assert clause.class_name in SHAPES
            assert clause.color in PALETTE
            assert f"{clause.color} {clause.class_name}" in row.prompt
        assert len({clause.class_name for clause in row.include}) == len(row.include)


def test_the_wording_is_genevals() -> None:
    prompts = {row.prompt: row for kind in MIX if kind != "two_relations" for row in _all_rows(kind)}
    assert prompts["a photo of a red circle"].tag == "colors"
    assert prompts["a photo of a black circle"].tag == "single_object"
    assert prompts["a photo of six red crosses"].include[0].count == 6
    assert prompts["a photo of one blue square"].exclude == (GenevalObject(class_name="square", count=2),)
    assert prompts["a photo of a red circle and a red square"].tag == "two_object"
    assert prompts["a photo of a red circle and a blue square"].tag == "color_attr"
    assert prompts["a photo of a red circle left of a blue square"].include == (
        GenevalObject(class_name="square", count=1, color="blue"),
        GenevalObject(class_name="circle", count=1, color="red", position=Position("left of", 0)),
    )


def _all_rows(kind: str) -> tuple[GenevalRow, ...]:
    rows: tuple[GenevalRow, ...] = ()
    for split in ("train", "validation"):
        with pytest.raises(InputError) as caught:
            shapes_rows(0, 10**6, split, {kind: 1.0})
        available = int(str(caught.value).split("must be <= ")[1].split(",")[0])
        rows += shapes_rows(0, available, split, {kind: 1.0})
    return rows


def test_two_relations_make_a_chain_whose_last_object_is_named_first() -> None:
    for row in shapes_rows(2, 50, "train", {"two_relations": 1.0}):
        first, second, third = (f"a {clause.color} {clause.class_name}" for clause in row.include)
        _, near, far = (clause.position for clause in row.include)
        assert (near.index, far.index) == (0, 1)
        assert row.prompt == f"a photo of {third} {far.relation} {second} {near.relation} {first}"


def test_chains_turn_so_that_their_ends_never_meet() -> None:
    horizontal = RELATIONS[:2]
    for row in shapes_rows(2, 100, "train", {"two_relations": 1.0}):
        first, second = (clause.position.relation in horizontal for clause in row.include[1:] if clause.position)
        assert first != second


def test_the_mix_follows_the_weights_until_a_kind_runs_out() -> None:
    rows = shapes_rows(3, 1000, "train", {"position": 3.0, "two_relations": 1.0, "single_object": 0.5})
    tags = Counter(row.tag for row in rows)
    assert tags["single_object"] == 3
    assert 0.7 < tags["position"] / 1000 < 0.8


def test_counts_of_the_default_mix_reach_six() -> None:
    counts = Counter(row.include[0].count for row in shapes_rows(0, 300, "train") if row.tag == "counting")
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    assert sum(counts[n] for n in (4, 5, 6)) > sum(counts[n] for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("n", "split", "weights", "fault"),
    [
        (0, "train", MIX, "n = 0: must be >= 1"),
        (1, "test", MIX, "split = 'test': must be one of train, validation"),
        (1, "train", {"shapes": 1.0}, "unknown kind 'shapes'"),
        (1, "train", {"position": -1.0}, r"weights\.position = -1\.0: must be >= 0"),
        (1, "train", {"position": float("nan")}, r"weights\.position = nan"),
        (1, "train", {"position": 0.0}, "at least one must be > 0"),
        (4, "train", {"single_object": 1.0}, "n = 4: must be <= 3, all different train prompts"),
    ],
)
def test_a_draw_that_cannot_be_made_is_one_line(n: int, split: str, weights: dict[str, float], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        shapes_rows(0, n, split, weights)  # type: ignore[arg-type]


# ---- short texts ------------------------------------------------------------------------------------------------------------------


def test_text_rows_quote_short_texts_of_every_length() -> None:
    texts = [quoted_text(row.prompt) for row in text_rows(0, 200, "train")]
    assert {len(text) for text in texts} == {1, 2, 3, 4}
    assert set("".join(texts)) <= set(TEXT_CHARACTERS)
    assert len(set(texts)) == 200


def test_text_rows_are_reproducible_split_and_survive_their_json() -> None:
    train, validation = text_rows(4, 300, "train"), text_rows(4, 300, "validation")
    assert train[:10] == text_rows(4, 10, "train")
    assert not {row.prompt for row in train} & {row.prompt for row in validation}
    assert parse_row(row_json(train[0])) == train[0]


@pytest.mark.parametrize(
    ("prompt", "text"), [('a "b" and "c"', "b"), ('an open " quote', ""), ('""', ""), ('a "" and "FOO"', ""), ("x", "")]
)
def test_the_first_quoted_text_is_the_target(prompt: str, text: str) -> None:
    assert quoted_text(prompt) == text
