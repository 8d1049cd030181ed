"""MkDocs hook: the reference, made from run keys and docstrings, and the project's Markdown files outside docs/.

Links in all Markdown are written so that they work in the repository; here they are turned into those of the site.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = ("task", "client_app", "strategies", "server_app")
# from outside docs/, and its page
MIRRORED = {
    "benchmarks/LEDGER.md": "ledger.md",
    "docker/README.md": "guides/docker.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
KEYS = "reference/keys.md"
CODE = "reference/code"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the made pages to the menu."""
    code = [{name: f"{CODE}/{name}.md"} for name in packages()]
    config.nav = [
        *(config.nav or []),
        {"Reference": [{"Run keys": KEYS}, {"Code": code}]},
        {"Project": [{"Ledger": "ledger.md"}, {"Contributing": "contributing.md"}, {"Changelog": "changelog.md"}]},
    ]
    next(entry["Guides"] for entry in config.nav if "Guides" in entry).insert(5, {"Docker and TLS": "guides/docker.md"})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the made pages, one of them in the place of a short one for those who read in the repository."""
    files.remove(files.src_uris[KEYS])
    for path, text in made_pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put in the keys of a method where they are asked for, turn the links, and keep 1.2 ± 0.3 on one line."""
    markdown = re.sub(r"<!-- keys of ([\w-]+) -->", lambda match: own_keys_table(match[1]), markdown)
    return site_links(markdown, page.file.src_uri).replace(" ± ", "\u00a0±\u00a0")


class PlainDocstrings(griffe.Extension):
    """Docstrings as Markdown: no roles of Sphinx before names, and no pair of shapes that looks like a link."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every module, class and function as it is read."""
        if obj.docstring:
            plain = re.sub(r":(?:func|class|meth|mod):(?=`)", "", obj.docstring.value)
            obj.docstring.value = re.sub(r"(\]\s?)(?=\[)", r"\1\\", plain)


def made_pages() -> Iterator[tuple[str, str]]:
    """Path below docs/ and Markdown of every page that is not written there."""
    for source, path in MIRRORED.items():
        yield path, (ROOT / source).read_text(encoding="utf-8")
    yield KEYS, keys_page()
    for name, modules in packages().items():
        parts = "".join(f"\n## {module}\n\n::: {module}\n" for module in modules)
        yield f"{CODE}/{name}.md", f"# {name}\n\n::: {name}\n{parts}"


def packages() -> dict[str, list[str]]:
    """Every package of the code by its name, with the full names of its own modules."""
    folders = [f for name in PACKAGES for f in (ROOT / name, *sorted((ROOT / name).rglob("*"))) if f.is_dir()]
    modules = {}
    for folder in folders:
        if (folder / "__init__.py").exists():
            name = ".".join(folder.relative_to(ROOT).parts)
            modules[name] = [f"{name}.{file.stem}" for file in sorted(folder.glob("[!_]*.py"))]
    return modules


def site_links(markdown: str, page: str) -> str:
    """The links of a page, which are those of the repository, as the site needs them.

    Args:
        markdown: its text.
        page: its path below docs/.
    """
    source = {made: written for written, made in MIRRORED.items()}.get(page, f"docs/{page}")
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(lambda m: _turned(m[1], source, page), part)
                   for part in parts)  # fmt: skip


def _turned(link: str, source: str, page: str) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    path = MIRRORED.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
    return posixpath.relpath(path, posixpath.dirname(page) or ".") if path else link


def keys_page() -> str:
    """Every run key with its default, what is allowed, what it means and who reads it."""
    from task.config.schema import Config, known_keys
    from task.keys import keys_of
    from task.methods import METHODS

    keys, core = known_keys(), keys_of(Config)
    text = [
        "# Run keys",
        "",
        "Made from the code. Write a key as `key=value` after `fcil run`, or as TOML in Flower's `--run-config`. "
        '`auto` takes the value of the method or of the prompt. A value other than the default of a key that the run '
        "does not read is refused; keys of local training are ignored with a warning where nothing is trained.",
        "",
        "## Every run",
        "",
        *_table(keys[name] for name in core),
    ]  # fmt: skip
    for row in METHODS.values():
        if row.own_keys():
            about = (row.options.__doc__ or "").strip().splitlines()[0]
            text += ["", f"## {row.name}", "", about, "", *_table(row.own_keys().values())]
    return "\n".join(text) + "\n"


def own_keys_table(method: str) -> str:
    """The method's own run keys."""
    from task.methods import METHODS

    return "\n".join(_table(METHODS[method].own_keys().values()))


def _table(keys: Any) -> list[str]:
    rows = [
        f"| `{key.name}` | {_code(key.default)} | {_allowed(key)} | {_escaped(key.rule.help)} | {_read_with(key)} |"
        for key in keys
    ]
    return ["| key | default | allowed | meaning | read only with |", "|---|---|---|---|---|", *rows]


def _allowed(key: Any) -> str:
    """The limits in words, but for those that only catch slips."""
    text = key.rule.allowed(key.kind)
    return re.sub(r" and at most 1e\+(?:09|30)", "", text).replace(" and ", ", ", 1)


def _read_with(key: Any) -> str:
    if not key.rule.only:
        return ""
    name, *values = key.rule.only
    return f"`{name}` = {', '.join(map(_code, values))}"


def _code(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"


def _escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)
