"""Spellings of one class."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from task.data.class_names import choose_spellings, class_ids, find_same_class, normal_form, require_printable
from task.keys import ConfigError


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ("Cat", "cat", True),
        ("cat ", "cat", True),
        ("basal cell", "Basal_cell", True),
        ("basal-cell", "basalcell", True),
        ("Straße", "STRASSE", True),
        ("e\u0301tat", "\u00c9TAT", True),
        ("HER2-", "her2", True),
        ("1.5", "15", True),
        ("HER2+", "HER2-", False),
        ("C", "C++", False),
        ("<5mm", ">5mm", False),
        ("cats", "cat", False),
        ("melanoma", "melanona", False),
        ("???", "?", False),
        ("\u0915\u0940", "\u0915\u093e", False),
        ("\U0001f431", "\U0001f436", False),
    ],
)
def test_names_of_one_class(ours: str, theirs: str, same: bool) -> None:
    assert (normal_form(ours) == normal_form(theirs)) == same
    assert find_same_class([ours, theirs, ours]) == (tuple(sorted((ours, theirs))) if same else ())


@pytest.mark.parametrize(("name", "advised"), [("M\udcc3\udcbcller", True), ("a\nb", False), (" ", False)])
def test_a_name_that_cannot_be_shown_is_refused(name: str, advised: bool) -> None:
    """What the locale cannot decode is no fault of the name."""
    with pytest.raises(ConfigError, match=r"data-dir = 'photos': rename the class .*, it cannot be shown\.") as caught:
        require_printable(["cat", name], "photos")
    assert ("LC_ALL=C.UTF-8" in str(caught.value)) == advised
    require_printable(["cat", "Müller", "🐱"], "photos")


def test_a_name_of_punctuation_is_its_own_normal_form() -> None:
    assert [normal_form(name) for name in ("???", "+", "_", " - ")] == ["???", "+", "_", " - "]


def test_most_nodes_name_a_class_and_the_first_in_order_where_they_are_equal() -> None:
    names = ["cat", "Cat", "Cat", "dog", "Dog", "cat ", "emu"]
    assert choose_spellings(names) == {"cat": "Cat", "dog": "Dog", "emu": "emu"}
    assert class_ids(["CAT", "owl", "dog!"], ["Cat", "Dog", "emu"]).tolist() == [0, -1, 1]
    assert class_ids([], ["Cat"]).tolist() == []


@given(st.lists(st.text("aAbB -", min_size=1, max_size=3), max_size=8), st.randoms())
def test_the_order_of_the_nodes_does_not_matter(names: list[str], rng: random.Random) -> None:
    assert choose_spellings(rng.sample(names, len(names))) == choose_spellings(names)
    assert all(normal_form(name) == form for form, name in choose_spellings(names).items())
