"""Reads reports as a browser would, and finds what no report may have."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_WITHOUT_END = {"meta", "br", "link", "img", "input", "hr"}


class Report(HTMLParser):
    """A file's text, tables and figures.

    Attributes:
        problems: Wrong nesting, ids that are there twice, links to nowhere, outside references.
        tables: Rows of cells, the head first.
        figures: What plotly is given, by the id of its place.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.figures: dict[str, Any] = {}
        self.text = ""
        self._open: list[str] = []
        self._ids: set[str] = set()
        self._links: set[str] = set()
        self._is_data = False
        source = path.read_text(encoding="utf-8")
        self.feed(source)
        self.close()
        self.problems += [f"{tag} is not closed" for tag in self._open]
        self.problems += [f"#{name} leads nowhere" for name in self._links - self._ids]
        if not source.startswith("<!DOCTYPE html>"):
            self.problems.append("no doctype")
        style = re.search(r"<style>(.*?)</style>", source, re.S)
        if style is None or re.search(r"url\(|@import", style[1]):
            self.problems.append("the style refers to something")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag not in _WITHOUT_END:
            self._open.append(tag)
        if "id" in given:
            if given["id"] in self._ids:
                self.problems.append(f"id {given['id']} twice")
            self._ids.add(given["id"])
        if "href" in given and given["href"].startswith("#"):
            self._links.add(given["href"][1:])
        elif {"href", "src", "srcset", "action", "data"} & given.keys():
            self.problems.append(f"{tag} refers to something outside: {given}")
        self._is_data = given.get("type") == "application/json"
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"{tag} ends what is not open")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            if self._is_data:
                self.figures = json.loads(data)
        elif self._open and self._open[-1] != "style":
            self.text += data
            if self._open[-1] in ("td", "th"):
                self.tables[-1][-1][-1] += data
