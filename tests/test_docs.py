"""The Python of README.md and of the pages named below runs as it stands."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import mesh_tensor as mt

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/tutorial.md",
        "docs/redistribution.md",
        "docs/modules.md",
        "docs/training.md",
        "docs/disco.md",
        "docs/simulation.md",
        "docs/pipelines.md",
    ],
)
def test_code_blocks_run(page, tmp_path, capsys, monkeypatch):
    blocks = [code for language, code in CODE.findall((ROOT / page).read_text()) if language == "python"]
    script = tmp_path / "page.py"  # a file: TileLang reads a kernel's source
    script.write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)  # what a page writes
    runpy.run_path(str(script))
    assert "all_reduce" in capsys.readouterr().out


def test_code_blocks_name_what_there_is():
    """Those that can't run here (`py`: they need files or ranks), and those for who changes the code, too."""
    unknown = []
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for code in (code for language, code in CODE.findall(page.read_text()) if language in ("py", "python")):
            names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
            used = {node.attr for node in names if isinstance(node.value, ast.Name) and node.value.id == "mt"}
            unknown += [f"{page.name}: mt.{name}" for name in used if not hasattr(mt, name)]
    assert not unknown


def test_names_in_the_text_are_there():
    """Those of tables and sentences, as `mt.from_torch(...)` or `strategies.zero`."""
    unknown = []
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = CODE.sub("", page.read_text())
        for module, name in re.findall(r"`(mt|strategies|mt\.comm|mt\.strategies)\.(\w+)", text):
            of = {"mt": mt, "mt.comm": mt.comm}.get(module, mt.strategies)
            unknown += [f"{page.name}: {module}.{name}"] if not hasattr(of, name) else []
    assert not unknown


def test_modules_in_the_text_are_there():
    """Files as `lowering/pipeline.py`, and modules and names in them as `tir.effects.NO_EFFECT`."""
    packages = {folder.name for folder in (ROOT / "mesh_tensor").iterdir() if folder.is_dir()}
    packages -= {"plan"}  # a variable of the page on simulation
    roots, unknown = (ROOT, ROOT / "mesh_tensor"), []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        text = CODE.sub("", page.read_text())
        files = re.findall(r"`((?:\w+/)+[\w*]+\.py)`", text)
        unknown += [f"{page.name}: {name}" for name in files if not any(list(root.glob(name)) for root in roots)]
        for package, module, name in re.findall(r"`(\w+)\.(\w+)\.(\w+)`", text):
            place = ROOT / "mesh_tensor" / package / module  # a folder's names, as TVM's `runtime.disco`, are others'
            source = place.with_suffix(".py")
            if package in packages and not place.is_dir():
                there = source.exists() and re.search(rf"\b{name}\b", source.read_text())
                unknown += [] if there else [f"{page.name}: {package}.{module}.{name}"]
    assert not unknown


def test_where_it_is_decided():
    """Ten questions have one file each. A name without a folder is in the folder of the one before."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is it decided?")[2].partition("\n## ")[0]
    tables = [re.findall(r"^\| (.+) \| (.+) \|$", part, re.MULTILINE)[1:] for part in text.split("All others:")]
    first, others = ([re.findall(r"`([\w/]+\.py)`", answer) for _, answer in table] for table in tables)
    assert [len(files) for files in first] == [1] * 10
    missing, folder = [], ""
    for name in (name for files in (*first, *others) for name in files):
        folder = name.rpartition("/")[0] or folder
        place = f"{folder}/{name.rpartition('/')[2]}"
        missing += [] if (ROOT / "mesh_tensor" / place).is_file() else [place]
    assert not missing


def test_links_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
        for link in re.findall(r"\]\(([^)#]+)\)", CODE.sub("", page.read_text()))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken
