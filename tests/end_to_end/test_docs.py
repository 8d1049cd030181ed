"""The documentation as a whole: links, pictures, and what it says of the code and of the project's files."""

import ast
import posixpath
import re
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from docs import hooks
from task.config.schema import OF_THE_NODE, keys_affecting, known_keys
from task.methods import METHODS
from tests.helpers.documents import FENCED, PAGES, ROOT, prose, section

FOLDERS = "task|client_app|strategies|server_app|benchmarks|tests|docs|docker|suites|presets"
LINK = re.compile(r"\]\(([^)\s]+)\)")
METHOD_CELLS = {f"`{name}`" for name in METHODS}


@cache
def anchors(path: str) -> set[str]:
    """Of a page in the repository, or of one that is made for the site."""
    from markdown.extensions.toc import slugify

    text = PAGES[path] if path in PAGES else hooks.keys_page()
    return {slugify(re.sub(r"[`*]", "", t), "-") for t in re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        assert target == f"docs/{hooks.KEYS}" or (ROOT / target).exists(), link
        if anchor:
            assert anchor in anchors(target), link
        if page.startswith("docs/"):  # on the site there is nothing else
            assert target.startswith("docs/") or target in hooks.MIRRORED, link


def test_pictures_are_small() -> None:
    pictures = [path for ending in ("png", "svg") for path in (ROOT / "docs").rglob(f"*.{ending}")]
    assert len(pictures) > 5
    for path in pictures:
        assert path.stat().st_size < 150_000, path
    text = "".join(PAGES.values())
    assert not [path for path in pictures if path.name not in text]


@pytest.mark.parametrize("page", [*PAGES, "docs/images/message.svg", "Makefile", ".ci/run", "mkdocs.yml"])
def test_files_and_folders_that_are_named_exist(page: str) -> None:
    text = PAGES.get(page) or (ROOT / page).read_text()
    made = {"docker/keys", "docker/data", "docker/runs", "docker/.env"}  # by the commands beside them
    for name in set(re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/.-]*\w", text)):
        if not any(name.startswith(folder) for folder in made) and "#" not in name:
            assert (ROOT / name).exists(), name


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


@cache
def defined(path: str) -> set[str]:
    """Functions and classes of a file of the code."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/methods/")])
def test_functions_are_where_the_tables_say(page: str) -> None:
    rows = 0
    for cells in (line.split("|") for line in prose(page).splitlines() if line.startswith("|")):
        for names, file in pairwise(cells):
            if match := re.fullmatch(r" `([\w/]+\.py)` ", file):
                wanted = set(re.findall(r"`(\w+)`", names))
                assert wanted <= defined(match[1]), (wanted, match[1])
                rows += 1
    assert rows >= 3


def test_names_of_the_architecture_are_classes_of_the_code() -> None:
    text = PAGES["docs/architecture.md"].split("The names, once: ")[1].split("\n## ")[0]
    code = [path for name in hooks.PACKAGES for path in (ROOT / name).rglob("*.py")]
    classes = {name for path in code for name in defined(str(path.relative_to(ROOT)))}
    named = set(re.findall(r"\*\*(\w+)\*\*", text))
    assert len(named) == 9
    assert named <= classes


def test_folders_of_the_architecture_are_all() -> None:
    text = PAGES["docs/architecture.md"].split("## What lies where")[1].split("\n## ")[0]
    for name in hooks.packages():
        assert f"{name.replace('.', '/')}/" in text, name


def test_the_architecture_names_every_file_that_imports_flower() -> None:
    text = PAGES["docs/architecture.md"].split("Only the glue imports Flower: ")[1].split(". server_app/simulation/")[0]
    code = [path for name in hooks.PACKAGES for path in (ROOT / name).rglob("*.py")]
    importing = [p for p in code if re.search(r"^\s*(?:from|import) flwr\b", p.read_text(), re.MULTILINE)]
    assert set(re.findall(r"`([\w/]+\.py)`", text)) == {p.relative_to(ROOT).as_posix() for p in importing}


def test_the_keys_of_a_node_are_those_that_the_deployment_guide_explains() -> None:
    rows = re.findall(r"^\| (`.+`) \|", section("docs/guides/deployment.md", "What a node is told"), re.MULTILINE)
    explained = set(re.findall(r"`([\w-]+)`", " ".join(rows)))
    of_the_node = {"name", "state-dir", "partition-id", "num-partitions"}
    assert explained == of_the_node | set(keys_affecting(*OF_THE_NODE))


def sent_by_method(page: str) -> dict[str, str]:
    """The column "clients also send" of the page's table of methods."""
    rows = [[c.strip() for c in line.split("|")] for line in prose(page).splitlines() if line.startswith("|")]
    [head] = [cells for cells in rows if "clients also send" in cells]
    of_methods = [cells for cells in rows if cells[1] in METHOD_CELLS and len(cells) == len(head)]
    return {cells[1]: cells[head.index("clients also send")] for cells in of_methods}


def test_both_tables_of_methods_say_alike_what_clients_send() -> None:
    sent = sent_by_method("README.md")
    assert set(sent) == METHOD_CELLS
    assert sent == sent_by_method("docs/methods/index.md")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_pages_lead_to_every_guide(page: str) -> None:
    linked = {posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in LINK.findall(prose(page))}
    assert {name for name in PAGES if name.startswith("docs/guides/")} <= linked


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\nhooks:")[0]
    listed = set(re.findall(r"[\w/-]+\.md", menu))
    assert listed == {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}


def test_the_reference_has_every_key_and_every_module() -> None:
    pages = dict(hooks.made_pages())
    assert set(re.findall(r"^\| `([\w-]+)` \|", pages[hooks.KEYS], re.MULTILINE)) == set(known_keys())
    code = "".join(text for path, text in pages.items() if path.startswith(hooks.CODE))
    for folder in hooks.PACKAGES:
        for path in (ROOT / folder).rglob("[!_]*.py"):
            assert f"::: {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}\n" in code


def test_links_are_turned_for_the_site() -> None:
    text = "[a](../benchmarks/LEDGER.md#privacy) [b](tutorial.md) ![c](images/message.svg) [d](https://e.org) [e](#f)"
    assert hooks.site_links(text, "architecture.md") == text.replace("../benchmarks/LEDGER.md", "ledger.md")
    assert hooks.site_links("[a](../docs/guides/data.md#x)", "guides/docker.md") == "[a](data.md#x)"
    assert hooks.site_links("```text\n[a](../docker/README.md)\n```", "results.md").count("README") == 1


def test_a_warning_ends_the_build() -> None:
    (command,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert command == "mkdocs build --strict"  # with --quiet no warning would be counted


def test_nothing_is_fetched_when_the_site_is_built_or_read() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text
    assert not re.search(r"https?://", text)


def test_the_citation_is_of_this_version_and_of_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (project["version"], "Apache-2.0")
    assert project["classifiers"] == ["License :: OSI Approved :: Apache Software License"]
    assert {each["notes"] for each in citation["references"]} == {"HGP", "PIP", "FPPL", "HePCo", "FedProK"}
    assert all(each["authors"] and each["title"] and each["type"] for each in citation["references"])
    assert f"\n## {project['version']}\n" in PAGES["CHANGELOG.md"]


def test_pages_name_no_path_of_a_machine() -> None:
    for page, text in PAGES.items():
        assert not re.search(r"/(?:work|home|root|tmp|opt)/", text), page


def test_hooks_lie_where_the_site_looks_for_them() -> None:
    assert Path(hooks.__file__) == ROOT / "docs" / "hooks.py"
    assert "\nhooks: [docs/hooks.py]\n" in (ROOT / "mkdocs.yml").read_text()
