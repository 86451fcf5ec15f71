"""GenEval's world of photographs: its classes and colours, training prompts over them, and which prompts are only for evaluation.

Owns names, prompts and the split. Never looks at an image: `engines.photographs` does.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Final

from spot_runtime.errors import InputError
from spot_runtime.rewards.prompts import (
    COUNT_WORDS,
    RELATIONS,
    SPLITS,
    GenevalObject,
    GenevalRow,
    Position,
    Split,
    split_of,
)

_CLASSES: Final = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop "
    "sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, "
    "umbrella, handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball "
    "glove, skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, "
    "apple, sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, "
    "dining table, toilet, tv, laptop, computer mouse, tv remote, computer keyboard, cell phone, microwave, "
    "oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush"
)
CLASSES: Final = tuple(_CLASSES.split(", "))
"""The 80 classes of COCO in its order, by the names that GenEval gives them."""
COLORS: Final = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COUNTED_NEVER: Final = frozenset({"skis", "scissors"})
COLOURED_NEVER: Final = frozenset({"person"})

MIX: Final[Mapping[str, int]] = MappingProxyType(
    {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
)
"""Relative weight of each tag, as Flow-GRPO trains (arXiv 2505.05470). All single objects are evaluation prompts."""
ROWS_MAX: Final = 10_000
MISSES_MAX: Final = 2_000
"""So many draws in a row without a new prompt, and a tag has run out."""


def coco_rows(seed: int, n: int, split: Split) -> tuple[GenevalRow, ...]:
    """`n` rows with `n` different prompts in GenEval's words, none of them one of its evaluation prompts.

    Equal arguments give equal rows, and no prompt of one split is ever in the other. Raises InputError: n outside 1..ROWS_MAX or an
    unknown split.
    """
    if not 1 <= n <= ROWS_MAX:
        raise InputError(f"n = {n}: must be between 1 and {ROWS_MAX}")
    if split not in SPLITS:
        raise InputError(f"split = {split!r}: must be one of {', '.join(SPLITS)}")
    rng = random.Random(f"coco/{seed}/{split}")
    weights = dict(MIX)
    rows: dict[str, GenevalRow] = {}
    while len(rows) < n:  # ends: positions alone are more than ROWS_MAX in either split
        (tag,) = rng.choices(list(weights), list(weights.values()))
        row = _new_row(tag, split, rng, rows)
        if row is None:
            del weights[tag]
        else:
            rows[row.prompt] = row
    return tuple(rows.values())


def _new_row(tag: str, split: Split, rng: random.Random, known: Container[str]) -> GenevalRow | None:
    """None where the tag has run out."""
    for _ in range(MISSES_MAX):
        row = _draw(tag, rng)
        if row.prompt not in known and split_of(row.prompt) == split and not _is_evaluated(row):
            return row
    return None


def _is_evaluated(row: GenevalRow) -> bool:
    """Also where the evaluation names the same two things the other way round."""
    if row.tag in ("two_object", "color_attr") and is_evaluation_prompt(_row(row.tag, row.include[::-1]).prompt):
        return True
    return is_evaluation_prompt(row.prompt)


def _draw(tag: str, rng: random.Random) -> GenevalRow:
    match tag:
        case "counting":
            return _counting(rng.choice(_without(COUNTED_NEVER)), rng.randint(2, 4))
        case "colors":
            return _row(tag, (_thing(rng.choice(_without(COLOURED_NEVER)), rng.choice(COLORS)),))
        case "color_attr":
            names, colors = rng.sample(_without(COLOURED_NEVER), 2), rng.sample(COLORS, 2)
            return _row(tag, tuple(map(_thing, names, colors)))
        case "two_object":
            return _row(tag, tuple(map(_thing, rng.sample(CLASSES, 2))))
        case "position":
            target, name = rng.sample(CLASSES, 2)
            relation = rng.choice(RELATIONS)
            placed = GenevalObject(class_name=name, count=1, position=Position(relation, 0))
            phrase = f"{_noun(placed)} {relation} {_noun(_thing(target))}"
            return GenevalRow(tag=tag, include=(_thing(target), placed), prompt=f"a photo of {phrase}")
    raise AssertionError(tag)


def _counting(name: str, count: int) -> GenevalRow:
    """GenEval's plural: an s, or es after an s, also where English has another."""
    plural = f"{name}es" if name.endswith("s") else f"{name}s"
    return GenevalRow(
        tag="counting",
        include=(GenevalObject(class_name=name, count=count),),
        exclude=(GenevalObject(class_name=name, count=count + 1),),
        prompt=f"a photo of {COUNT_WORDS[count]} {plural}",
    )


def _row(tag: str, things: tuple[GenevalObject, ...]) -> GenevalRow:
    return GenevalRow(tag=tag, include=things, prompt=f"a photo of {' and '.join(map(_noun, things))}")


def _thing(name: str, color: str | None = None) -> GenevalObject:
    return GenevalObject(class_name=name, count=1, color=color)


def _noun(thing: GenevalObject) -> str:
    words = f"{thing.color} {thing.class_name}" if thing.color else thing.class_name
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _without(names: frozenset[str]) -> list[str]:
    return [name for name in CLASSES if name not in names]


def check_coco(row: GenevalRow) -> None:
    """Raises InputError for a class or a colour that GenEval does not have."""
    for clause in (*row.include, *row.exclude):
        if clause.class_name not in CLASSES:
            raise InputError(f"class = {clause.class_name!r}: must be one of the 80 COCO classes, by GenEval's names")
        if clause.color not in (None, *COLORS):
            raise InputError(f"color = {clause.color!r}: must be one of {', '.join(COLORS)}")


# ---- the 553 evaluation prompts ---------------------------------------------------------------------------------------------------


def is_evaluation_prompt(prompt: str) -> bool:
    """Whether a prompt is one of GenEval's 553, case and blanks aside, which are only ever for validation.

    Of others, one in 7.8 million is taken for one.
    """
    return _mark(" ".join(prompt.lower().split())) in _EVALUATION


def _mark(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode()).digest()[:_MARK_BYTES]


_MARK_BYTES: Final = 4
_MARKS: Final = base64.b85decode(
    "09@QK0FOK10Y|`v0dnX70vhil0}_1i1b4rV1fzs<1y;pb1#G*X1;M*21|6YH21=O|2A#0j2EXE42S0Cq2WY-"
    "S2a`IT2eL492g06M2oL_I2+)2%322lR34zd(3Q72r3S|)03($VU3+tip4az9v4hQM;4-"
    "8=~4>t%}4}1O6513Y}5Fto+5F+}G5Q>d^5T0E^5d`jK5ge8>5vc3u5({E$5;=H563%2v6G^*n6Q`O26n2I(6>=EN6@(P~6}J9N7J"
    "I9O7goAy7hKs#7nAD17!=Hr7^wqT7_ZEh8E1o%8E9`_8FxeH8pLDm8s5J}9QC*%9dpKO9p4U6A9!JEAFQE6A>uJ!Bb(#-"
    "B!?SEC2#TYC2)F#C9bobCC0_SCK8^hCg(7sD2VV@D4EelD6XQHDK&qSDLdpYDZLiKDdjnfDjGSZD%3r>D@0B=EIwe>EO#3qEbcLS"
    "FH~|yFel@SFrGQDF_x|lG4IXWG4poZG7Rf`GP5a)GQvCbGd`2uGhkO$GjdUpGsPRzG}^ExHEt~hHL;vOH!X^_H(foYI5uL(IR05H"
    "IWOGXIjq^6IqHN8Iz_5`I-mh1J9KC1JCO7%JK3NaJp|BnJ$Tv0J$VEaJ`gsXJ~du4K0HHrKHs!$KaboSKg;u-"
    "KpD#;Ku0V@K*`yzLI<fyLK#E-"
    "LTy1PLZVF{Lf3v?Lt}t?L%A{oL>`sDL|gpCMBm_xMM^B(Mge8`MuDC_M$^RyM^sz_M}^97NJhtVNKgm}NqfQqNz%JuN%g0zN|rgg"
    "O2<0SO5Cg=OBH2PONIGdOu@AoOw`cIPC0>)PJ(dEPTJ?~PmwS+P^cC_P`kHQQKD4xQWxUEQe6maQwRmeRG<l3RNF#dRQ}?mRa$>d"
    "Rb7IwRmA<-"
    "RuEibR`<elS7S_|SA|(4SEQMvSIRMhSQ_vTScm3!Si<rUSjHEHSnMAwSu1NBTU#e^TX>W}Tbp>UTvv0{T&>3fU5iL=UB~{?UJ=$&"
    "UP}cvUWmOVUkal1U^fi~U{`gxVR@}vVUo!`Vq5v(Vq#cwV*61mV>E5~V`-"
    "A=W10UxWDJ7zWi9*XWlo3hWoobzWwrL&W&9HzW`xOiW~7v*X8CjgXGGGhXI7u4XaodTXmrE7Xzy|nYAvf3YlEnhYpau!Y%YqxY|*"
    ")?Y~4*JZ5g!pZPP%PZVLuzZavP1ZmyWbZ)ISuZ<impaGHs8aJTyeas2$Xayrzpa%i!0a|v>PbEs;xbYZ?Dbwqlfb*v1CcE4W=cLl"
    "brcYDc)cf7Lqcs3m0cv`2cd8M@=dF={Fdd=1CdhrS}divN2d)%Oud|Sf#e5;GgeU{lOeYARAeo_y~e%jw*e%%?Ve;-"
    "R*e<AKLe~`0wfA@7%fU=Q{fV<R8fZQ^Gfa?Dufrn=9f&9)Qg79?OgC0|JgEmgAgrJLOgvn*lg=8I6hW%s|h%v^(iBmAyiP59@iRa"
    "wric$=tie^tYimc->iu-L_i|;pWj2Q9dj6w`GjAV%OjMI~%jP7-"
    "Tjh#jMjkG<SjtUNlk7{$LkC&KvkGx3%kI_5&kMyBSkam8PkrIr+kwyUlkw;_Qk<%CFk|W6ck}rfJlR&;<ln=iZl>B>&m5X4LmExb"
    "Pma`t_moreymq-bDm|IgJn9)%=naR2Dnnoh3n)x*an{pd4n~Cfdo0o>+o5S`<oHIz?oINtAoN3=*ob8A<ocyjJopo54o=I#Ro}|S"
    "kp4@ispFZ?tpKcq4pQG4SpT#MFpj;_OpthcaqCIl{qJTl>qWICBqmHSzqr2cnq%K3)rI`1-rPducrUCI>rX+G4rkI-(r&+k*r-"
    "<r*r=|lFs7Hb6s8B%0sB_vAsI%;RsS74esXFt!sXf1*skTJJs$OdPs}0Lvt321Gtg;5tt-"
    "@Cft<LL#t>`w7uFC4`ud5BEuh+7Cuk=b7um!kAu_dwmv26@&vS-(AvU!kTvZG46vb-"
    "10v$%K9v*P?>v;Ywtv}Pn{wK~(ywO(^hwct8Swp!YSwyK4#w$lP<w|H6vx7R~ExCd4?xP=p8xnWvsxo{~7xp1mOx=nA0x_K)<y7`"
    "F?ySt<gyc&z5yc`Hoyp#2~yy&Wuy)0SszbmiFzxKVnz*hWxz;9q+!2=;l!B4Tx!fL&H!jBwu#61pa#B-;N#L}-"
    "q#N3Z_#Vm%}#gtS%#r!9k#^%p6$0fTy$4WHc$K<!>$w+UE$)#HD$=+BE$|IcP%N+WY%PC#x%dUS<%ek_}%o<#m%t#ie%vm3<%(nh"
    "*%;4R{%;Vb5&pnVB&##1D&=_G9&~p??&~q@4(Baq+(J#-"
    "i(SxSX(eJEt(p2<N(u9HZ(w$>5(%NQ2(<;{g(~Fdo)0F!w)3mW})Ui?()rlpP)x1Rs)&8?U*9gjY*D7tx*KMJ)*N8c9*^Igv+0u+"
    "!+1L5)+2F#W+FKX7+Xf-L+jv?$+v?$D+$>wb-G)Dy-Kcbg-Kri$-N7Y8-NHV)-r%&q-(0{n->(d--^cZZ;4aUK;K-"
    "KY;k{iY;%E0?;%>&W<1J|V<H{2y<Q1{)<bIC&<fk-I=3z#x=Ie}E=KRV7=PCA{=P-Ob=SqRN=Th%l=Z^=g=zCZ<=}ayM>Czd-"
    ">RN3K>f%Zb>ltbw>l<l+>%>*h>?Wu6>?X*N?2Ipj?84&2?EpLe?JbPN?yek}?`{y9?~yA}@23GB@6CF<@DNAr@Fhl8@nVNq@tzkv"
    "^TMFR^Wfb~^XywZ^q~M|^(BCj^-ld?^=$BM_2w<x_3rYk_5P!4_E`od_Q7*&_WyMs_jiYd_o?U<_-"
    ")d(_<!ZG__N8q_{5_(`2C}<`BCd;`eGh+`>b7o``?>n{Gl(2{QF(o{u9&*{%$pY{|%KJ|0D{Z"
)
"""The first bytes of the SHA-256 of each evaluation prompt, ascending (djghosh13/geneval, evaluation_metadata.jsonl)."""
_EVALUATION: Final = frozenset(_MARKS[start : start + _MARK_BYTES] for start in range(0, len(_MARKS), _MARK_BYTES))
