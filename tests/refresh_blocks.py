"""`python -m tests.refresh_blocks docs/serving.md`: write what the commands of a page print now into the page."""

import sys
import tempfile
from pathlib import Path

# The devices and the environment of the tests, before anything starts JAX.
import tests.conftest  # noqa: F401
from tests.blocks import read_sections, run_listings, run_section, verbs_page


def refreshed(page: str) -> str:
    """The page with the output of every call and listing replaced by what it prints now."""
    parts, done = [], 0
    for section in read_sections(page):
        with tempfile.TemporaryDirectory() as folder:
            outputs = run_section(section, Path(folder))
        for call, output in zip(section.calls, outputs, strict=True):
            last = page[call.end :].startswith("```")
            parts += [page[done : call.start], output, "\n" if last or not output else "\n\n"]
            done = call.end
    page = "".join([*parts, page[done:]])
    for match, output in reversed(run_listings(page)):
        page = page[: match.start("said")] + output + page[match.end("said") :]
    return page


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        page = refreshed(path.read_text(encoding="utf-8"))
        if path.name == "verbs.md":
            page = page.partition("## meshwright\n")[0] + verbs_page() + "\n"
        path.write_text(page, encoding="utf-8")
