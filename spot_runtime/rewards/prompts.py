"""Prompt rows in GenEval's jsonl format (arXiv 2310.11513): reading, and seeded generation over the shapes world and short texts.

Owns the row format, its bounds, prompt ids, which reward a row asks for, and the train/validation split. Never looks at an image and
never scores.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import permutations, product
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args

import fsspec
import msgspec

from spot_runtime.errors import InputError
from spot_runtime.rewards.world import PALETTE, SHAPES

Relation = Literal["left of", "right of", "above", "below"]
Split = Literal["train", "validation"]

RELATIONS: Final[tuple[Relation, ...]] = get_args(Relation)
OBJECTS_REWARD: Final = "geneval"
"""Judges rows that name no reward and ask for objects."""
TEXT_REWARD: Final = "deepseek_ocr"
"""Judges `text` rows that name no reward."""
REWARD_CHARACTERS_MAX: Final = 128
"""Length of a reward's name, in rows and messages."""
SPLITS: Final[tuple[Split, ...]] = get_args(Split)
OBJECTS_MAX: Final = 16
"""GenEval keeps at most 16 detections a class, so a larger count could never be reached."""
PROMPTS_BYTES_MAX: Final = 64 * 1024 * 1024
TEXT_ROWS_MAX: Final = 100_000
TEXT_CHARACTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
TEXT_LENGTH_MAX: Final = 4
VALIDATION_SHARE: Final = 0.25
"""Share of all prompt texts whose hash puts them into the validation split."""
SPLIT_SALT: Final = "split-165"
"""Chosen so that each kind has within 3 percentage points of this share, also the smallest (one of four single objects)."""

COLOURLESS: Final = "black"
"""single_object draws this one and colors all others, so that the two tags never share a prompt."""
COUNT_WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six")
PLURALS: Final[Mapping[str, str]] = MappingProxyType({"cross": "crosses"})

MIX: Final[Mapping[str, float]] = MappingProxyType(
    {
        "single_object": 1.0,
        "colors": 2.0,
        "counting": 3.0,
        "counting_many": 5.0,
        "two_object": 2.0,
        "color_attr": 2.0,
        "position": 4.0,
        "two_relations": 5.0,
    }
)
"""Relative weight of each kind of row. A kind is a tag, but counting is two: 1 to 3 objects, and `counting_many` 4 to 6."""

_PLACE: Final = re.compile(r"\.([^.`\[\]]+)|\[(\d+)\]")
SHOWN_MAX: Final = 60
"""Characters of a wrong value that an error shows."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Position(msgspec.Struct, frozen=True, array_like=True):
    """`[relation, index]`: where an object is, seen from the include clause with that index."""

    relation: Relation
    index: Annotated[int, msgspec.Meta(ge=0, lt=OBJECTS_MAX)]


class GenevalObject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One include or exclude clause: so many objects of a class, maybe of one colour, maybe placed relative to another clause."""

    class_name: Name = msgspec.field(name="class")
    count: Annotated[int, msgspec.Meta(ge=1, le=OBJECTS_MAX + 1)]
    color: Name | None = None
    position: Position | None = None


class GenevalRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt with the rule that judges it. A `text` row has no clauses: its target is the quoted part of the prompt.

    `reward` names who judges it; empty leaves that to the tag (see `reward_of`). Raises ValueError (on decoding msgspec.ValidationError)
    where the clauses contradict the format.
    """

    tag: Name
    include: Annotated[tuple[GenevalObject, ...], msgspec.Meta(max_length=OBJECTS_MAX)]
    exclude: Annotated[tuple[GenevalObject, ...], msgspec.Meta(max_length=OBJECTS_MAX)] = ()
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    reward: Annotated[str, msgspec.Meta(max_length=REWARD_CHARACTERS_MAX)] = ""

    def __post_init__(self) -> None:
        if self.tag == "text":
            if not quoted_text(self.prompt).strip():
                raise ValueError('prompt: a text row must quote a text in "double quotes"')
            return
        if not self.include:
            raise ValueError("include: must have at least 1 object")
        for index, clause in enumerate(self.include):
            _check_clause(index, clause)


def _check_clause(index: int, clause: GenevalObject) -> None:
    if clause.count > OBJECTS_MAX:
        raise ValueError(f"include[{index}].count = {clause.count}: must be <= {OBJECTS_MAX}")
    if clause.position is not None and clause.position.index >= index:
        raise ValueError(
            f"include[{index}].position index = {clause.position.index}: must be < {index}, an earlier include object"
        )


def quoted_text(prompt: str) -> str:
    """What is between the first two double quotes, or "" where there are none."""
    parts = prompt.split('"', 2)
    return parts[1] if len(parts) == 3 else ""


class _RewardHint(msgspec.Struct, frozen=True):
    tag: str = ""
    reward: str = ""


def reward_of(row: GenevalRow | str) -> str:
    """Name of the reward that judges a row, or a row's JSON: its own, else by its tag, so that datasets may be mixed in one batch.

    JSON that is no row gets the default: the service says what is wrong with it.
    """
    if isinstance(row, str):
        try:
            hint = msgspec.json.decode(row, type=_RewardHint)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return OBJECTS_REWARD
        return hint.reward or (TEXT_REWARD if hint.tag == "text" else OBJECTS_REWARD)
    return row.reward or (TEXT_REWARD if row.tag == "text" else OBJECTS_REWARD)


def row_json(row: GenevalRow) -> str:
    """Canonical JSON of a row: sorted keys, defaults left out."""
    return msgspec.json.encode(row, order="sorted").decode()


def prompt_id(row: GenevalRow) -> str:
    """Stable id of a row: 16 hex digits of the SHA-256 of its canonical JSON."""
    return hashlib.sha256(row_json(row).encode()).hexdigest()[:16]


def parse_row(text: str | bytes | msgspec.Raw) -> GenevalRow:
    """One JSON line as a row; unknown keys are ignored. Raises InputError that says what is wrong and where in the line."""
    try:
        return msgspec.json.decode(text, type=GenevalRow)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a GenEval row: {error}{_found(text, str(error))}") from error


def _found(text: str | bytes | msgspec.Raw, complaint: str) -> str:
    """What is there, where msgspec says where it should be something else: `Expected … - at `$.include[0].count`."""
    _, at, place = complaint.partition(" - at `$")
    if at:
        with suppress(msgspec.MsgspecError, LookupError, TypeError, UnicodeDecodeError):
            value = msgspec.json.decode(text)
            for name, index in _PLACE.findall(place):
                value = value[name] if name else value[int(index)]
            return f", is {msgspec.json.encode(value).decode()[:SHOWN_MAX]}"
    return ""


def read_rows(url: str) -> tuple[GenevalRow, ...]:
    """All rows of a GenEval jsonl file at an fsspec URL, in file order; blank lines are skipped.

    Raises InputError: unreadable or empty file, more than PROMPTS_BYTES_MAX bytes, or a broken line (names file, line and fault).
    """
    return _read_lines(url, parse_row)


def read_texts(url: str) -> tuple[GenevalRow, ...]:
    """All prompts of a text file at an fsspec URL as `text` rows: one a line, the text to draw in "double quotes", blank lines skipped.

    Raises InputError as `read_rows` does.
    """
    return _read_lines(url, _text_row)


def _read_lines(url: str, parse: Callable[[bytes], GenevalRow]) -> tuple[GenevalRow, ...]:
    rows = []
    for number, line in enumerate(_read_bytes(url).splitlines(), start=1):
        if line.strip():
            try:
                rows.append(parse(line))
            except InputError as error:
                raise InputError(f"{url} line {number}: {error}") from error
    if not rows:
        raise InputError(f"{url}: has no rows, must have at least 1")
    return tuple(rows)


def _text_row(line: bytes) -> GenevalRow:
    try:
        prompt = line.decode().strip()
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error}") from error
    if prompt.startswith("{"):
        raise InputError("prompt is JSON: a file of rows must be called .jsonl")
    if not quoted_text(prompt).strip():
        raise InputError('prompt must quote a text in "double quotes"')
    return parse_row(msgspec.json.encode({"tag": "text", "include": [], "prompt": prompt}))


def _read_bytes(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read(PROMPTS_BYTES_MAX + 1)
    except Exception as error:  # each fsspec backend raises classes of its own
        raise InputError(f"prompts = {url}: cannot be read: {type(error).__name__}: {error}") from error
    if len(data) > PROMPTS_BYTES_MAX:
        raise InputError(f"prompts = {url}: must be <= {PROMPTS_BYTES_MAX} bytes")
    return data.removeprefix(b"\xef\xbb\xbf")


# ---- the shapes world -------------------------------------------------------------------------------------------------------------


def shapes_rows(seed: int, n: int, split: Split, weights: Mapping[str, float] = MIX) -> tuple[GenevalRow, ...]:
    """`n` rows over the shapes world with `n` different prompts, drawn by kind with `weights` (see MIX).

    Equal arguments give equal rows, a smaller `n` gives their prefix, and no prompt of one split is ever in the other. A kind that has run
    out leaves the mix. Raises InputError: n < 1, an unknown split or kind, weights that are negative or all zero, or n beyond the world.
    """
    _check_draw(n, split)
    _check_weights(weights)
    rng = random.Random(f"shapes/{seed}/{split}")
    pools = {kind: _pool(kind, split, random.Random(f"{kind}/{seed}")) for kind in MIX if weights.get(kind, 0) > 0}
    rows: list[GenevalRow] = []
    while len(rows) < n:
        if not pools:
            raise InputError(f"n = {n}: must be <= {len(rows)}, all different {split} prompts of these kinds")
        kind = rng.choices(list(pools), [weights[kind] for kind in pools])[0]
        row = next(pools[kind], None)
        if row is None:
            del pools[kind]
        else:
            rows.append(row)
    return tuple(rows)


def split_of(prompt: str) -> Split:
    """The split that a prompt text belongs to, by its hash."""
    digest = hashlib.sha256(f"{SPLIT_SALT}/{prompt}".encode()).digest()
    return "validation" if int.from_bytes(digest[:4], "big") < VALIDATION_SHARE * 2**32 else "train"


def _check_draw(n: int, split: str) -> None:
    if n < 1:
        raise InputError(f"n = {n}: must be >= 1")
    if split not in SPLITS:
        raise InputError(f"split = {split!r}: must be one of {', '.join(SPLITS)}")


def _check_weights(weights: Mapping[str, float]) -> None:
    for kind, weight in weights.items():
        if kind not in MIX:
            raise InputError(f"weights: unknown kind {kind!r}: must be one of {', '.join(MIX)}")
        if not 0 <= weight < float("inf"):
            raise InputError(f"weights.{kind} = {weight}: must be >= 0 and finite")
    if not any(weights.values()):
        raise InputError("weights: at least one must be > 0")


def _pool(kind: str, split: Split, rng: random.Random) -> Iterator[GenevalRow]:
    """Every row of one kind and split once, in random order."""
    choices = list(_choices(kind))
    rng.shuffle(choices)
    rows = (_row(kind, choice) for choice in choices)
    return (row for row in rows if split_of(row.prompt) == split)


def _choices(kind: str) -> Iterator[tuple[Any, ...]]:
    """All that can differ between rows of one kind; `_row` turns each into a row. Objects of one row differ in class, as GenEval's do."""
    hues = [color for color in PALETTE if color != COLOURLESS]
    turns = [(a, b) for a, b in product(RELATIONS, RELATIONS) if _is_horizontal(a) != _is_horizontal(b)]
    match kind:
        case "single_object":
            return product(SHAPES, [COLOURLESS])
        case "colors":
            return product(SHAPES, hues)
        case "counting":
            return product(SHAPES, PALETTE, (1, 2, 3))
        case "counting_many":
            return product(SHAPES, PALETTE, (4, 5, 6))
        case "two_object":
            return product(permutations(SHAPES, 2), ((color, color) for color in PALETTE))
        case "color_attr":
            return product(permutations(SHAPES, 2), permutations(PALETTE, 2))
        case "position":
            return product(permutations(SHAPES, 2), permutations(PALETTE, 2), [(relation,) for relation in RELATIONS])
        case "two_relations":
            return product(permutations(SHAPES, 3), permutations(PALETTE, 3), turns)
    raise AssertionError(kind)


def _is_horizontal(relation: Relation) -> bool:
    return relation in ("left of", "right of")


def _row(kind: str, choice: tuple[Any, ...]) -> GenevalRow:
    if kind in ("single_object", "colors"):
        shape, color = choice
        return _row_of(kind, (_object(shape, color),), f"a {color} {shape}")
    if kind in ("counting", "counting_many"):
        return _counting_row(*choice)
    if kind in ("two_object", "color_attr"):
        shapes, colors = choice
        objects = tuple(map(_object, shapes, colors))
        return _row_of(kind, objects, " and ".join(map(_noun, objects)))
    return _relations_row(kind, *choice)


def _counting_row(shape: str, color: str, count: int) -> GenevalRow:
    include = GenevalObject(class_name=shape, count=count, color=color)
    exclude = GenevalObject(class_name=shape, count=count + 1)
    noun = shape if count == 1 else PLURALS.get(shape, f"{shape}s")
    prompt = f"a photo of {COUNT_WORDS[count]} {color} {noun}"
    return GenevalRow(tag="counting", include=(include,), exclude=(exclude,), prompt=prompt)


def _relations_row(
    tag: str, shapes: tuple[str, ...], colors: tuple[str, ...], relations: tuple[Relation, ...]
) -> GenevalRow:
    """A chain: each object is placed relative to the one before it; the prompt, like GenEval's, names the last one first."""
    positions = [None, *(Position(relation, index) for index, relation in enumerate(relations))]
    objects = tuple(map(_object, shapes, colors, positions))
    phrase = _noun(objects[0])
    for item, relation in zip(objects[1:], relations, strict=True):
        phrase = f"{_noun(item)} {relation} {phrase}"
    return _row_of(tag, objects, phrase)


def _row_of(tag: str, objects: tuple[GenevalObject, ...], phrase: str) -> GenevalRow:
    return GenevalRow(tag=tag, include=objects, prompt=f"a photo of {phrase}")


def _object(shape: str, color: str, position: Position | None = None) -> GenevalObject:
    return GenevalObject(class_name=shape, count=1, color=color, position=position)


def _noun(item: GenevalObject) -> str:
    return f"a {item.color} {item.class_name}"


# ---- short texts ------------------------------------------------------------------------------------------------------------------


def text_rows(seed: int, n: int, split: Split) -> tuple[GenevalRow, ...]:
    """`n` rows with `n` different texts of 1 to 4 characters, lengths uniform as long as there are texts of that length.

    Same promises as `shapes_rows`. Raises InputError: n outside 1..TEXT_ROWS_MAX or an unknown split.
    """
    _check_draw(n, split)
    if n > TEXT_ROWS_MAX:
        raise InputError(f"n = {n}: must be <= {TEXT_ROWS_MAX}")
    rng = random.Random(f"text/{seed}/{split}")
    prompts: dict[str, None] = {}
    while len(prompts) < n:  # ends: four characters alone make over a million texts
        text = "".join(rng.choices(TEXT_CHARACTERS, k=rng.randint(1, TEXT_LENGTH_MAX)))
        prompt = f'a photo of the text "{text}"'
        if split_of(prompt) == split:
            prompts.setdefault(prompt)
    return tuple(GenevalRow(tag="text", include=(), prompt=prompt) for prompt in prompts)
