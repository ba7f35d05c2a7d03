# SPDX-License-Identifier: Apache-2.0
"""Each checker of tools/ finds a planted violation, and nothing in a tree without one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import check_exports  # noqa: E402
import check_forbidden  # noqa: E402
import check_layers  # noqa: E402
import check_rooms  # noqa: E402
import check_size  # noqa: E402
import check_tests  # noqa: E402
import check_words  # noqa: E402
import lint  # noqa: E402
import source_tree  # noqa: E402

C_SPDX = "/* SPDX-License-Identifier: Apache-2.0 */\n"
PY_SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree that breaks no rule."""
    plant(tmp_path, "include/memscale/base.h", "#include <stdint.h>\nMSC_API int msc_version(void);\n")
    plant(tmp_path, "include/memscale/graph.h", '#include "base.h"\nMSC_API int msc_graph_create(int a);\n')
    plant(tmp_path, "include/memscale/memscale.h", '#include "base.h"\n#include "graph.h"\n')
    plant(tmp_path, "src/base/alloc.h", '#include "memscale/base.h"\n')
    plant(tmp_path, "src/base/context.h", "")
    plant(tmp_path, "src/base/context.c", '#include "base/alloc.h"\nvoid f(void *p)\n{\n    free(p);\n}\n')
    plant(tmp_path, "src/graph/graph.h", '#include "base/alloc.h"\n#include "memscale/graph.h"\n')
    plant(tmp_path, "src/graph/graph.c", '#include "graph.h"\n#include <string.h>\n')
    plant(tmp_path, "cli/main.h", "")
    plant(tmp_path, "cli/main.c", '#include <jansson.h>\n#include "main.h"\n#include "memscale/memscale.h"\n')
    plant(tmp_path, "python/memscale/__init__.py", "from memscale.api import wrap\n")
    plant(tmp_path, "python/memscale/api.py", "from memscale import core\n")
    plant(tmp_path, "python/memscale/core/config.py", "import dataclasses\n")
    return tmp_path


def plant(root: Path, name: str, text: str, spdx: bool = True) -> None:
    """Writes a file, with its license line in front."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    line = PY_SPDX if path.suffix in (".py", ".build") else C_SPDX
    path.write_text((line if spdx else "") + text, encoding="utf-8")


def only(findings: list[source_tree.Finding]) -> str:
    """The one finding, as it is printed."""
    assert len(findings) == 1, findings
    return str(findings[0])


@pytest.mark.parametrize(
    "check", [check_layers.check, check_rooms.check, check_size.check, check_forbidden.check]
)
def test_clean_tree(check, tree):
    assert check(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("src/base/text.c", '#include "graph/graph.h"\n', "src/base/text.c:2: base includes graph/graph.h"),
        (
            "src/base/text.c",
            '#include "memscale/plan.h"\n',
            "src/base/text.c:2: base includes memscale/plan.h",
        ),
        (
            "src/base/text.c",
            "#include <memscale/graph.h>\n",
            "src/base/text.c:2: base includes memscale/graph",
        ),
        ("src/base/text.c", '#  include "../graph/graph.h"\n', "base includes ../graph/graph.h"),
        (
            "src/graph/a.c",
            '/*\n*/ int a;\n#include "memscale/memscale.h"\n',
            "src/graph/a.c:4: graph includes",
        ),
        ("src/decide/a.c", '#include "device/device.h"\n', "decide includes device/device.h"),
        ("src/junk/a.c", "", "module 'junk' is not in the table"),
        (
            "include/memscale/graph.h",
            '#include "sim.h"\n',
            "graph.h:2: includes sim.h, which is not a public",
        ),
        ("include/memscale/base.h", '#include "graph.h"\n', "base.h:2: base includes graph.h"),
        ("include/memscale/sim.h", "", "memscale.h:1: does not include sim.h"),
        (
            "src/base/alloc.c",
            '#include "context.h"\n#include "base/alloc.h"\n',
            "src/base/alloc:1: includes go round in a circle: base/alloc, base/context",
        ),
        ("cli/plan.c", '#include "base/alloc.h"\n', "cli/plan.c:2: cli includes base/alloc.h"),
        ("cli/plan.c", '#include "../src/base/alloc.h"\n', "cli includes ../src/base/alloc.h"),
        ("cli/plan.c", "#include <graph/graph.h>\n", "cli includes graph/graph.h"),
        ("server/http.c", '#include "graph/graph.h"\n', "server includes graph/graph.h"),
    ],
)
def test_layers(tree, name, text, expected):
    plant(tree, name, text)
    assert expected in only(check_layers.check(tree))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/base/text.c", '/* #include "graph/graph.h" */\n// #include "plan/plan.h"\n'),
        ("server/http.c", '#include "base/alloc.h"\n#include <microhttpd.h>\n'),
    ],
)
def test_layers_allow(tree, name, text):
    plant(tree, name, text)
    assert check_layers.check(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "python/memscale/core/a.py",
            "from memscale.api import wrap\n",
            "core imports memscale.api, which stands above",
        ),
        (
            "python/memscale/core/a.py",
            "from ..cli import x\n",
            "core imports memscale.cli.x, which stands above",
        ),
        (
            "python/memscale/core/a.py",
            "from .. import api\n",
            "core imports memscale.api, which stands above",
        ),
        (
            "python/memscale/optim/a.py",
            "from memscale import api\n",
            "optim imports memscale.api, which stands",
        ),
        (
            "python/memscale/api.py",
            "def f():\n    from memscale.cli import x\n",
            "api imports memscale.cli.x, which stands above",
        ),
        ("python/memscale/junk/a.py", "import os\n", "junk/a.py:1: room 'junk' is not in the list"),
        ("python/memscale/core/a.py", "def f():\n    import transformers\n", "imports transformers; only"),
        ("python/memscale/integrations/a.py", "import transformers\n", "imports transformers at the top"),
        (
            "python/memscale/plans/a.py",
            "if TYPE_CHECKING:\n    from memscale.core.config import C\n",
            "plans imports",
        ),
    ],
)
def test_rooms(tree, name, text, expected):
    plant(tree, name, text)
    assert expected in only(check_rooms.check(tree))


def test_rooms_have_no_circles(tree):
    plant(tree, "python/memscale/core/a.py", "from memscale.core import b\n")
    plant(tree, "python/memscale/core/b.py", "def f():\n    from memscale.core.c import g\n")
    plant(tree, "python/memscale/core/c.py", "if TYPE_CHECKING:\n    from memscale.core.a import h\n")
    assert "circle: core.a, core.b, core.c" in only(check_rooms.check(tree))


def test_rooms_have_folders_of_a_size(tree):
    for number in range(check_rooms.FOLDER_FILES):
        plant(tree, f"python/memscale/core/m{number}.py", "")
    assert "core:1: 31 files, the cap is 30" in only(check_rooms.check(tree))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("python/memscale/core/a.py", "if TYPE_CHECKING:\n    import transformers\n"),
        ("python/memscale/core/a.py", "from memscale import _core\n"),
        ("python/memscale/integrations/a.py", "def f():\n    import transformers\n"),
    ],
)
def test_rooms_allow(tree, name, text):
    plant(tree, name, text)
    assert check_rooms.check(tree) == []


def lines(count: int) -> str:
    """C or Python that is so long and does nothing."""
    return "\n" * count


def c_function(body_lines: int, parameters: str = "void") -> str:
    """A C function of `body_lines` and two lines more: its head and its closing brace."""
    return f"static int long_one({parameters}) {{\n" + "    a(); /* } */\n" * body_lines + "}\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("src/graph/a.c", lines(800), "src/graph/a.c:801: 801 lines, the cap is 800"),
        ("include/memscale/base.h", lines(400), "base.h:401: 401 lines, the cap is 400"),
        ("python/memscale/core/a.py", lines(600), "a.py:601: 601 lines, the cap is 600"),
        ("tests/unit/test_a.c", lines(700), "test_a.c:701: 701 lines, the cap is 700"),
        ("src/graph/a.c", c_function(59), "src/graph/a.c:2: long_one has 61 lines, the cap is 60"),
        (
            "src/graph/a.h",
            '#ifdef __cplusplus\nextern "C" {\n#endif\n' + c_function(59),
            "a.h:5: long_one has 61",
        ),
        (
            "src/graph/a.c",
            "struct s {\n    int a;\n};\n"
            + c_function(1, "int a, int b, int c, int d, int e, int f, int g, int h"),
            "src/graph/a.c:5: long_one has 8 parameters, the cap is 7",
        ),
        ("python/memscale/core/a.py", "def f():\n" + "    g()\n" * 60, "a.py:2: f has 61 lines"),
        ("tests/python/test_a.py", "class A:\n  async def f():\n" + "    g()\n" * 120, "f has 121 lines"),
    ],
)
def test_size(tree, name, text, expected):
    plant(tree, name, text)
    assert expected in only(check_size.check(tree))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/graph/a.c", lines(799)),
        ("src/graph/a.c", c_function(58)),
        ("src/graph/a.c", "static const int table[] = {\n" + "    1,\n" * 90 + "};\n"),
        ("src/graph/a.c", "#define LONG \\\n" + "    { \\\n" * 90 + "    0\n"),
        (
            "src/graph/a.c",
            c_function(1, "int a, int (*call)(int, int, int, int), int c, int d, int e, int f"),
        ),
        ("python/memscale/core/a.py", 'def f():\n    """Says\n' + "    much.\n" * 90 + '    """\n    g()\n'),
        ("tests/python/test_a.py", lines(699)),
    ],
)
def test_size_allows(tree, name, text):
    plant(tree, name, text)
    assert check_size.check(tree) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("void *p = malloc(3);\n", "calls malloc"),
        ("int a;\nvoid *p = realloc\n(a, 3);\n", "src/graph/a.c:3: calls realloc"),
        ("x = condition ? free(p) : 0;\n", "calls free"),
        ("fprintf(file, 1);\n", "calls fprintf"),
        ("abort();\n", "calls abort"),
        ("exit(1);\n", "calls exit"),
        ("a = getenv(b);\n", "calls getenv"),
        ("assert(a);\n", "calls assert"),
        ("f = stderr;\n", "uses stderr"),
        ("#include <Python.h>\n", "includes Python.h"),
        ("#include <torch/csrc/stable/tensor.h>\n", "includes torch/csrc/stable/tensor.h"),
        ("#include <jansson.h>\n", "includes jansson.h"),
    ],
)
def test_forbidden_in_core(tree, text, expected):
    plant(tree, "src/graph/a.c", text)
    assert expected in only(check_forbidden.check(tree))


@pytest.mark.parametrize(
    "text",
    [
        "/* malloc(3) */ // free(p)\n",
        'const char *a = "printf(\\"x\\")";\n',
        "snprintf(a, 1, b); msc__free(a); a->free(b); a.exit(b); static_assert(1, c);\n",
    ],
)
def test_forbidden_allows_in_core(tree, text):
    plant(tree, "src/graph/a.c", text)
    assert check_forbidden.check(tree) == []


def test_forbidden_is_about_the_core(tree):
    plant(tree, "cli/plan.c", "printf(a); exit(1);\n")
    assert check_forbidden.check(tree) == []


def test_doorkeeper_does_not_print(tree):
    plant(tree, "src/base/context.c", "free(a);\nprintf(b);\n")
    assert "context.c:3: calls printf" in only(check_forbidden.check(tree))


def test_one_header_asserts(tree):
    plant(tree, "src/base/invariant.h", "#include <assert.h>\n#define MSC__ASSERT(c) assert(c)\n")
    plant(tree, "src/graph/a.c", "MSC__ASSERT(a);\n")
    assert check_forbidden.check(tree) == []
    plant(tree, "src/graph/a.c", "#include <assert.h>\n")
    assert "includes assert.h" in only(check_forbidden.check(tree))


@pytest.mark.parametrize("name", ["src/graph/a.c", "src/graph/a.h", "tools/a.py", "src/meson.build", "a.pyi"])
def test_license_line(tree, name):
    plant(tree, name, "\n", spdx=False)
    assert "the first line does not say SPDX" in only(check_forbidden.check(tree))


def test_license_line_after_interpreter(tree):
    plant(tree, "tools/a.py", "#!/usr/bin/env python3\n" + PY_SPDX, spdx=False)
    assert check_forbidden.check(tree) == []


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "X" * 3])
def test_unfinished_work(tree, mark):
    plant(tree, "src/graph/a.c", f"\n/* {mark}: later */\n")
    assert f"src/graph/a.c:3: {mark}" in only(check_forbidden.check(tree))


def test_build_folders_are_not_sources(tree):
    for folder in ("build/gcc", ".venv/lib", "build-x", "python/__pycache__", "dist"):
        plant(tree, f"{folder}/a.c", "malloc(1)\n" + lines(900), spdx=False)
    assert check_forbidden.check(tree) + check_size.check(tree) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("src/graph/a.c", "\n/* Whoever holds it. */\n", "src/graph/a.c:3: 'Whoever': say"),
        ("python/memscale/api.py", "lent = 1\n", "api.py:2: 'lent': say resident, borrowed"),
        ("docs/guide/a.md", "three blocks, two of which stay", "docs/guide/a.md:2: 'of which': say whose"),
        ("docs/design/a.md", "it is\ntold of it", "docs/design/a.md:2: 'is told': say is given"),
        ("README.md", "The module is run again.", "README.md:2: 'run again': say recompute"),
        ("cli/main.c", 'char *a = "its weights are away";\n', "cli/main.c:2: 'are away': say offloaded"),
    ],
)
def test_words(tree, name, text, expected):
    plant(tree, name, text)
    assert expected in only(check_words.check(tree))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "src/graph/a.c",
            "plan->away_peak_bytes = silent + births + shelfish; /* far away, tells apart */\n",
        ),
        ("CHANGELOG.md", "whoever\n"),
        ("tests/unit/a.c", "/* on purpose */\n"),
        ("docs/adr/0001.md", "page-locked\n"),
    ],
)
def test_words_allow(tree, name, text):
    plant(tree, name, text)
    assert check_words.check(tree) == []


def library(root: Path, source: str) -> Path:
    """Compiles a shared library that exports what `source` does not hide."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None
    assert shutil.which("nm") is not None
    path = root / "libmemscale.so"
    plant(root, "a.c", source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(root / "a.c")], check=True)
    return path


PUBLIC = "int msc_version(void) { return 1; }\nint msc_graph_create(int a) { return a; }\n"


def test_exports_agree(tree):
    hidden = '__attribute__((visibility("hidden"))) int msc__private(void) { return 1; }\n'
    assert check_exports.check(tree, library(tree, PUBLIC + hidden)) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PUBLIC + "int msc__free(void) { return 1; }\n", "exports msc__free, which is private"),
        (PUBLIC + "int helper;\n", "exports helper, which does not start with msc_"),
        (PUBLIC + "int msc_extra(void) { return 1; }\n", "exports msc_extra, which is in no public header"),
        ("int msc_version(void) { return 1; }\n", "graph.h:3: msc_graph_create is not exported"),
    ],
)
def test_exports(tree, source, expected):
    assert expected in only(check_exports.check(tree, library(tree, source)))


def test_exports_read_split_declarations(tree):
    plant(
        tree, "include/memscale/base.h", "MSC_API const int *\nmsc_version(const char *text,\n    int a);\n"
    )
    assert set(check_exports.declared(tree)) == {"msc_version", "msc_graph_create"}


def run_tool(name: str, *args: str, ci: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a checker as a program."""
    command = [sys.executable, str(TOOLS / name), *args]
    return subprocess.run(command, capture_output=True, text=True, env={"CI": ci, "PATH": ""}, check=False)


@pytest.mark.parametrize(
    ("name", "planted", "text"),
    [
        ("check_layers.py", "src/base/text.c", '#include "memscale/graph.h"\n'),
        ("check_rooms.py", "python/memscale/core/a.py", "from memscale import cli\n"),
        ("check_size.py", "src/base/text.c", "\n" * 800),
        ("check_forbidden.py", "src/base/text.c", "void *p = malloc(1);\n"),
        ("check_words.py", "src/base/text.c", "/* weights at home */\n"),
    ],
)
def test_programs(tree, name, planted, text):
    done = run_tool(name, "--root", str(tree))
    assert (done.returncode, done.stdout) == (0, "")
    plant(tree, planted, text)
    done = run_tool(name, "--root", str(tree))
    assert done.returncode == 1
    assert done.stdout.startswith(f"{planted}:")


@pytest.mark.parametrize(("ci", "passed"), [("", True), ("true", False)])
def test_lint_missing_tool(tree, capsys, ci, passed):
    def absent(_: lint.Tree) -> str:
        raise lint.MissingTool("no such thing")

    assert lint.run_check("absent", absent, lint.Tree(tree, None), strict=ci == "true") is passed
    assert "no such thing" in capsys.readouterr().out


def test_lint_fails_when_a_check_does(tree, monkeypatch, capsys):
    plant(tree, "src/graph/a.c", "abort();\n")
    monkeypatch.setattr(lint, "FAST_CHECKS", {"size": lint.FAST_CHECKS["size"]})
    monkeypatch.setattr(sys, "argv", ["lint.py", "--fast", "--root", str(tree)])
    assert lint.main() == 0
    assert capsys.readouterr().out.startswith("lint size          ok")
    forbidden = {"forbidden": lint._own(check_forbidden.check)}
    monkeypatch.setattr(lint, "FAST_CHECKS", lint.FAST_CHECKS | forbidden)
    assert lint.main() == 1
    assert "src/graph/a.c:2: calls abort" in capsys.readouterr().out


def test_every_call_that_can_fail_says_so() -> None:
    for header in sorted((TOOLS.parent / "include" / "memscale").glob("*.h")):
        lines = header.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if re.match(r"(MSC_API|static inline) msc_status\b", line)] == []


# ---- tests -------------------------------------------------------------------------------------------


@pytest.fixture
def reaching(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A product with a private name, and no test may reach it."""
    monkeypatch.setattr(check_tests, "MOST_PRIVATE", 0)
    monkeypatch.setattr(check_tests, "MOST_EXCHANGED", 0)
    plant(tree, "python/memscale/core/planner.py", "_known = {}\ndef plan():\n    return _known\n")
    return tree


@pytest.mark.parametrize(
    "line",
    [
        "planner._known.clear()",
        "from memscale.core.planner import _known",
        "made._known",
        "model._memscale_executor.plan",
    ],
)
def test_a_private_name_is_counted(line: str, reaching: Path) -> None:
    plant(reaching, "tests/python/test_it.py", f"from memscale.core import planner\n{line}\n")
    assert "tests/python/test_it.py:3: 1 uses of private names" in only(check_tests.check(reaching))


@pytest.mark.parametrize(
    "line",
    [
        'monkeypatch.setattr(planner, "plan", None)',
        'monkeypatch.setattr("memscale.core.planner.plan", None)',
        'monkeypatch.setitem(planner.table, "plan", None)',
        'patch.object(planner, "plan")',
        "planner.plan = None",
    ],
)
def test_an_exchanged_part_is_counted(line: str, reaching: Path) -> None:
    plant(reaching, "tests/python/test_it.py", f"from memscale.core import planner\n{line}\n")
    assert "tests/python/test_it.py:3: 1 exchanged parts" in only(check_tests.check(reaching))


def test_others_and_a_tests_own_are_not_counted(reaching: Path) -> None:
    text = (
        "import torch\nfrom memscale.core import planner\n"
        'monkeypatch.setattr(torch, "empty", None)\nplanner.plan()\nweight._version\ntorch._known\n'
        "class Own:\n    def __init__(self):\n        self._known = 1\nOwn()._known\n"
    )
    plant(reaching, "tests/python/test_it.py", text)
    assert check_tests.check(reaching) == []
