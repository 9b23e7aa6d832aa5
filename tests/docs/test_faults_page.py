"""The page of other caches' faults: it has them all, and every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE)))

FAULTS = {
    *("A1", "A2", "A3", "A5", "A6", "A7", "A9", "A10", "A11", "A13", "A14"),
    *("B1", "B3", "B4", "B5", "B7", "B8", "B9", "B11", "B12", "B13"),
    *("C2", "C3", "C4", "C6", "C7", "C8", "C10", "C11"),
    *("D1", "D3", "D4", "D5"),
    "E2",
    *("J2", "J3", "J4", "J6"),
    *("K1", "K2", "K4", "K5"),
}
"""Wrong output, wrong keys, hybrid models, layouts, ranks, speculative decoding, tiers: of the list we began with."""


def scopes(file: Path) -> dict[str, set[str]]:
    """For each class of a test module, and for "" outside of any, the tests that it defines."""
    tree = ast.parse(file.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {"": _tests(tree)} | {node.name: _tests(node) for node in classes}


def _tests(scope: ast.Module | ast.ClassDef) -> set[str]:
    return {node.name for node in scope.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def exists(test: str) -> bool:
    """Whether pytest would collect it, inherited tests of our scenario classes included."""
    path, *classes, name = test.split("::")
    if not (ROOT / path).is_file():
        return False
    found = scopes(ROOT / path)
    if not classes:
        return name in found[""]
    inherited = [scopes(file) for file in (ROOT / "tests" / "_plugins").glob("*_scenarios.py")]
    return classes[0] in found and any(name in tests for each in (found, *inherited) for tests in each.values())


@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_the_page_names_exists(test: str) -> None:
    assert exists(test)


def test_a_test_that_does_not_exist_would_be_noticed() -> None:
    assert len(NAMED) > 30
    assert not exists("tests/docs/test_faults_page.py::test_that_was_renamed")
    assert not exists("tests/docs/test_gone.py::test_a_test_that_the_page_names_exists")
    assert not exists("tests/docs/test_faults_page.py::TestNone::test_a_test_that_the_page_names_exists")


def test_every_fault_has_a_row_and_every_row_says_what_covers_it() -> None:
    rows = re.findall(r"^\| \*\*([A-EJK]\d+)\*\*<br>(.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(FAULTS)
    assert [row[0] for row in rows if "`tests/" not in row[3]] == []
