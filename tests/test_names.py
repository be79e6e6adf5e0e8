"""One word for one thing: the glossary in the package's head, and names that keep to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sola_sched

ROOT = Path(sola_sched.__file__).parent
#: Where requests and steps are decided on. Elsewhere some of the words mean other things.
ROOMS = ("core", "cost", "planner", "prediction", "reports", "vllm_adapter")
#: Words that no name has there, and the term in their place.
OTHER_WORDS = {
    "displace": "preempted",
    "displaced": "preempted",
    "doomed": "lost",
    "evict": "preempted",
    "evicted": "preempted",
    "hidden": "held",
    "hide": "held",
    "iteration": "step",
    "page": "block",
    "pages": "block",
    "placeholder": "in flight",
    "placeholders": "in flight",
}
#: vLLM's.
NOT_OURS = ("num_output_placeholders", "iteration_stats")


def glossary() -> dict[str, str]:
    """Meanings by term."""
    entries = re.findall(r"^- \*([\w ]+)\*: (.+(?:\n  .+)*)", sola_sched.__doc__ or "", re.M)
    return {term: " ".join(meaning.split()) for term, meaning in entries}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and names that a module defines or uses."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield line, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield line, node.name


def other_words(name: str) -> list[str]:
    """Words in a name that another term stands for."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return [word for word in words if word in OTHER_WORDS and name not in NOT_OURS]


def test_the_glossary_has_at_most_twenty_terms_and_each_once() -> None:
    terms = re.findall(r"^- \*([\w ]+)\*:", sola_sched.__doc__ or "", re.M)

    assert len(terms) == len(set(terms)) == len(glossary())
    assert 15 <= len(terms) <= 20
    assert {*OTHER_WORDS.values()} <= {*terms}


def test_names_keep_to_the_glossary() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}: say {OTHER_WORDS[word]!r}, not {word!r}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, name in names(ast.parse(path.read_text(encoding="utf-8")))
        for word in other_words(name)
    ]

    assert found == []


def test_another_word_would_be_found() -> None:
    tree = ast.parse(
        "class HiddenRow:\n    def is_evicted(self, pages=num_output_placeholders): ..."
    )

    assert [word for _, name in names(tree) for word in other_words(name)] == [
        "hidden", "evicted", "pages"
    ]  # fmt: skip
