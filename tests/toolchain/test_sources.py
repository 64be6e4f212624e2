"""Include resolution, and the fingerprint's dependence on every header."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.core import registry
from sandbox.toolchain import nvrtc, sources


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """main.cu, and two folders on the include path."""
    for folder in ("src", "first", "second"):
        (tmp_path / folder).mkdir()
    return tmp_path


def scan(tree: Path) -> list[str]:
    files, complete = sources.included_files(tree / "src/main.cu", (tree / "first", tree / "second"))
    assert complete
    return sorted(str(path.relative_to(tree)) for path in files)


def fingerprint(tree: Path) -> str | None:
    return sources.fingerprint(tree / "src/main.cu", (tree / "first", tree / "second"))


@pytest.mark.parametrize(
    "line",
    [
        '#include "a.h"',
        "#include <a.h>",
        '#include"a.h"',
        "#include<a.h>",
        '  #  include\t"a.h"  // why',
        '/* why */ #include "a.h"',
        '#if 0\n#include "a.h"\n#endif',
        '// #include "a.h"',
        '#include "a.h"\r\n',
        "#if __has_include(<a.h>)\n#endif",
        "#include_next <a.h>",
        '#include/**/"a.h"',
        "#/* a\ncomment */include /**/ <a.h>",
        '#inc\\\nlude "a.h"',
        "#include \\\n<a.h>",
        '%:include "a.h"',
    ],
)
def test_every_form_is_found(tree: Path, line: str) -> None:
    (tree / "src/main.cu").write_bytes(f"int x;\n{line}\n".encode())
    (tree / "second/a.h").write_text("")
    assert scan(tree) == ["second/a.h", "src/main.cu"]


def test_nested_includes_cycles_and_subfolders(tree: Path) -> None:
    (tree / "first/sub").mkdir()
    (tree / "src/main.cu").write_text('#include "sub/a.h"\n')
    (tree / "first/sub/a.h").write_text('#include "b.h"\n')  # in the folder of the file that includes it
    (tree / "first/sub/b.h").write_text("#include <c.h>\n")
    (tree / "second/c.h").write_text('#include "sub/a.h"\n#include "c.h"\n')  # cycles
    assert scan(tree) == ["first/sub/a.h", "first/sub/b.h", "second/c.h", "src/main.cu"]


def test_a_missing_header_is_ignored(tree: Path) -> None:
    (tree / "src/main.cu").write_text('#include "nowhere.h"\n')
    assert scan(tree) == ["src/main.cu"]
    before = fingerprint(tree)
    (tree / "second/nowhere.h").write_text("")
    assert fingerprint(tree) != before


def test_a_missing_source(tree: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint(tree)


COMMENTED = [  # two texts with the same code on the same lines
    ("int a;  // one\nint b;", "int a;\nint b;"),
    ("int a; /* one\n */ int b;", "int a; /* two,\n longer */ int b;"),
    ('f("/*"); // one', 'f("/*"); // two'),
    ("f('\"'); // one\nint b;", 'f(\'"\'); // "two"\nint b;'),
    ("f(1'000 + '\"', \"x\"); // one", "f(1'000 + '\"', \"x\"); // two"),
    ("f('\\''); // one", "f('\\''); // two"),
    ("#define A \\\n b /* one */", "#define A \\\n b /* two */"),
]
DIFFERENT = [  # texts that a naive scan would take for the same code
    ('f("//one");', 'f("//two");'),
    ('f("\\"//one");', 'f("\\"//two");'),
    ("f(1'000 + '\"'); g(\"//one\");", "f(1'000 + '\"'); g(\"//two\");"),
    ('f(R"(" //one)");', 'f(R"(" //two)");'),
    ("// one \\\n/* two\nint a;", "// one \\\n/* two\nint b;"),
    ("/\\\n/ /*\nint a; //*/", "/\\\n/ /*\nint b; //*/"),
    ("int/**/a;", "inta;"),
    ("a /*1*/ b", "a /*1*/ /b/ b"),
]


@pytest.mark.parametrize(("one", "other"), COMMENTED)
def test_comments_do_not_count_but_lines_do(tree: Path, one: str, other: str) -> None:
    seen = set()
    for text in (one, other, f"// first\n{one}"):
        (tree / "src/main.cu").write_text(text)
        seen.add(fingerprint(tree))
    assert len(seen) == 2
    same = {sources.without_lines(text.encode()) for text in (one, other, f"// first\n\n{one}\n\n// last\n")}
    assert len(same) == 1


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_looks_like_a_comment_counts(one: str, other: str) -> None:
    assert sources.without_comments(one.encode()) != sources.without_comments(other.encode())
    assert sources.without_lines(one.encode()) != sources.without_lines(other.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a = __LINE__;", "// first\nint a = __LINE__;"),
        ("#define A \\\n\nint b;", "#define A \\\nint b;"),  # the macro ends at the empty line
        ("#define A\nint b;", "#define A int b;"),
    ],
)
def test_lines_that_have_a_meaning_count(one: str, other: str) -> None:
    assert sources.without_lines(one.encode()) != sources.without_lines(other.encode())


@pytest.mark.parametrize("form", ['"a.h"', "<a.h>"])
def test_a_header_newly_shadowed(tree: Path, form: str) -> None:
    """The compiler uses the first match on the include path, so a new file there changes the result."""
    (tree / "src/main.cu").write_text(f"#include {form}\n")
    (tree / "second/a.h").write_text("int from_second;\n")
    seen = {fingerprint(tree)}
    for folder in ("first", "src"):
        (tree / folder / "a.h").write_text("int from_second;\n")  # the same text: where it lies counts as well
        seen.add(fingerprint(tree))
    assert len(seen) == 3


def test_an_angled_include_is_searched_in_every_folder(tree: Path) -> None:
    """Not every compiler searches the source's folder for <a.h>, so the include path counts as well."""
    (tree / "src/main.cu").write_text("#include <a.h>\n")
    (tree / "src/a.h").write_text("")
    (tree / "second/a.h").write_text("int old;\n")
    before = fingerprint(tree)
    (tree / "second/a.h").write_text("int new;\n")
    assert fingerprint(tree) != before


def test_every_file_counts_and_only_its_content(tree: Path) -> None:
    (tree / "src/main.cu").write_text('#include "a.h"\n')
    (tree / "first/a.h").write_text('#include "b.h"\n')
    (tree / "first/b.h").write_text("int b1;\n")
    (tree / "first/unrelated.h").write_text("")
    before = fingerprint(tree)
    os.utime(tree / "first/b.h")
    (tree / "first/unrelated.h").write_text("int x;\n")
    assert fingerprint(tree) == before
    (tree / "first/b.h").write_text("int b2;\n")  # the same length, within one tick of the clock
    assert fingerprint(tree) != before
    (tree / "first/b.h").write_text("int b1;\n")
    assert fingerprint(tree) == before


def test_a_header_found_elsewhere_counts(tree: Path) -> None:
    """The same text in another folder includes other neighbouring files."""
    (tree / "src/main.cu").write_text("#include <a.h>\n")
    (tree / "first/a.h").write_text("int a;\n")
    before = fingerprint(tree)
    (tree / "first/a.h").rename(tree / "second/a.h")
    assert fingerprint(tree) != before


def test_an_edit_within_one_tick_of_the_clock(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two edits may get the same time stamp, so recently changed files are compared by content."""
    main, real = tree / "src/main.cu", Path.stat
    main.write_text("int a;\n")
    stamped = main.stat()
    monkeypatch.setattr(Path, "stat", lambda self, **options: stamped if self == main else real(self, **options))
    before = fingerprint(tree)
    main.write_text("int b;\n")
    assert fingerprint(tree) != before


def test_an_edit_that_keeps_length_and_time(tree: Path) -> None:
    """Possible with `cp -p`, `rsync -t` or archives."""
    main = tree / "src/main.cu"
    main.write_text("int a;\n")
    os.utime(main, (1_000_000_000,) * 2)
    before = fingerprint(tree)
    replacement = tree / "src/other.cu"
    replacement.write_text("int b;\n")
    os.utime(replacement, (1_000_000_000,) * 2)
    replacement.replace(main)
    assert fingerprint(tree) != before


@pytest.mark.parametrize(
    "line", ["#include HEADER", "#include/**/HEADER", "#inc\\\nlude HEADER", "# include_next NAME(x)"]
)
def test_a_computed_include_cannot_be_known(tree: Path, line: str) -> None:
    (tree / "src/main.cu").write_text(f"#define HEADER <a.h>\n{line}\n")
    assert fingerprint(tree) is None
    (tree / "src/main.cu").write_text('#include "a.h"\n')
    (tree / "first/a.h").write_text(f"#define HEADER <a.h>\n{line}\n")
    assert fingerprint(tree) is None


def test_prose_is_not_a_computed_include(tree: Path) -> None:
    (tree / "src/main.cu").write_text("// #include of another file\nint includes;  // the #include above\n")
    assert fingerprint(tree) is not None


def test_names_and_text_in_any_encoding(tree: Path) -> None:
    (tree / "src/main.cu").write_bytes(b'#include "caf\xe9.h"\n// caf\xe9\n')
    assert fingerprint(tree) is not None


def test_shipped_kernels_can_be_cached() -> None:
    """Including CUDA's own headers."""
    for kernel in registry.kernels().values():
        assert sources.fingerprint(kernel.source, (nvrtc.INCLUDE_DIR, *nvrtc.include_dirs())) is not None
    files, _ = sources.included_files(registry.get("fwd_minimal").source, (nvrtc.INCLUDE_DIR, *nvrtc.include_dirs()))
    assert {"tensor.cuh", "score_mod.cuh", "cuda_fp16.h", "cuda_bf16.h"} <= {path.name for path in files}


def test_headers_full_of_comments_are_scanned_quickly(tree: Path) -> None:
    """A pattern that backtracks over the comments of CUDA's headers would not terminate."""
    comments = "/* one */ /* two **/\n/**\n * three\n */\n" * 2000
    (tree / "src/main.cu").write_text(f'{comments}/* four */ #include "a.h"\n{comments}')
    (tree / "first/a.h").write_text("")
    assert scan(tree) == ["first/a.h", "src/main.cu"]


def test_entry_points_of_a_source(tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(
        '// __global__ void none() {}\nextern "C" __global__ void __launch_bounds__(2 * (N), 1) a(int x) {}\n'
        "/* __global__ void none() {} */ __global__ static void\nb (int x);\n__device__ void c() {}\n"
        "__global__ __launch_bounds__(32) void d() {}\n"
    )
    assert sources.entry_points(file) == ["a", "b", "d"]
    assert sources.code_of(file).count("\n") == 6


@pytest.mark.parametrize(
    ("text", "arguments", "rest"),
    [
        (")x", [""], "x"), ("a)", ["a"], ""), ("a, b)x", ["a", " b"], "x"), ("f(a, b), c[1, 2], {3, 4})x",
         ["f(a, b)", " c[1, 2]", " {3, 4}"], "x"), ("a, (b", ["a", " (b"], ""), ("(a)) b)", ["(a)"], " b)"),
    ],
)  # fmt: skip
def test_arguments_of_a_call(text: str, arguments: list[str], rest: str) -> None:
    found, end = sources.split_arguments(f"f({text}", 2)
    assert (found, f"f({text}"[end:]) == (arguments, rest)


def test_template_arguments_of_a_call() -> None:
    assert sources.split_arguments("f(A<1, 2> a, B b)", 2, "(<[", ")>]")[0] == ["A<1, 2> a", " B b"]


def test_code_without_lines() -> None:
    """Comments and empty lines do not count, unless lines have a meaning."""
    one, other = b"int a;\n\n  \n// c\nint b;\n", b"int a; // d\nint b;"
    assert sources.without_lines(one) == sources.without_lines(other) == b"\nint a;\nint b;\n"
    for text in (b"int a;\n\nint b = __LINE__;", b"int a;\nint b = __LINE__;"):
        assert sources.without_lines(text) == text
    assert sources.without_lines(b"a \\\n\nb") == b"\na \\\n\nb\n"
