"""The library's cache: keyed, shared by processes, rebuilt when damaged; and what is said when it cannot be built."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from metrale.errors import ConfigError
from metrale.native import build
from metrale.reference import ops as reference_ops

SOURCE = "int metrale_answer(void) { return 42; }\n"
USE = (
    "import sys; from pathlib import Path; from metrale.native import build\n"
    "build.SOURCE_DIR = Path(sys.argv[1])\nassert build.library().metrale_answer() == 42"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source and an empty cache of its own."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "answer.c").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path / "src")
    monkeypatch.setenv("METRALE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load() -> ctypes.CDLL:
    return build.library.__wrapped__()


def test_a_second_load_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().metrale_answer() == 42
    (built,) = cache.iterdir()
    monkeypatch.setattr(build, "_build", None)
    assert load().metrale_answer() == 42
    assert list(cache.iterdir()) == [built]


def test_a_truncated_library_is_rebuilt(cache: Path) -> None:
    load()
    (built,) = cache.iterdir()
    whole = built.read_bytes()
    for kept in (len(whole) // 2, 0):
        built.unlink()
        built.write_bytes(whole[:kept])
        assert load().metrale_answer() == 42


def test_a_changed_source_or_header_is_another_library(cache: Path) -> None:
    load()
    (build.SOURCE_DIR / "answer.c").write_text(SOURCE.replace("42", "43"))
    assert load().metrale_answer() == 43
    (build.SOURCE_DIR / "some.h").write_text("// changed\n")
    load()
    assert len(list(cache.iterdir())) == 3


def test_processes_share_an_empty_cache(cache: Path) -> None:
    command = [sys.executable, "-c", USE, str(build.SOURCE_DIR)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_no_compiler_is_a_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match="CC names no compiler: 'no-such-compiler'; choose backend='torch'"):
        load()
    monkeypatch.setenv("CC", " ")
    assert build.find_compiler() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(cache))
    assert build.find_compiler() is None


def test_the_environment_names_the_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ConfigError, match="false does not work"):
        load()


def test_a_source_that_does_not_compile_shows_the_compiler_s_words(cache: Path) -> None:
    (build.SOURCE_DIR / "answer.c").write_text("int metrale_answer(void) { return forty_two; }\n")
    with pytest.raises(ConfigError, match="forty_two"):
        load()


def test_a_cache_that_cannot_be_written_is_a_clear_error(cache: Path) -> None:
    cache.write_text("a file, not a directory")
    with pytest.raises(ConfigError, match="set METRALE_CACHE_DIR"):
        load()


def test_the_sources_ship_with_the_package() -> None:
    assert build.SOURCE_DIR.is_dir()
    assert {path.suffix for path in build.SOURCE_DIR.iterdir()} == {".c", ".h"}


def test_both_tables_have_the_same_signatures() -> None:
    import inspect
    from dataclasses import fields

    from metrale import native

    ours, theirs = native.ops(), reference_ops()
    assert ours.name == "cpu"
    for field in fields(ours):
        operator = getattr(theirs, field.name)
        if callable(operator):
            assert inspect.signature(getattr(ours, field.name)) == inspect.signature(operator), field.name
