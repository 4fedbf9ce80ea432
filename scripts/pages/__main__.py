"""`scripts/docs`: build the documentation site, show it, or bring the generated parts of docs/ up to date."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module, util
from pathlib import Path

from scripts.pages import algorithm_pages, api_reference, command_reference, settings_reference
from scripts.pages.stage import ROOT, Stage, configuration, read_navigation

BUILD_SECONDS = 600


def stage_pages(folder: Path) -> Stage:
    """All pages of the site, as Markdown in a folder."""
    stage = Stage(folder)
    stage.add_docs()
    for name, text in generated_pages().items():
        stage.write(name, text)
    return stage


def generated_pages() -> dict[str, str]:
    """The references, by their names in the site."""
    return {
        **api_reference.pages(),
        "reference/settings.md": settings_reference.settings_page(),
        "reference/presets.md": settings_reference.presets_page(),
        "reference/commands.md": command_reference.page(),
    }


def gaps() -> list[str]:
    """What the generated pages lack: a site with gaps is not built."""
    found = [f"{path} has no meaning in docs/settings.toml" for path in settings_reference.missing_meanings()]
    for module in api_reference.MODULES.values():
        if util.find_spec(module) is not None:
            names = api_reference.undocumented(import_module(module), with_parameters=module == "qfleet")
            found += [f"{name} is not explained in its docstring" for name in names]
    return found + [f"{page} is not up to date: scripts/docs --update" for page in algorithm_pages.outdated()]


def build(folder: Path, out: Path, serve: bool) -> int:
    """Gather the pages in `folder`, then build them into `out` or show them."""
    stage_pages(folder / "pages")
    settings = folder / "zensical.toml"
    settings.write_text(configuration(read_navigation(), folder / "pages"), "utf-8")
    words = ["serve"] if serve else ["build", "--clean", "--strict"]
    command = [sys.executable, "-P", "-m", "zensical", *words, "--config-file", str(settings)]
    done = subprocess.run(command, cwd=folder, timeout=None if serve else BUILD_SECONDS)
    if done.returncode == 0 and not serve:
        replace_site(folder / "site", out)
        print(f"docs: {len(list(out.rglob('*.html')))} pages; begin with {out / 'index.html'}")
    return done.returncode


def replace_site(built: Path, out: Path) -> None:
    """Put a new site in the place of an old one."""
    if out.exists():
        shutil.rmtree(out)
    shutil.copytree(built, out)


def is_free(out: Path) -> bool:
    """May the folder be replaced? It is a site, it is empty, or it is not there."""
    return not out.exists() or (out / "sitemap.xml").is_file() or (out.is_dir() and not any(out.iterdir()))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="show the site at http://localhost:8000 until Ctrl-C")
    parser.add_argument("--update", action="store_true", help="write the generated parts of docs/ anew, build nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="the folder of the site (default: site/)")
    given = parser.parse_args()
    if given.update:
        print("\n".join(f"docs: wrote {page}" for page in algorithm_pages.update()) or "docs: all up to date")
        return 0
    if not is_free(given.out):
        print(f"docs: {given.out} holds something else than a site: give --out another folder", file=sys.stderr)
        return 2
    if found := gaps():
        print("docs: not built:", *found, sep="\n  ", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="qfleet-docs-") as folder:
        try:
            return build(Path(folder), given.out.resolve(), given.serve)
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
