# SPDX-License-Identifier: Apache-2.0
"""What the documentation site is made of: generated pages agree with the code, links with the tree."""

from __future__ import annotations

import dataclasses
import html
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from figures import Results  # noqa: E402
from website import (  # noqa: E402
    accessible,
    comments,
    headers,
    landing,
    links,
    numbers_page,
    openapi,
    pages,
    picture,
    reference,
    stage,
)
from website.markdown import inline_html, section_table, table  # noqa: E402

SOURCES = stage.source_pages(ROOT)
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in SOURCES}


@pytest.mark.parametrize("page", SOURCES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    for target, anchor in stage.links_of(TEXTS[page], page):
        assert (ROOT / target).is_file(), f"{page} links to {target}"
        if anchor and target in TEXTS:
            there = stage.anchors_of(TEXTS[target])
            assert anchor in there, f"{page} links to {target}#{anchor}"


def test_links_and_anchors_are_found() -> None:
    text = "# A `b` c\n\n[x](../y.md#z) `[no](code.md)` ![p](p.svg)\n\n"
    text += "```\n[no](fence.md)\n# no\n```\n\n## A b c\n"
    assert list(stage.links_of(text, "docs/guide/a.md")) == [("docs/y.md", "z"), ("docs/guide/p.svg", "")]
    assert stage.anchors_of(text) == {"a-b-c", "a-b-c-1"}


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    for name in stage.ROOT_PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# A page\n", encoding="utf-8")
    (tmp_path / "SECURITY.md").write_text("# A page\n\n[gone](docs/gone.md)\n", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"SECURITY\.md links to docs/gone\.md"):
        stage.stage(tmp_path, tmp_path / "build")


def test_every_page_is_in_the_navigation_once() -> None:
    named = [name for group in pages.GROUPS for name in group.names]
    generated = {name for name in named if name.startswith("docs/reference/")}
    decisions = {name for name in SOURCES if re.match(r"docs/adr/[0-9]", name)}
    assert len(set(named)) == len(named)
    assert {f"{name}.md" for name in named if name not in generated} == set(SOURCES) - decisions


def test_every_page_says_what_it_is_about() -> None:
    found = [pages.page_of(ROOT, name.removesuffix(".md")) for name in SOURCES]
    assert not [page.name for page in found if not page.title or "](" in page.summary]


# ---- the reference -----------------------------------------------------------------------------------


def _first_cells(text: str, heading: str) -> list[str]:
    return [row[0].strip("`") for row in section_table(text, heading)]


def test_config_page_has_every_field_and_default() -> None:
    from memscale import AsyncOffloadConfig, Config

    text = reference.config_page()
    for owner in (Config, AsyncOffloadConfig):
        fields = [field.name for field in dataclasses.fields(owner) if field.init]
        assert _first_cells(text, owner.__name__) == fields
        assert set(reference.arguments_of(owner)) == set(fields)
    for mode in ("conservative", "balanced", "aggressive"):
        at = ("conservative", "balanced", "aggressive").index(mode)
        for row in section_table(text, "Optimization modes"):
            value = getattr(Config(mode=mode).effective(), row[0].strip("`"))
            assert row[1 + at] == f"`{value!r}`"


def test_errors_page_has_every_error_and_code() -> None:
    from memscale import errors

    text = reference.errors_page(ROOT)
    assert _first_cells(text, "Exceptions") == errors.__all__
    defined = {name for name, thing in vars(errors).items() if isinstance(thing, type)}
    assert {name for name in defined if name.endswith(("Error", "Needed"))} == set(errors.__all__)
    header = (ROOT / "include/memscale/status.h").read_text(encoding="utf-8")
    codes = [row[1].strip("`") for row in section_table(text, "Status codes of the C library")]
    assert codes == [f"MSC_{name}" for name in re.findall(r"\bX\((E\w+|OK),", header)]
    contract = yaml.safe_load((ROOT / "server/openapi.yaml").read_text(encoding="utf-8"))
    code = contract["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]
    assert _first_cells(text, "Codes of memscale-server") == code["enum"]


def test_cli_page_is_what_the_program_says() -> None:
    from memscale.cli import main

    text = reference.cli_page()
    named = re.findall(r"^## memscale (\S+)$", text, re.MULTILINE)
    assert "usage: memscale [-h]" in text
    assert {"estimate", "plan", "tune", "report", "snapshot", "bench", "telemetry"} <= set(named)
    dispatched = re.findall(r'^    if name == "(\w+)"', Path(str(main.__file__)).read_text(), re.MULTILINE)
    assert len(dispatched) > 5 and set(dispatched) <= set(named)
    assert re.findall(r"^### memscale telemetry (\S+)$", text, re.MULTILINE) == [
        "status",
        "enable",
        "disable",
        "show",
    ]


def test_python_page_has_every_public_name() -> None:
    import memscale

    text = reference.python_page()
    listed = set(re.findall(r"^\.\. auto(?:function|class|module):: memscale\.(\S+)$", text, re.MULTILINE))
    assert {name for name in memscale.__all__ if not name.startswith("__")} <= listed
    for module in reference.MODULES:
        assert {f"{module}.{name}" for name in getattr(memscale, module).__all__} <= listed


def test_server_page_has_every_operation_and_schema() -> None:
    text = openapi.server_page(ROOT)
    contract = yaml.safe_load((ROOT / "server/openapi.yaml").read_text(encoding="utf-8"))
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    paths = contract["paths"].items()
    wanted = {
        f"{method.upper()} {path}" for path, item in paths for method in item if method in openapi.METHODS
    }
    assert set(headings) == wanted | set(contract["components"]["schemas"])
    assert len(headings) == len(set(headings))


# ---- C -----------------------------------------------------------------------------------------------


def test_a_comment_behind_a_declaration_moves_in_front() -> None:
    text = """\
/** A pair. */
typedef struct msc_pair {
    int a; /**< the first,
                of two */
    int b;
    int (*f)(int x,
             int y); /**< called */
} msc_pair;

typedef enum msc_kind {
    MSC_ONE, /**< one */
    MSC_COUNT
} msc_kind;
"""
    assert headers.documentable(text).splitlines() == [
        "/** A pair. */",
        "typedef struct msc_pair {",
        "    /** the first, of two */",
        "    int a;",
        "    /** */",
        "    int b;",
        "    /** */",
        "    int (*f)(int x,",
        "             /** called */",
        "             int y);",
        "} msc_pair;",
        "",
        "/** */",
        "typedef enum msc_kind {",
        "    /** one */",
        "    MSC_ONE,",
        "    /** */",
        "    MSC_COUNT",
        "} msc_kind;",
    ]


@pytest.mark.parametrize("header", reference.headers_of(ROOT))
def test_headers_keep_their_code_and_words(header: str) -> None:
    source = (ROOT / "include/memscale" / header).read_text(encoding="utf-8")
    made = headers.documentable(source)
    assert _code(made) == _code(source)
    assert "/**<" not in made
    lines = made.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("MSC_API"):
            assert lines[at - 1].endswith("*/"), f"{header}: {line} has no comment in front"


def _code(text: str) -> list[str]:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).split()


def test_every_header_has_a_page() -> None:
    names = dict(reference.c_pages(ROOT))
    there = {path.stem for path in (ROOT / "include/memscale").glob("*.h")} - {"memscale"}
    assert set(names) == {"c.rst"} | {f"c/{name}.rst" for name in there}
    assert all(f":doc:`c/{name}`" in names["c.rst"] for name in there)


# ---- numbers -----------------------------------------------------------------------------------------


def test_numbers_page_has_every_file_and_its_latest_row() -> None:
    text = numbers_page.numbers_page(ROOT / "bench/results")
    there = {path.stem for path in (ROOT / "bench/results").glob("*.csv")}
    assert there == set(numbers_page.FILES) | {numbers_page.CURVES}
    for name, benchmark in numbers_page.FILES.items():
        last = numbers_page.read_rows(ROOT / "bench/results" / f"{name}.csv")[-1]
        _, found, section = text.partition(f"\n## {benchmark.title}\n")
        assert found
        row = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")][-1]
        assert f"{last['date'][:10]} | `{last['commit']}` |" in row
        assert set(benchmark.key + benchmark.shown) <= set(last)


def test_the_latest_row_of_a_case_counts() -> None:
    rows = [{"case": "a", "value": "1"}, {"case": "b", "value": "2"}, {"case": "a", "value": "3"}]
    assert [row["value"] for row in numbers_page.latest_rows(rows, ("case",))] == ["2", "3"]


# ---- the landing page --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def front() -> str:
    return landing.landing_page(ROOT)


def test_landing_page_is_small_and_loads_nothing(front: str, tmp_path: Path) -> None:
    assert len(front.encode()) <= landing.MOST_BYTES
    assert "{{" not in front and "<script" not in front and "url(" not in front and "@import" not in front
    (tmp_path / "index.html").write_text(front, encoding="utf-8")
    assert not [line for line in links.broken_links(tmp_path) if "from elsewhere" in line]


def test_landing_page_links_to_pages_of_the_site(front: str) -> None:
    named = {f"{name}.html" for group in pages.GROUPS for name in group.names} | {
        f"{pages.INDEX}.html",
        "llms.txt",
    }
    targets = {link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', front)}
    assert {target for target in targets if target not in ("", "data:,")} <= named


def test_landing_page_has_what_the_rows_say(front: str) -> None:
    run = picture.bars_of(Results(ROOT / "bench/results"))
    rows = numbers_page.read_rows(ROOT / "bench/results/gpu_budget.csv")
    measured = {int(row["context_bytes"]) + int(row["reserved_bytes"]) for row in rows}
    assert len(run.bars) > 2 and {bar.measured for bar in run.bars[1:]} <= measured
    for bar in run.bars:
        assert f"{html.escape(bar.label)}: measured {picture.gib(bar.measured)}" in front
    assert run.machine in front and run.commit in front


def test_an_unknown_figure_is_an_error(tmp_path: Path) -> None:
    for name in ("README.md", "meson.build"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "docs/_site").mkdir(parents=True)
    (tmp_path / "docs/_site/landing.html").write_text("<p>{{no_such_figure}}", encoding="utf-8")
    with pytest.raises(Exception, match="no_such_figure"):
        landing.landing_page(tmp_path)


def test_tables_in_both_forms() -> None:
    text = "\n## A\n\n" + table(("a", "b"), [("`x|y`", "[c](d.md#e) **f**")])
    assert section_table(text, "A") == [(r"`x\|y`", "[c](d.md#e) **f**")]
    assert (
        inline_html("[c](d.md#e) **f** `<g>`")
        == '<a href="d.html#e">c</a> <strong>f</strong> <code>&lt;g&gt;</code>'
    )
    with pytest.raises(ValueError, match="no table"):
        section_table(text, "B")


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here">a</a><a href="b.html">b</a><a href="#gone">c</a>'
        '<script src="https://example.org/x.js"></script><a href="https://example.org">d</a>',
        encoding="utf-8",
    )
    assert links.broken_links(tmp_path) == [
        "a.html loads https://example.org/x.js from elsewhere",
        "a.html links to b.html: no such file",
        "a.html links to #gone: no such anchor",
    ]


def test_what_the_theme_leaves_out_is_put_in() -> None:
    page = (
        '<p class="caption" role="heading">a</p><div class="highlight"><pre>b</pre></div>'
        '<dt><dl>\n<dd>c</dd>\n<dd>d</dd>\n</dl></dt><dl class="simple"><dt>e</dt><dd>f</dd></dl>'
    )
    assert accessible.accessible(page) == (
        '<p class="caption" role="heading" aria-level="2">a</p>'
        '<div class="highlight"><pre tabindex="0">b</pre></div>'
        '<dt><dl role="presentation">\n<dd role="presentation">c</dd>\n'
        '<dd role="presentation">d</dd>\n</dl></dt>'
        '<dl class="simple"><dt>e</dt><dd>f</dd></dl>'
    )


def test_comments_become_text_that_sphinx_reads() -> None:
    comment = "Text:\n- an item\n  of two lines\nThen a picture:\n\n    a ──► b\n\n    c\n\nErrors: EIO."
    wanted = (
        "Text:\n\n- an item\n  of two lines\n\nThen a picture:\n\n::\n\n    a ──► b\n\n    c\n\nErrors: EIO."
    )
    assert comments.readable(comment.split("\n")) == wanted.split("\n")
    code = ["@code", "    int a;", "", "    int b;", "@endcode"]
    assert comments.readable(code) == code
    made = comments.literal_code(["`a` and `b", 'c`, MSC_OP_…, "*.x"'])
    assert made == ['``a`` and ``b c``, MSC_OP\\_…, "\\*.x"']
