"""What the documentation names is there: files, headings, options, commands."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from sola_sched.config.slo import REQUEST_KEYS
from sola_sched.config.sola_config import SolaConfig
from sola_sched.config.swap import SwapConfig
from sola_sched.config.turns import TurnsConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/**/*.md",
        "k*/*.md",
        "length_predictor/*.md",
    )
    for path in ROOT.glob(pattern)
)
#: What the page of results may hold, so that it stays one page.
MAX_RESULT_LINES = 150
#: Pages that operators read, and the most words in a cell of their tables.
OPERATORS_PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "start", "operate", "symptoms", "explain", "options", "plan", "reports", "metrics",
            "policies",
        )
    ),
)  # fmt: skip
MAX_CELL_WORDS = 25
#: Three minutes at 280 words a minute, tables and code left out.
MAX_README_WORDS = 840


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """The names under which the page's headings can be linked to, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)

    assert broken == []


def rows(text: str) -> dict[str, str]:
    """Name and default of each option in the page's tables."""
    return {
        name: default
        for names, default in re.findall(r"^\| (`[^|]+`) \| ([^|]*) \|", text, flags=re.M)
        for name in re.findall(r"`([^`]+)`", names)
    }


def options() -> dict[str, object]:
    """Default of every option, by its name."""
    defaults: dict[str, object] = {
        field.name: getattr(SolaConfig(), field.name)
        for field in dataclasses.fields(SolaConfig)
        if field.name not in ("swap", "turns", "shares")
    }
    for field in dataclasses.fields(SwapConfig):
        defaults[f"swap.{field.name}"] = getattr(SwapConfig(), field.name)
    for field in dataclasses.fields(TurnsConfig):
        defaults[f"turns.{field.name}"] = getattr(TurnsConfig("any"), field.name)
    defaults["turns.group"] = None  # without it there are no turns
    return defaults


def test_every_option_is_listed_with_its_default() -> None:
    listed = rows((ROOT / "docs" / "options.md").read_text(encoding="utf-8"))

    assert {name for name in listed if name not in REQUEST_KEYS} == set(options())
    for name, default in options().items():
        if default is None:  # `none`, or what the default stands for
            assert re.fullmatch(r"\w+", listed[name]), name
        else:
            shown = listed[name].strip("`")
            assert shown == default or json.loads(shown) == default, name


def test_the_short_table_of_the_readme_has_the_same_defaults() -> None:
    whole = rows((ROOT / "docs" / "options.md").read_text(encoding="utf-8"))
    short = rows((ROOT / "README.md").read_text(encoding="utf-8"))

    assert short
    for name, default in short.items():
        if "," not in default:
            assert whole[name] == default, name
    assert short["ttft_s"] == f"{whole['ttft_s']}, {whole['tpot_s']}"


@pytest.mark.parametrize("name", ["README.md", "docs/options.md", "length_predictor/README.md"])
def test_the_configurations_that_a_page_shows_are_valid(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")

    shown = re.findall(r"--additional-config[\s\\]+'([^']*)'", text)

    assert shown
    for each in shown:
        SolaConfig.from_additional(json.loads(each))


def test_the_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    commands = re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M)
    modules = re.findall(r"python -m ([\w.]+)", text)

    assert {"bench", "test"} <= set(commands) <= targets
    assert modules
    for module in modules:
        assert importlib.util.find_spec(f"{module}.__main__") is not None, module


def test_extras_are_added_to_what_is_installed() -> None:
    """`.[...]` works in a clone alone, which a page that names it has to say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sources = [*ROOT.glob("sola_sched/**/*.py"), *ROOT.glob("length_predictor/**/*.py")]
    named: set[str] = set()
    for path in (*PAGES, *sources):
        text = path.read_text(encoding="utf-8")
        in_clone = re.findall(r"pip install '\.\[([a-z,]+)\]'", text)
        assert not in_clone or path in (ROOT / "README.md", ROOT / "docs" / "cluster.md"), path
        installed = re.findall(rf"{project['name']}\[([a-z]+)\]", text)
        named |= {extra for each in (*in_clone, *installed) for extra in each.split(",")}

    assert {"bench", "html", "top"} <= named <= set(project["optional-dependencies"])


def test_the_readme_is_read_in_three_minutes() -> None:
    text = re.sub(r"\]\([^)]*\)", "", prose(ROOT / "README.md"))
    words = [
        word for line in text.splitlines() if not line.startswith("|") for word in line.split()
    ]

    assert len(words) <= MAX_README_WORDS


def test_the_results_stay_one_page() -> None:
    lines = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines()

    assert len(lines) <= MAX_RESULT_LINES


@pytest.mark.parametrize("name", OPERATORS_PAGES)
def test_cells_of_tables_are_short(name: str) -> None:
    lines = [line for line in prose(ROOT / name).splitlines() if line.startswith("|")]
    cells = [cell.strip() for line in lines for cell in re.split(r"(?<!\\)\|", line)]

    assert [cell for cell in cells if len(cell.split()) > MAX_CELL_WORDS] == []
