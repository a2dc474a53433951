import shutil
import sys
from pathlib import Path

import pytest

from dynamiccl import libraries
from dynamiccl.errors import MissingPath, PluginError
from dynamiccl.serve import build


@pytest.fixture
def own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugin's sources that a test may break."""
    source = tmp_path / "plugin"
    shutil.copytree(
        build.SOURCE_DIR, source, ignore=shutil.ignore_patterns("tests", "bench", "fuzz")
    )
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    return source


def test_compiler_error_is_shown(own_source: Path, tmp_path: Path) -> None:
    # The first that is compiled, so that the rest is not.
    (own_source / "table.cpp").write_text("int broken = not_declared;\n")
    with pytest.raises(PluginError, match="not_declared") as caught:
        build.build_plugin(tmp_path / "build", targets=("table",))
    assert caught.value.exit_code == 4


def test_what_is_missing_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(PluginError, match="no C\\+\\+ compiler: no-such-compiler not found"):
        build.build_plugin(tmp_path / "build")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PluginError, match=r"no cmake .*pip install '\.\[plugin\]'"):
        build.build_plugin(tmp_path / "build")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(libraries, "BUILD_DIR", Path("nowhere"))  # `make plugin` may have run here
    with pytest.raises(MissingPath, match="make plugin"):
        build.find_plugin()
    with pytest.raises(MissingPath, match=r"elsewhere\.so"):
        build.find_plugin(tmp_path / "elsewhere.so")
